// bmm and bmm_: schemas, argument checks, outputs.

#include <limits>

#include "gemm_common.h"
#include "overlap.h"

namespace deepinfer {

namespace {

void check(const char* op, MatmulArgs& args, const Tensor& a, const Tensor& b, ScalarType result) {
  DI_CHECK(a.dim() == 3, op, ": a must have shape [B, M, K], got ", shape_of(a));
  args.dtype = float_dtype(op, "a", a);
  args.experts = a.size(0);
  args.rows = a.size(1);
  args.depth = a.size(2);
  DI_CHECK(b.dim() == 3 && b.size(0) == args.experts && b.size(1) == args.depth, op, ": b must have shape [",
           args.experts, ", ", args.depth, ", N], got ", shape_of(b));
  check_like_x(op, "b", b, a, "a");
  args.columns = b.size(2);
  DI_CHECK(args.experts * args.rows <= std::numeric_limits<int32_t>::max(), op, ": more than 2^31 - 1 rows");
  args.out_dtype = result == ScalarType::Float ? DType::f32 : args.dtype;
  args.row_groups = RowGroups::batch;
  args.bias_step = BiasStep::once;
  args.scale = 1;
}

// `out` [B, M, N]: on a GPU with dense rows, on a CPU with one stride from row to row as well.
void launch(MatmulArgs& args, const Tensor& out, const Tensor& a, const Tensor& b) {
  if (args.experts == 0) return;
  args.out = const_cast<void*>(out.const_data_ptr());
  args.out_stride = a.is_cuda() ? out.stride(1) : row_stride(out);
  args.out_batch_stride = out.stride(0);
  const Tensor a_operand = a.is_cuda() ? as_operand(a) : as_tokens(a);
  const Tensor b_operand = as_operand(torch::stable::transpose(b, 1, 2));
  set_x(args, a_operand);
  args.x_stride = a.is_cuda() ? a_operand.stride(1) : args.x_stride;
  args.x_batch_stride = a_operand.stride(0);
  set_weight(args, b_operand);
  matmul(args, a);
}

bool is_written_directly(const Tensor& out) {
  return out.is_cuda() ? out.size(2) <= 1 || out.stride(2) == 1 : has_plain_rows(out);
}

Tensor bmm(const Tensor& a, const Tensor& b, std::optional<ScalarType> out_dtype, bool rows_first) {
  const char* op = "bmm";
  MatmulArgs args{};
  const ScalarType result = result_type(op, a, out_dtype);
  check(op, args, a, b, result);
  std::vector<int64_t> sizes{args.experts, args.rows, args.columns};
  if (rows_first) std::swap(sizes[0], sizes[1]);
  Tensor out = new_tensor(a, sizes, result);
  const Tensor batches = rows_first ? torch::stable::transpose(out, 0, 1) : out;
  if (is_written_directly(batches)) {
    launch(args, batches, a, b);
  } else {
    const Tensor to = new_tensor(a, {args.experts, args.rows, args.columns}, result);
    launch(args, to, a, b);
    torch::stable::copy_(out, torch::stable::transpose(to, 0, 1));
  }
  return out;
}

void bmm_(Tensor out, const Tensor& a, const Tensor& b) {
  const char* op = "bmm_";
  MatmulArgs args{};
  check(op, args, a, b, result_type(op, a, out.scalar_type()));
  DI_CHECK(out.dim() == 3 && out.size(0) == args.experts && out.size(1) == args.rows && out.size(2) == args.columns, op,
           ": out must have shape [", args.experts, ", ", args.rows, ", ", args.columns, "], got ", shape_of(out));
  check_same_device(op, "out", out, a);
  DI_CHECK(!overlaps_itself(out), op, ": out is written and must not be expanded or have elements that share memory");
  DI_CHECK(!overlap(out, a) && !overlap(out, b), op, ": out is written and must not share memory with a or b");
  if (is_written_directly(out)) return launch(args, out, a, b);
  const Tensor to = new_tensor(out, sizes_of(out), out.scalar_type());
  launch(args, to, a, b);
  torch::stable::copy_(out, to);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(deepinfer, m) {
  m.def("bmm(Tensor a, Tensor b, *, ScalarType? out_dtype=None, bool rows_first=False) -> Tensor");
  m.def("bmm_(Tensor(a!) out, Tensor a, Tensor b) -> ()");
}

static void implement(auto& m) {
  m.impl("bmm", TORCH_BOX(&bmm));
  m.impl("bmm_", TORCH_BOX(&bmm_));
}

STABLE_TORCH_LIBRARY_IMPL(deepinfer, CPU, m) { implement(m); }
STABLE_TORCH_LIBRARY_IMPL(deepinfer, CUDA, m) { implement(m); }

}  // namespace deepinfer
