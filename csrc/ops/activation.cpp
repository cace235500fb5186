// silu_and_mul, gelu_and_mul and silu_and_mul_quant: schemas, argument checks, outputs. Only the launch depends on the
// device.

#include "activation.h"

#include <limits>

#include "../cpu/activation.h"
#include "../cpu/pages.h"
#include "../cpu/parallel.h"
#include "../cuda/activation.h"
#include "../npu/activation.h"
#include "../npu/quant.h"
#include "indices.h"
#include "quant_format.h"
#include "rows.h"

namespace deepinfer {

namespace {

constexpr int64_t kCost = 16;  // of an element: the exponential costs several times its bytes

const void* advance(const Tensor& t, int64_t elements) {
  return static_cast<const char*>(t.const_data_ptr()) + elements * int64_t(t.element_size());
}

// gate = x[..., ::2] and up = x[..., 1::2] of one tensor, as GPT-OSS stores them.
bool are_interleaved(const Tensor& gate, const Tensor& up) {
  const int64_t last = gate.dim() - 1;
  if (gate.dim() > Rows::kMaxDims + 1 || gate.size(last) <= 1 || gate.stride(last) != 2) return false;
  if (up.const_data_ptr() != advance(gate, 1)) return false;
  for (int64_t d = 0; d <= last; ++d)
    if (gate.size(d) > 1 && gate.stride(d) != up.stride(d)) return false;
  return true;
}

Tensor as_dense_floats(const char* op, const Tensor& weights, const Tensor& gate) {
  check_same_device(op, "row_weights", weights, gate);
  float_dtype(op, "row_weights", weights);
  return torch::stable::contiguous(torch::stable::to(weights, ScalarType::Float));
}

// Checks the row weights and returns them as dense float32.
Tensor dense_row_weights(const char* op, const Tensor& weights, const Tensor& gate) {
  int64_t rows = 1;
  bool leading_shape = weights.dim() == gate.dim() - 1;
  for (int64_t d = 0; d + 1 < gate.dim(); ++d) {
    rows *= gate.size(d);
    leading_shape = leading_shape && weights.size(d) == gate.size(d);
  }
  DI_CHECK(leading_shape || (weights.dim() == 1 && weights.size(0) == rows), op,
           ": row_weights must have the leading shape of gate or shape [", rows, "], got ", shape_of(weights));
  return as_dense_floats(op, weights, gate);
}

// Gate and up as the kernels read them, and what keeps the memory alive.
struct Inputs {
  GatedArgs args;
  std::vector<int64_t> sizes;  // of the result
  Tensor gate;
  std::optional<Tensor> up, weights;
};

Inputs prepare(const char* op, const GatedArgs& activation, const Tensor& gate, const std::optional<Tensor>& up) {
  Inputs in{activation, {}, gate, up, std::nullopt};
  GatedArgs& args = in.args;
  DI_CHECK(gate.dim() >= 1, op, ": gate must have at least one dimension");
  args.dtype = float_dtype(op, "gate", gate);
  const int64_t columns = gate.size(gate.dim() - 1);
  if (up) {
    DI_CHECK(same_shape(gate, *up), op, ": up must have the shape of gate, ", shape_of(gate), ", got ", shape_of(*up));
    DI_CHECK(up->scalar_type() == gate.scalar_type(), op, ": up must have the dtype of gate, ",
             name_of(gate.scalar_type()), ", got ", name_of(up->scalar_type()));
    check_same_device(op, "up", *up, gate);
  } else {
    DI_CHECK(columns % 2 == 0, op, ": the last dimension of gate must be even without up, got ", columns);
  }
  args.size = up ? columns : columns / 2;
  in.sizes = sizes_of(gate);
  in.sizes.back() = args.size;
  args.interleaved = up && !is_npu(gate) && are_interleaved(gate, *up);
  if (!args.interleaved) in.gate = with_dense_rows(gate);
  args.gate = in.gate.const_data_ptr();
  args.gate_rows = rows_of(op, in.gate);
  if (up && !args.interleaved) {
    in.up = with_dense_rows(*up);
    args.up = in.up->const_data_ptr();
    args.up_rows = rows_of(op, *in.up);
  } else if (!up) {
    args.up = advance(in.gate, args.size);
    args.up_rows = args.gate_rows;
  }
  return in;
}

void use_row_weights(Inputs& in, Tensor weights) {
  in.weights = std::move(weights);
  in.args.row_weights = static_cast<const float*>(in.weights->const_data_ptr());
}

Tensor gated_activation(const char* op, const GatedArgs& activation, const Tensor& gate,
                        const std::optional<Tensor>& up, const std::optional<Tensor>& row_weights) {
  Inputs in = prepare(op, activation, gate, up);
  GatedArgs& args = in.args;
  if (row_weights) use_row_weights(in, dense_row_weights(op, *row_weights, gate));
  Tensor out = new_tensor(gate, in.sizes, gate.scalar_type());
  args.out = out.mutable_data_ptr();
  if (gate.is_cuda()) {
    cuda::gated_activation(args, gate.get_device_index());
  } else if (is_npu(gate)) {
    npu::gated_activation(args, gate.get_device_index());
  } else {
    cpu::prefer_huge_pages(args.out, args.gate_rows.count * args.size * int64_t(gate.element_size()));
    cpu::parallel(cpu::gated_activation, args, args.gate_rows.count, args.size * kCost);
  }
  return out;
}

GatedArgs silu(const char* op, std::optional<double> limit, double alpha, double up_offset) {
  DI_CHECK(!limit || *limit >= 0, op, ": limit must not be negative, got ", *limit);
  GatedArgs args{};
  args.form = alpha == 1 && up_offset == 0 ? Gated::silu : Gated::swish;
  args.limit = limit ? float(*limit) : std::numeric_limits<float>::infinity();
  args.alpha = float(alpha);
  args.up_offset = float(up_offset);
  return args;
}

Tensor silu_and_mul(const Tensor& gate, const std::optional<Tensor>& up, std::optional<double> limit, double alpha,
                    double up_offset, const std::optional<Tensor>& row_weights) {
  const char* op = "silu_and_mul";
  return gated_activation(op, silu(op, limit, alpha, up_offset), gate, up, row_weights);
}

Tensor use_map(const char* op, GatedQuantArgs& args, const Tensor& map, const Tensor& gate) {
  const int64_t rows = args.gated.gate_rows.count;
  DI_CHECK(map.scalar_type() == ScalarType::Int, op, ": rows_to_slots must be int32, got ", name_of(map.scalar_type()));
  DI_CHECK(map.dim() == 1 && map.size(0) == rows, op, ": rows_to_slots must have shape [", rows, "], got ",
           shape_of(map));
  check_same_device(op, "rows_to_slots", map, gate);
  check_indices(op, "rows_to_slots", map, -1, args.slots);
  const Tensor dense = torch::stable::contiguous(map);
  args.rows_to_slots = static_cast<const int32_t*>(dense.const_data_ptr());
  return dense;
}

// In two steps where the kernel does not do both.
void gated_quant_on_npu(const char* op, GatedQuantArgs& args, const Tensor& gate, const std::vector<int64_t>& sizes,
                        const QuantFormat& format) {
  const int device = gate.get_device_index();
  npu::check_codes(op, format.code, format.scale, device);
  if (npu::quantizes_rows(args, device)) return npu::gated_quant(args, device);
  Tensor rows = new_tensor(gate, sizes, gate.scalar_type());
  args.gated.out = rows.mutable_data_ptr();
  npu::gated_quant(args, device);
  quantize_rows(op, rows, args.quantized);
}

std::tuple<Tensor, Tensor> silu_and_mul_quant(const Tensor& gate, const std::optional<Tensor>& up,
                                              std::optional<double> limit, double alpha, double up_offset,
                                              const std::optional<Tensor>& row_weights,
                                              const std::optional<Tensor>& rows_to_slots, int64_t group_size,
                                              std::optional<ScalarType> dtype, bool round_scale,
                                              std::optional<ScalarType> scale_dtype, std::string scale_layout) {
  const char* op = "silu_and_mul_quant";
  Inputs in = prepare(op, silu(op, limit, alpha, up_offset), gate, up);
  GatedQuantArgs args{};
  args.slots = int64_t(1) << 31;
  if (row_weights && rows_to_slots) {
    use_row_weights(in, as_dense_floats(op, *row_weights, gate));
    args.slots = 1;
    for (int64_t n : sizes_of(*row_weights)) args.slots *= n;
  } else if (row_weights) {
    use_row_weights(in, dense_row_weights(op, *row_weights, gate));
  }
  args.gated = in.args;
  std::optional<Tensor> map;
  if (rows_to_slots) map = use_map(op, args, *rows_to_slots, gate);
  const QuantFormat format = quant_format(op, dtype, round_scale, scale_dtype, scale_layout);
  QuantizedResult result = new_quantized_rows(op, gate, in.sizes, group_size, format);
  args.quantized = result.rows;
  if (gate.is_cuda()) {
    cuda::gated_quant(args, gate.get_device_index());
  } else if (is_npu(gate)) {
    gated_quant_on_npu(op, args, gate, in.sizes, format);
  } else {
    cpu::parallel(cpu::gated_quant, args, in.args.gate_rows.count, in.args.size * kCost);
  }
  return {result.codes, result.scales};
}

Tensor gelu_and_mul(const Tensor& gate, const std::optional<Tensor>& up, std::string approximate,
                    const std::optional<Tensor>& row_weights) {
  const char* op = "gelu_and_mul";
  DI_CHECK(approximate == "none" || approximate == "tanh", op, ": approximate must be none or tanh, got ",
           approximate);
  GatedArgs args{};
  args.form = approximate == "none" ? Gated::gelu : Gated::gelu_tanh;
  return gated_activation(op, args, gate, up, row_weights);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(deepinfer, m) {
  m.def(
      "silu_and_mul(Tensor gate, Tensor? up=None, *, float? limit=None, float alpha=1.0, float up_offset=0.0,"
      " Tensor? row_weights=None) -> Tensor");
  m.def(
      "silu_and_mul_quant(Tensor gate, Tensor? up=None, *, float? limit=None, float alpha=1.0, float up_offset=0.0,"
      " Tensor? row_weights=None, Tensor? rows_to_slots=None, int group_size=128, ScalarType? dtype=None,"
      " bool round_scale=False, ScalarType? scale_dtype=None, str scale_layout=\"row\") -> (Tensor, Tensor)");
  m.def(
      "gelu_and_mul(Tensor gate, Tensor? up=None, *, str approximate=\"none\", Tensor? row_weights=None) -> Tensor");
}

static void implement(auto& m) {
  m.impl("silu_and_mul", TORCH_BOX(&silu_and_mul));
  m.impl("silu_and_mul_quant", TORCH_BOX(&silu_and_mul_quant));
  m.impl("gelu_and_mul", TORCH_BOX(&gelu_and_mul));
}

STABLE_TORCH_LIBRARY_IMPL(deepinfer, CPU, m) { implement(m); }
STABLE_TORCH_LIBRARY_IMPL(deepinfer, CUDA, m) { implement(m); }
STABLE_TORCH_LIBRARY_IMPL(deepinfer, PrivateUse1, m) { implement(m); }

}  // namespace deepinfer
