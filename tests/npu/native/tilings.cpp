// The tilings of the NPU kernels as plain functions, for ctypes.
#include "npu/gemm_plan.h"
#include "npu/moe_router_plan.h"
#include "npu/norm_plan.h"
#include "npu/quant_plan.h"
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

// result: tokens, pitch, choices, buffers, work, blocks, whether a token fits
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
                            blocks_of(tiling, chip), router_fits(args, chip)};
  for (int i = 0; i < 7; ++i) result[i] = values[i];
}

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

namespace {

Scales dense_scales(ScaleType type, int64_t down, int64_t across) {
  const int64_t words = type == ScaleType::packed ? (across + 3) / 4 : across;
  return {.data = nullptr, .rows = down, .matrix = down * words, .row = uint32_t(words), .column = 1, .across = across,
          .type = type};
}

}  // namespace

// One matrix. result: pieces, chunk_rows, chunk, pitch, blocks, strided_bytes, dense_bytes, scale_bytes
extern "C" void quant_tiling(int back, int dtype, int code, int scale, int given, int64_t rows, int64_t columns,
                             int64_t block_rows, int64_t block_columns, int arch, int cores, int64_t* result) {
  Blocks blocks{};
  blocks.matrices.count = 1;
  blocks.rows = rows;
  blocks.columns = columns;
  blocks.row_stride = back && Code(code) == Code::e2m1 ? columns / 2 : columns;
  blocks.block_rows = block_rows;
  blocks.block_columns = block_columns;
  blocks.down = (rows - 1) / block_rows + 1;
  blocks.across = (columns - 1) / block_columns + 1;
  const Scales scales = dense_scales(ScaleType(scale), blocks.down, blocks.across);
  const Chip chip{cores, buffer_bytes(arch)};
  QuantTiling tiling{};
  if (back) {
    DequantizeArgs args{};
    args.blocks = blocks;
    args.scales = scales;
    args.dtype = DType(dtype);
    args.code = Code(code);
    tiling = tile_dequantize(args, chip);
  } else {
    QuantizeArgs args{};
    args.codes = &args;
    args.blocks = blocks;
    args.scales = scales;
    args.dtype = DType(dtype);
    args.code = Code(code);
    args.given = given;
    tiling = tile_quantize(args, chip);
  }
  const int64_t values[] = {tiling.pieces, tiling.chunk_rows, tiling.chunk, tiling.pitch, blocks_of(tiling, chip),
                            tiling.strided_bytes, tiling.dense_bytes, tiling.scale_bytes};
  for (int i = 0; i < 8; ++i) result[i] = values[i];
}

// result: whether rows are quantised on the core, rows, pitch, buffers, out_bytes, scale_bytes
extern "C" void norm_quant_tiling(int dtype, int add, int code, int64_t rows, int64_t hidden_size, int64_t group,
                                  int arch, int cores, int64_t* result) {
  RmsNormArgs args{};
  args.dtype = args.weight_dtype = args.out_dtype = DType(dtype);
  args.residual = add ? &args : nullptr;
  args.x_rows.count = rows;
  args.x_rows.dims = 1;
  args.x_rows.sizes[0] = rows;
  args.x_rows.strides[0] = hidden_size;
  args.residual_rows = args.x_rows;
  args.hidden_size = hidden_size;
  args.quantized = {&args, dense_scales(ScaleType::f32, rows, (hidden_size - 1) / group + 1), group, Code(code)};
  const Chip chip{cores, buffer_bytes(arch)};
  const RmsNormTiling tiling = tile_rms_norm(args, chip);
  const int64_t values[] = {quantizes_rows(args, chip), tiling.rows, tiling.pitch, tiling.buffers, tiling.out_bytes,
                            tiling.scale_bytes};
  for (int i = 0; i < 6; ++i) result[i] = values[i];
}
