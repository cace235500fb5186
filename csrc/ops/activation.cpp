// silu_and_mul and gelu_and_mul: schemas, argument checks, outputs. Only the launch depends on the device.

#include "activation.h"

#include <limits>

#include "../cpu/activation.h"
#include "../cpu/pages.h"
#include "../cpu/parallel.h"
#include "../cuda/activation.h"
#include "check.h"
#include "rows.h"

namespace deepinfer {

namespace {

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
  check_same_device(op, "row_weights", weights, gate);
  float_dtype(op, "row_weights", weights);
  return torch::stable::contiguous(torch::stable::to(weights, ScalarType::Float));
}

void launch(const GatedArgs& args, const Tensor& gate) {
  if (gate.is_cuda()) return cuda::gated_activation(args, gate.get_device_index());
  cpu::prefer_huge_pages(args.out, args.gate_rows.count * args.size * int64_t(gate.element_size()));
  // The exponential makes an element cost several times its bytes.
  cpu::parallel(cpu::gated_activation, args, args.gate_rows.count, args.size * 16);
}

Tensor gated_activation(const char* op, GatedArgs args, const Tensor& gate, const std::optional<Tensor>& up,
                        const std::optional<Tensor>& row_weights) {
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
  std::optional<Tensor> weights;
  if (row_weights) weights = dense_row_weights(op, *row_weights, gate);
  args.row_weights = weights ? static_cast<const float*>(weights->const_data_ptr()) : nullptr;

  std::vector<int64_t> sizes = sizes_of(gate);
  sizes.back() = args.size;
  Tensor out = new_tensor(gate, sizes, gate.scalar_type());
  args.out = out.mutable_data_ptr();
  args.interleaved = up && are_interleaved(gate, *up);
  const Tensor dense_gate = args.interleaved ? gate : with_dense_rows(gate);
  args.gate = dense_gate.const_data_ptr();
  args.gate_rows = rows_of(op, dense_gate);
  std::optional<Tensor> dense_up;
  if (up && !args.interleaved) {
    dense_up = with_dense_rows(*up);
    args.up = dense_up->const_data_ptr();
    args.up_rows = rows_of(op, *dense_up);
  } else if (!up) {
    args.up = advance(dense_gate, args.size);
    args.up_rows = args.gate_rows;
  }
  launch(args, gate);
  return out;
}

Tensor silu_and_mul(const Tensor& gate, const std::optional<Tensor>& up, std::optional<double> limit, double alpha,
                    double up_offset, const std::optional<Tensor>& row_weights) {
  const char* op = "silu_and_mul";
  DI_CHECK(!limit || *limit >= 0, op, ": limit must not be negative, got ", *limit);
  GatedArgs args{};
  args.form = alpha == 1 && up_offset == 0 ? Gated::silu : Gated::swish;
  args.limit = limit ? float(*limit) : std::numeric_limits<float>::infinity();
  args.alpha = float(alpha);
  args.up_offset = float(up_offset);
  return gated_activation(op, args, gate, up, row_weights);
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
      "gelu_and_mul(Tensor gate, Tensor? up=None, *, str approximate=\"none\", Tensor? row_weights=None) -> Tensor");
}

static void implement(auto& m) {
  m.impl("silu_and_mul", TORCH_BOX(&silu_and_mul));
  m.impl("gelu_and_mul", TORCH_BOX(&gelu_and_mul));
}

STABLE_TORCH_LIBRARY_IMPL(deepinfer, CPU, m) { implement(m); }
STABLE_TORCH_LIBRARY_IMPL(deepinfer, CUDA, m) { implement(m); }

}  // namespace deepinfer
