// The tilings of the NPU kernels as plain functions, for ctypes.
#include "npu/gemm_plan.h"
#include "npu/moe_router_plan.h"
#include "npu/norm_plan.h"
#include "npu/topk_plan.h"

using namespace deepinfer;
using namespace deepinfer::npu;

// result: rows, chunk, pitch, buffers, blocks, x_bytes, out_bytes
extern "C" void norm_tiling(int dtype, int weight, int out, int form, int add, int64_t rows, int64_t hidden_size,
                            int64_t stride, int arch, int cores, int64_t* result) {
  RmsNormArgs args{};
  args.dtype = DType(dtype);
  args.weight_dtype = DType(weight);
  args.out_dtype = DType(out);
  args.form = WeightForm(form);
  args.residual = add ? &args : nullptr;
  args.x_rows.count = rows;
  args.x_rows.dims = 1;
  args.x_rows.sizes[0] = rows;
  args.x_rows.strides[0] = stride;
  args.residual_rows = args.x_rows;
  args.hidden_size = hidden_size;
  const Chip chip{cores, buffer_bytes(arch), cores, sum_bytes(arch)};
  const RmsNormTiling tiling = tile_rms_norm(args, chip);
  const int64_t values[] = {tiling.rows, tiling.chunk, tiling.pitch, tiling.buffers, blocks_of(tiling, chip),
                            tiling.x_bytes, tiling.out_bytes};
  for (int i = 0; i < 7; ++i) result[i] = values[i];
}

// result: tokens, pitch, choices, buffers, work, blocks
extern "C" void router_tiling(int dtype, int weights, int wide, int score, int bias, int64_t tokens, int64_t groups,
                              int64_t group, int64_t topk, int arch, int cores, int64_t* result) {
  MoeRouterArgs args{};
  args.dtype = DType(dtype);
  args.weights_dtype = DType(weights);
  args.wide_ids = wide;
  args.score = Score(score);
  args.bias = bias ? &args : nullptr;
  args.tokens = tokens;
  args.num_experts = args.row_stride = groups * group;
  args.num_groups = groups;
  args.topk_groups = 1;
  args.topk = topk;
  const Chip chip{cores, buffer_bytes(arch)};
  const MoeRouterTiling tiling = tile_moe_router(args, chip);
  const int64_t values[] = {tiling.tokens, tiling.pitch, tiling.choices, tiling.buffers, tiling.work,
                            blocks_of(tiling, chip)};
  for (int i = 0; i < 6; ++i) result[i] = values[i];
}

extern "C" int64_t most_router_experts() { return kMostRouterExperts; }

// result: tile_rows, tile_columns, chunk, step, sums, blocks, a_bytes, b_bytes, out_bytes
extern "C" void gemm_tiling(int dtype, int out, int64_t rows, int64_t columns, int64_t depth, int a_dense, int b_dense,
                            int64_t a_stride, int64_t b_stride, int64_t out_stride, int arch, int cores,
                            int64_t* result) {
  MatmulArgs args{};
  args.dtype = DType(dtype);
  args.out_dtype = DType(out);
  args.rows = rows;
  args.columns = columns;
  args.depth = depth;
  args.x_stride = a_dense ? a_stride : 1;
  args.x_depth_stride = a_dense ? 1 : a_stride;
  args.column_stride = b_dense ? b_stride : 1;
  args.depth_stride = b_dense ? 1 : b_stride;
  args.out_stride = out_stride;
  const Chip chip{2 * cores, buffer_bytes(arch), cores, sum_bytes(arch)};
  const GemmTiling tiling = tile_gemm(args, chip);
  const int64_t values[] = {tiling.tile_rows, tiling.tile_columns,     tiling.chunk,   tiling.step,     tiling.sums,
                            blocks_of(tiling, chip), tiling.a_bytes, tiling.b_bytes, tiling.out_bytes};
  for (int i = 0; i < 9; ++i) result[i] = values[i];
}

// result: tile_rows, chunk, pitch, blocks, sum_bytes, addend_bytes, out_bytes
extern "C" void gemm_finish_tiling(int out, int64_t rows, int64_t columns, int64_t addend_stride, int64_t out_stride,
                                   int arch, int cores, int64_t* result) {
  MatmulArgs args{};
  args.out_dtype = DType(out);
  args.rows = rows;
  args.columns = columns;
  args.depth = 1;
  args.bias = args.addend = &args;
  args.addend_stride = addend_stride;
  args.out_stride = out_stride;
  const Chip chip{cores, buffer_bytes(arch), cores, sum_bytes(arch)};
  const GemmFinishTiling tiling = tile_gemm_finish(args, chip);
  const int64_t values[] = {tiling.tile_rows, tiling.chunk,        tiling.pitch,    blocks_of(tiling, chip),
                            tiling.sum_bytes, tiling.addend_bytes, tiling.out_bytes};
  for (int i = 0; i < 7; ++i) result[i] = values[i];
}

// result: window, chunk, room, blocks, x_bytes
extern "C" void topk_tiling(int dtype, int wide, int sorted, int table, int64_t rows, int64_t row_size, int64_t k,
                            int64_t stride, int arch, int cores, int64_t* result) {
  TopkArgs args{};
  args.dtype = DType(dtype);
  args.wide_index = wide;
  args.order = sorted ? TopkOrder::by_value : TopkOrder::by_index;
  int32_t page = 0;
  args.page_table = table ? &page : nullptr;
  args.x_rows.count = rows;
  args.x_rows.dims = 1;
  args.x_rows.sizes[0] = rows;
  args.x_rows.strides[0] = stride;
  args.row_size = row_size;
  args.k = k;
  const Chip chip{cores, buffer_bytes(arch), cores, sum_bytes(arch)};
  const TopkTiling tiling = tile_topk(args, chip);
  const int64_t values[] = {tiling.window, tiling.chunk, tiling.room, blocks_of(tiling, chip), tiling.x_bytes};
  for (int i = 0; i < 5; ++i) result[i] = values[i];
}
