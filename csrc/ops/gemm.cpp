// gemm and gemm_: schemas, argument checks, outputs.

#include "../cuda/gemm.h"
#include "../cuda/gemm_plan.h"
#include "gemm_common.h"
#include "overlap.h"
#include "rows.h"

namespace deepinfer {

namespace {

constexpr int64_t kMostSize = std::numeric_limits<int32_t>::max();

void check(const char* op, MatmulArgs& args, const Tensor& a, const Tensor& b, const std::optional<Tensor>& bias,
           double scale, ScalarType result) {
  DI_CHECK(a.dim() == 2, op, ": a must have shape [M, K], got ", shape_of(a));
  args.dtype = float_dtype(op, "a", a);
  args.rows = a.size(0);
  args.depth = a.size(1);
  DI_CHECK(b.dim() == 2 && b.size(0) == args.depth, op, ": b must have shape [", args.depth, ", N], got ",
           shape_of(b));
  check_like_x(op, "b", b, a, "a");
  args.columns = b.size(1);
  DI_CHECK(args.rows <= kMostSize && args.columns <= kMostSize && args.depth <= kMostSize, op,
           ": M, N and K must not exceed ", kMostSize, ", got ", args.rows, ", ", args.columns, ", ", args.depth);
  if (bias) {
    DI_CHECK(bias->dim() == 1 && bias->size(0) == args.columns, op, ": bias must have shape [", args.columns,
             "], got ", shape_of(*bias));
    DI_CHECK(bias->scalar_type() == result, op, ": bias must have the dtype of the result, ", name_of(result),
             ", got ", name_of(bias->scalar_type()));
    check_same_device(op, "bias", *bias, a);
  }
  args.out_dtype = result == ScalarType::Float ? DType::f32 : args.dtype;
  args.bias_step = BiasStep::once;
  args.experts = 1;
  args.scale = float(scale);
}

// `out` has dense rows, and so has `addend`.
void launch(MatmulArgs& args, const Tensor& out, const Tensor& a, const Tensor& b, const std::optional<Tensor>& bias,
            const Tensor* addend) {
  std::optional<Tensor> dense_bias;
  if (bias) args.bias = dense_bias.emplace(torch::stable::contiguous(*bias)).const_data_ptr();
  if (addend) {
    args.addend = addend->const_data_ptr();
    args.addend_stride = addend->stride(0);
  }
  args.out = const_cast<void*>(out.const_data_ptr());
  args.out_stride = out.stride(0);
  const Tensor a_operand = as_tokens(a), b_operand = as_operand(torch::stable::transpose(b, 0, 1));
  set_x(args, a_operand);
  set_weight(args, b_operand);
  matmul(args, a);
}

Tensor gemm(const Tensor& a, const Tensor& b, const std::optional<Tensor>& bias, const std::optional<Tensor>& c,
            double scale, std::optional<ScalarType> out_dtype) {
  const char* op = "gemm";
  MatmulArgs args{};
  const ScalarType result = result_type(op, a, out_dtype);
  check(op, args, a, b, bias, scale, result);
  std::optional<Tensor> addend;
  if (c) {
    DI_CHECK(c->dim() == 2 && c->size(0) == args.rows && c->size(1) == args.columns, op, ": c must have shape [",
             args.rows, ", ", args.columns, "], got ", shape_of(*c));
    DI_CHECK(c->scalar_type() == result, op, ": c must have the dtype of the result, ", name_of(result), ", got ",
             name_of(c->scalar_type()));
    check_same_device(op, "c", *c, a);
    addend = with_dense_rows(*c);
  }
  Tensor out = new_tensor(a, {args.rows, args.columns}, result);
  launch(args, out, a, b, bias, addend ? &*addend : nullptr);
  return out;
}

void gemm_(Tensor out, const Tensor& a, const Tensor& b, const std::optional<Tensor>& bias, double scale,
           bool accumulate) {
  const char* op = "gemm_";
  MatmulArgs args{};
  check(op, args, a, b, bias, scale, result_type(op, a, out.scalar_type()));
  DI_CHECK(out.dim() == 2 && out.size(0) == args.rows && out.size(1) == args.columns, op, ": out must have shape [",
           args.rows, ", ", args.columns, "], got ", shape_of(out));
  check_same_device(op, "out", out, a);
  DI_CHECK(!overlaps_itself(out), op,
           ": out is written and must not be expanded or have elements that share memory");
  DI_CHECK(!overlap(out, a) && !overlap(out, b) && !(bias && overlap(out, *bias)), op,
           ": out is written and must not share memory with a, b or bias");
  const bool dense = args.columns <= 1 || out.stride(1) == 1;
  const Tensor to = dense        ? out
                    : accumulate ? torch::stable::contiguous(out)
                                 : new_tensor(out, sizes_of(out), out.scalar_type());
  launch(args, to, a, b, bias, accumulate ? &to : nullptr);
  if (!dense) torch::stable::copy_(out, to);
}

// For measurements, see cuda/gemm.h.
void force_tiling(int64_t tile_n, int64_t tile_m, int64_t warpgroups, int64_t cluster, int64_t split, int64_t streamed,
                  int64_t blocks, bool tokens_as_rows, bool in_turn) {
  cuda::force_tiling({int(tile_n), int(tile_m), int(warpgroups), int(cluster), int(split), int(streamed), int(blocks),
                      tokens_as_rows, in_turn});
}

// What would be chosen, for tests: the facts of the tiling and the shared memory of a block.
std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t> tiling(
    int64_t rows, int64_t columns, int64_t depth, int64_t experts, bool weight_dense_k, bool x_dense_k, bool e4m3,
    int64_t out_bytes, int64_t multiprocessors) {
  const cuda::GemmResult result{int(out_bytes), out_bytes == 2, e4m3};
  const RowGroups groups = experts > 0 ? RowGroups::ends : RowGroups::none;
  const cuda::GemmShapeFacts shape{rows, columns, depth, experts, weight_dense_k, x_dense_k, groups, result};
  const cuda::GemmTiling t = cuda::choose_tiling(shape, int(multiprocessors));
  return {t.tile_n, t.tile_m,   t.warpgroups, t.stages,  t.cluster,
          t.split,  t.streamed, t.blocks,     t.tokens_as_rows, t.in_turn,
          cuda::gemm_shared_bytes(t, result, experts > 0)};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(deepinfer, m) {
  m.def(
      "gemm(Tensor a, Tensor b, *, Tensor? bias=None, Tensor? c=None, float scale=1.0, ScalarType? out_dtype=None)"
      " -> Tensor");
  m.def(
      "gemm_(Tensor(a!) out, Tensor a, Tensor b, *, Tensor? bias=None, float scale=1.0, bool accumulate=False)"
      " -> ()");
  m.def(
      "_gemm_tiling(int rows, int columns, int depth, int experts, bool weight_dense_k, bool x_dense_k, bool e4m3,"
      " int out_bytes, int multiprocessors) -> (int, int, int, int, int, int, int, int, int, int, int)");
  m.def(
      "_gemm_force_tiling(int tile_n, int tile_m, int warpgroups, int cluster, int split, int streamed, int blocks,"
      " bool tokens_as_rows=False, bool in_turn=False) -> ()");
}

static void implement(auto& m) {
  m.impl("gemm", TORCH_BOX(&gemm));
  m.impl("gemm_", TORCH_BOX(&gemm_));
}

STABLE_TORCH_LIBRARY_IMPL(deepinfer, CPU, m) { implement(m); }
STABLE_TORCH_LIBRARY_IMPL(deepinfer, CUDA, m) { implement(m); }
STABLE_TORCH_LIBRARY_IMPL(deepinfer, PrivateUse1, m) { implement(m); }
STABLE_TORCH_LIBRARY_IMPL(deepinfer, CompositeExplicitAutograd, m) {
  m.impl("_gemm_tiling", TORCH_BOX(&tiling));
  m.impl("_gemm_force_tiling", TORCH_BOX(&force_tiling));
}

}  // namespace deepinfer
