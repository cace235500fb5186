// rms_norm_quant and add_rms_norm_quant: schemas, argument checks, outputs. Only the launch depends on the device.

#include "../cuda/norm.h"
#include "../npu/norm.h"
#include "../npu/quant.h"
#include "norm_op.h"
#include "quant_format.h"
#include "rows.h"

namespace deepinfer {

namespace {

bool is_one_kernel(const RmsNormArgs& args, const Tensor& x) {
  if (x.is_cuda()) return cuda::quantizes_rows(args);
  return !is_npu(x) || npu::quantizes_rows(args, x.get_device_index());
}

// The norm that `args` describes, quantised; in two steps where no kernel does both.
std::tuple<Tensor, Tensor> quantized_norm(const char* op, RmsNormArgs& args, const NormInputs& inputs, const Tensor& x,
                                          int64_t group_size, const QuantFormat& format) {
  QuantizedResult result = new_quantized_rows(op, x, sizes_of(x), group_size, format);
  args.quantized = result.rows;
  if (is_npu(x)) npu::check_codes(op, format.code, format.scale, x.get_device_index());
  if (is_one_kernel(args, x)) {
    launch_norm(args, x);
    return {result.codes, result.scales};
  }
  Tensor normed = new_tensor(x, sizes_of(x), inputs.out_dtype());
  args.out = normed.mutable_data_ptr();
  launch_norm(args, x);
  quantize_rows(op, normed, result.rows);
  return {result.codes, result.scales};
}

std::tuple<Tensor, Tensor> rms_norm_quant(const Tensor& x, const std::optional<Tensor>& weight, double eps,
                                          const std::string& form, int64_t group_size, std::optional<ScalarType> dtype,
                                          bool round_scale, std::optional<ScalarType> scale_dtype,
                                          const std::string& scale_layout) {
  const char* op = "rms_norm_quant";
  RmsNormArgs args{};
  const NormInputs inputs(op, args, x, std::nullopt, weight, eps, form);
  const QuantFormat format = quant_format(op, dtype, round_scale, scale_dtype, scale_layout);
  return quantized_norm(op, args, inputs, x, group_size, format);
}

std::tuple<Tensor, Tensor, Tensor> add_rms_norm_quant(const Tensor& x, const Tensor& residual,
                                                      const std::optional<Tensor>& weight, double eps,
                                                      const std::string& form, int64_t group_size,
                                                      std::optional<ScalarType> dtype, bool round_scale,
                                                      std::optional<ScalarType> scale_dtype,
                                                      const std::string& scale_layout) {
  const char* op = "add_rms_norm_quant";
  RmsNormArgs args{};
  const NormInputs inputs(op, args, x, residual, weight, eps, form);
  const QuantFormat format = quant_format(op, dtype, round_scale, scale_dtype, scale_layout);
  Tensor sum = new_sum(args, x);
  auto [codes, scales] = quantized_norm(op, args, inputs, x, group_size, format);
  return {codes, scales, sum};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(deepinfer, m) {
  m.def(
      "rms_norm_quant(Tensor x, Tensor? weight, float eps, str weight_form=\"cast_mul\", *, int group_size=128,"
      " ScalarType? dtype=None, bool round_scale=False, ScalarType? scale_dtype=None, str scale_layout=\"row\")"
      " -> (Tensor, Tensor)");
  m.def(
      "add_rms_norm_quant(Tensor x, Tensor residual, Tensor? weight, float eps, str weight_form=\"cast_mul\", *,"
      " int group_size=128, ScalarType? dtype=None, bool round_scale=False, ScalarType? scale_dtype=None,"
      " str scale_layout=\"row\") -> (Tensor, Tensor, Tensor)");
}

static void implement(auto& m) {
  m.impl("rms_norm_quant", TORCH_BOX(&rms_norm_quant));
  m.impl("add_rms_norm_quant", TORCH_BOX(&add_rms_norm_quant));
}

STABLE_TORCH_LIBRARY_IMPL(deepinfer, CPU, m) { implement(m); }
STABLE_TORCH_LIBRARY_IMPL(deepinfer, CUDA, m) { implement(m); }
STABLE_TORCH_LIBRARY_IMPL(deepinfer, PrivateUse1, m) { implement(m); }

}  // namespace deepinfer
