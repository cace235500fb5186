// rms_norm and add_rms_norm: schemas, argument checks, outputs. Only the launch depends on the device.

#include "norm_op.h"

#include "../cpu/norm.h"
#include "../cpu/parallel.h"
#include "../cuda/norm.h"
#include "../npu/norm.h"
#include "check.h"
#include "rows.h"

namespace deepinfer {

WeightForm weight_form(const char* op, const std::string& name) {
  if (name == "cast_mul") return WeightForm::cast_mul;
  if (name == "mul_cast") return WeightForm::mul_cast;
  if (name == "one_plus") return WeightForm::one_plus;
  if (name == "none") return WeightForm::none;
  fail(op, ": weight_form must be cast_mul, mul_cast, one_plus or none, got ", name);
}

ScalarType check_norm(const char* op, const Tensor& x, int64_t hidden_size, const char* weight_name,
                      const std::optional<Tensor>& weight, double eps, WeightForm form,
                      const std::string& form_name) {
  DI_CHECK(eps >= 0, op, ": eps must not be negative, got ", eps);
  if (form == WeightForm::none) {
    DI_CHECK(!weight, op, ": ", weight_name, " must be None with weight_form none");
    return x.scalar_type();
  }
  DI_CHECK(weight.has_value(), op, ": ", weight_name, " is required with weight_form ", form_name);
  DI_CHECK(weight->dim() == 1 && weight->size(0) == hidden_size, op, ": ", weight_name, " must have shape [",
           hidden_size, "], got ", shape_of(*weight));
  check_same_device(op, weight_name, *weight, x);
  float_dtype(op, weight_name, *weight);
  return form == WeightForm::cast_mul ? promote(x.scalar_type(), weight->scalar_type()) : x.scalar_type();
}

NormInputs::NormInputs(const char* op, RmsNormArgs& args, const Tensor& x, const std::optional<Tensor>& residual,
                       const std::optional<Tensor>& weight, double eps, const std::string& form) {
  if (residual) {
    DI_CHECK(same_shape(x, *residual), op, ": residual must have the shape of x, ", shape_of(x), ", got ",
             shape_of(*residual));
    DI_CHECK(residual->scalar_type() == x.scalar_type(), op, ": residual must have the dtype of x, ",
             name_of(x.scalar_type()), ", got ", name_of(residual->scalar_type()));
    check_same_device(op, "residual", *residual, x);
  }
  DI_CHECK(x.dim() >= 1, op, ": x must have at least one dimension");
  args.dtype = float_dtype(op, "x", x);
  args.form = weight_form(op, form);
  args.hidden_size = x.size(x.dim() - 1);
  DI_CHECK(args.hidden_size > 0, op, ": the last dimension of x must not be empty");
  out_dtype_ = check_norm(op, x, args.hidden_size, "weight", weight, eps, args.form, form);
  args.eps = float(eps);
  args.weight_dtype = weight ? float_dtype(op, "weight", *weight) : args.dtype;
  args.out_dtype = out_dtype_ == x.scalar_type() ? args.dtype : DType::f32;
  args.x = x_.emplace(with_dense_rows(x)).const_data_ptr();
  args.x_rows = rows_of(op, *x_);
  if (weight) args.weight = weight_.emplace(with_dense_rows(*weight)).const_data_ptr();
  if (residual) {
    args.residual = residual_.emplace(with_dense_rows(*residual)).const_data_ptr();
    args.residual_rows = rows_of(op, *residual_);
  }
}

Tensor new_sum(RmsNormArgs& args, const Tensor& x) {
  Tensor sum = new_tensor(x, sizes_of(x), x.scalar_type());
  args.sum = sum.mutable_data_ptr();
  return sum;
}

void launch_norm(const RmsNormArgs& args, const Tensor& x) {
  if (x.is_cuda()) return cuda::rms_norm(args, x.get_device_index());
  if (is_npu(x)) return npu::rms_norm(args, x.get_device_index());
  cpu::parallel(cpu::rms_norm, args, args.x_rows.count, args.hidden_size * 4);
}

Tensor rms_norm(const Tensor& x, const std::optional<Tensor>& weight, double eps, const std::string& form) {
  RmsNormArgs args{};
  const NormInputs inputs("rms_norm", args, x, std::nullopt, weight, eps, form);
  Tensor out = new_tensor(x, sizes_of(x), inputs.out_dtype());
  args.out = out.mutable_data_ptr();
  launch_norm(args, x);
  return out;
}

std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual, const std::optional<Tensor>& weight,
                                        double eps, const std::string& form) {
  RmsNormArgs args{};
  const NormInputs inputs("add_rms_norm", args, x, residual, weight, eps, form);
  Tensor out = new_tensor(x, sizes_of(x), inputs.out_dtype()), sum = new_sum(args, x);
  args.out = out.mutable_data_ptr();
  launch_norm(args, x);
  return {out, sum};
}

STABLE_TORCH_LIBRARY_FRAGMENT(deepinfer, m) {
  m.def("rms_norm(Tensor x, Tensor? weight, float eps, str weight_form=\"cast_mul\") -> Tensor");
  m.def(
      "add_rms_norm(Tensor x, Tensor residual, Tensor? weight, float eps, str weight_form=\"cast_mul\")"
      " -> (Tensor, Tensor)");
}

static void implement(auto& m) {
  m.impl("rms_norm", TORCH_BOX(&rms_norm));
  m.impl("add_rms_norm", TORCH_BOX(&add_rms_norm));
}

STABLE_TORCH_LIBRARY_IMPL(deepinfer, CPU, m) { implement(m); }
STABLE_TORCH_LIBRARY_IMPL(deepinfer, CUDA, m) { implement(m); }
STABLE_TORCH_LIBRARY_IMPL(deepinfer, PrivateUse1, m) { implement(m); }

}  // namespace deepinfer
