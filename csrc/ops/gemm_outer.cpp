// grouped_outer and grouped_outer_: schemas, argument checks, outputs.

#include <limits>

#include "../cuda/gemm.h"
#include "gemm_common.h"
#include "overlap.h"

namespace deepinfer {

namespace {

// Returns the dense storage of offsets, which args points to.
Tensor check(const char* op, MatmulArgs& args, const Tensor& x, const Tensor& y, const Tensor& offsets,
             ScalarType result) {
  DI_CHECK(x.dim() == 2, op, ": x must have shape [P, M], got ", shape_of(x));
  args.dtype = float_dtype(op, "x", x);
  args.depth = x.size(0);
  args.rows = x.size(1);
  DI_CHECK(y.dim() == 2 && y.size(0) == args.depth, op, ": y must have shape [", args.depth, ", N], got ", shape_of(y));
  check_like_x(op, "y", y, x);
  args.columns = y.size(1);
  DI_CHECK(offsets.scalar_type() == ScalarType::Int, op, ": offsets must be int32, got ",
           name_of(offsets.scalar_type()));
  DI_CHECK(offsets.dim() == 1, op, ": offsets must have shape [E], got ", shape_of(offsets));
  check_same_device(op, "offsets", offsets, x);
  args.experts = offsets.size(0);
  DI_CHECK(args.experts * args.rows <= std::numeric_limits<int32_t>::max(), op, ": more than 2^31 - 1 rows");
  args.out_dtype = result == ScalarType::Float ? DType::f32 : args.dtype;
  args.row_groups = RowGroups::depth;
  args.scale = 1;
  const Tensor dense_offsets = torch::stable::contiguous(offsets);
  args.groups = static_cast<const int32_t*>(dense_offsets.const_data_ptr());
  if (!x.is_cuda()) {
    args.row_groups = RowGroups::ends;
    args.rows = x.size(0);
    check_groups(op, "offsets", args);
    args.rows = x.size(1);
    args.row_groups = RowGroups::depth;
  }
  return dense_offsets;
}

// [P, M], dense along M, as the copy engine takes it.
Tensor with_suitable_rows(const Tensor& t) {
  return as_operand(t.size(1) <= 1 || t.stride(1) == 1 ? t : torch::stable::contiguous(t));
}

void launch_on_cpu(const MatmulArgs& args, Tensor x, Tensor y) {
  int64_t begin = 0;
  for (int64_t e = 0; e < args.experts; ++e) {
    const int64_t end = args.groups[e], offset = e * args.out_batch_stride * element_size(args.out_dtype);
    const Tensor rows = as_tokens(torch::stable::transpose(torch::stable::narrow(x, 0, begin, end - begin), 0, 1));
    MatmulArgs one = args;
    one.row_groups = RowGroups::none;
    one.groups = nullptr;
    one.experts = 1;
    one.depth = end - begin;
    one.out = static_cast<char*>(args.out) + offset;
    if (args.addend) one.addend = static_cast<const char*>(args.addend) + offset;
    set_x(one, rows);
    const Tensor columns = torch::stable::transpose(torch::stable::narrow(y, 0, begin, end - begin), 0, 1);
    set_weight(one, columns);
    matmul(one, x);
    begin = end;
  }
}

// `out` [E, M, N] with dense rows.
void launch(MatmulArgs& args, const Tensor& out, const Tensor& x, const Tensor& y, bool accumulate) {
  if (args.experts == 0) return;
  args.out = const_cast<void*>(out.const_data_ptr());
  args.out_stride = out.stride(1);
  args.out_batch_stride = out.stride(0);
  if (accumulate) {
    args.addend = args.out;
    args.addend_stride = args.out_stride;
  }
  if (!x.is_cuda()) return launch_on_cpu(args, x, y);
  const Tensor x_operand = with_suitable_rows(x), y_operand = with_suitable_rows(y);
  set_x(args, torch::stable::transpose(x_operand, 0, 1));
  set_weight(args, torch::stable::transpose(y_operand, 0, 1));
  matmul(args, x);
}

Tensor grouped_outer(const Tensor& x, const Tensor& y, const Tensor& offsets, std::optional<ScalarType> out_dtype) {
  const char* op = "grouped_outer";
  MatmulArgs args{};
  const ScalarType result = result_type(op, x, out_dtype, "x");
  const Tensor dense_offsets = check(op, args, x, y, offsets, result);
  const Tensor out = new_tensor(x, {args.experts, args.rows, args.columns}, result);
  launch(args, out, x, y, false);
  return out;
}

void grouped_outer_(Tensor out, const Tensor& x, const Tensor& y, const Tensor& offsets, bool accumulate) {
  const char* op = "grouped_outer_";
  MatmulArgs args{};
  const Tensor dense_offsets = check(op, args, x, y, offsets, result_type(op, x, out.scalar_type(), "x"));
  DI_CHECK(out.dim() == 3 && out.size(0) == args.experts && out.size(1) == args.rows && out.size(2) == args.columns, op,
           ": out must have shape [", args.experts, ", ", args.rows, ", ", args.columns, "], got ", shape_of(out));
  check_same_device(op, "out", out, x);
  DI_CHECK(!overlaps_itself(out), op, ": out is written and must not be expanded or have elements that share memory");
  DI_CHECK(!overlap(out, x) && !overlap(out, y) && !overlap(out, offsets), op,
           ": out is written and must not share memory with another argument");
  const bool dense = out.size(2) <= 1 || out.stride(2) == 1;
  const Tensor to = dense ? out : torch::stable::contiguous(out);
  launch(args, to, x, y, accumulate);
  if (!dense) torch::stable::copy_(out, to);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(deepinfer, m) {
  m.def("grouped_outer(Tensor x, Tensor y, Tensor offsets, *, ScalarType? out_dtype=None) -> Tensor");
  m.def("grouped_outer_(Tensor(a!) out, Tensor x, Tensor y, Tensor offsets, *, bool accumulate=False) -> ()");
}

static void implement(auto& m) {
  m.impl("grouped_outer", TORCH_BOX(&grouped_outer));
  m.impl("grouped_outer_", TORCH_BOX(&grouped_outer_));
}

STABLE_TORCH_LIBRARY_IMPL(deepinfer, CPU, m) { implement(m); }
STABLE_TORCH_LIBRARY_IMPL(deepinfer, CUDA, m) { implement(m); }

}  // namespace deepinfer
