#include "gemm_plan.h"

#include <algorithm>

#include "tiling.h"

namespace deepinfer::npu {

namespace {

constexpr int64_t kEdge = 16;                                 // of a fractal
constexpr int64_t kL1Bytes = 512 * 1024, kL0Bytes = 64 * 1024;  // L0A and L0B each

// Cycles of the busiest core in units of a fractal's product: a core multiplies one a cycle and, by a guess, loads 128
// bytes in it.
int64_t cost(int64_t rows, int64_t columns, int64_t tile_rows, int64_t tile_columns, int64_t cores) {
  constexpr int64_t kLoadedBytes = 128, kFractalRow = 32;
  const int64_t tiles = ceil_div(rows, tile_rows) * ceil_div(columns, tile_columns);
  const int64_t products = tile_rows / kEdge * (tile_columns / kEdge);
  const int64_t loads = (tile_rows + tile_columns) * kFractalRow / kLoadedBytes;
  return ceil_div(tiles, cores) * std::max(products, loads);
}

int64_t extent(int64_t runs, int64_t stride, int64_t length) {
  return runs == 0 || length == 0 ? 0 : (runs - 1) * stride + length;
}

}  // namespace

GemmTiling tile_gemm(const MatmulArgs& args, const Chip& chip) {
  const int64_t item = size_of(args.dtype);
  GemmTiling tiling{};
  tiling.rows = args.rows;
  tiling.columns = args.columns;
  tiling.depth = args.depth;
  const bool a_dense = a_is_dense(args), b_dense = b_is_dense(args);
  tiling.a_stride = a_dense ? args.x_stride : args.x_depth_stride;
  tiling.b_stride = b_dense ? args.column_stride : args.depth_stride;
  tiling.out_stride = args.out_stride;
  tiling.a_bytes = item * (a_dense ? extent(args.rows, tiling.a_stride, args.depth)
                                   : extent(args.depth, tiling.a_stride, args.rows));
  tiling.b_bytes = item * (b_dense ? extent(args.columns, tiling.b_stride, args.depth)
                                   : extent(args.depth, tiling.b_stride, args.columns));
  tiling.out_bytes = size_of(args.out_dtype) * extent(args.rows, args.out_stride, args.columns);

  constexpr int64_t kSizes[] = {256, 128, 64, 32, 16};
  int64_t rows = kEdge, columns = kEdge, least = 0;
  for (const int64_t m : kSizes)
    for (const int64_t n : kSizes) {
      if (m * n * 4 > chip.sum_bytes) continue;
      const int64_t value = cost(args.rows, args.columns, m, n, chip.cube_cores);
      if (least == 0 || value < least) {
        least = value;
        rows = m;
        columns = n;
      }
    }
  rows = std::min(rows, round_up(args.rows, kEdge));
  columns = std::min(columns, round_up(args.columns, kEdge));
  const int64_t depth = round_up(args.depth, kEdge);
  const int64_t step = std::min(depth, kL0Bytes / 2 / (std::max(rows, columns) * item) / kEdge * kEdge);
  const int64_t steps = std::max<int64_t>(1, kL1Bytes / 2 / ((rows + columns) * item * step));
  tiling.tile_rows = int32_t(rows);
  tiling.tile_columns = int32_t(columns);
  tiling.step = int32_t(step);
  tiling.chunk = int32_t(step * std::min(steps, ceil_div(depth, step)));
  tiling.sums = 2 * rows * columns * 4 <= chip.sum_bytes ? 2 : 1;
  return tiling;
}

int64_t blocks_of(const GemmTiling& tiling, const Chip& chip) {
  const int64_t tiles = ceil_div(tiling.rows, tiling.tile_rows) * ceil_div(tiling.columns, tiling.tile_columns);
  return std::min<int64_t>(chip.cube_cores, tiles);
}

GemmFinishTiling tile_gemm_finish(const MatmulArgs& args, const Chip& chip) {
  constexpr int64_t kLongestChunk = 4096, kMostRows = 64;
  const int64_t out = size_of(args.out_dtype), alignment = 32 / out;
  GemmFinishTiling tiling{};
  tiling.rows = args.rows;
  tiling.columns = args.columns;
  tiling.addend_stride = args.addend_stride;
  tiling.out_stride = args.out_stride;
  tiling.sum_bytes = args.depth > 0 ? args.rows * args.columns * 4 : 0;
  tiling.bias_bytes = args.bias ? args.columns * out : 0;
  tiling.addend_bytes = args.addend ? out * extent(args.rows, args.addend_stride, args.columns) : 0;
  tiling.out_bytes = out * extent(args.rows, args.out_stride, args.columns);
  tiling.scale = args.scale;
  tiling.chunk = int32_t(std::min(args.columns, kLongestChunk));
  const int64_t pitch = round_up(tiling.chunk, alignment);
  tiling.pitch = int32_t(pitch);
  // Mirrors the buffers of gemm_finish_kernel.h: sums, addends and results twice, floats of a tile, floats of the bias.
  const auto fits = [&](int64_t rows) {
    return rows * pitch * (2 * (4 + 2 * out) + 2 * 4) + pitch * (out + 4) + kRounding <= chip.buffer_bytes;
  };
  const int64_t chunks = ceil_div(args.columns, int64_t(tiling.chunk));
  const int64_t share = std::max<int64_t>(1, ceil_div(args.rows * chunks, chip.cores));
  const bool far = args.out_stride >= int64_t(1) << 30;  // further apart than one copy reaches
  int64_t rows = 1;
  while (!far && rows < std::min(share, kMostRows) && fits(rows + 1)) ++rows;
  tiling.tile_rows = int32_t(rows);
  return tiling;
}

int64_t blocks_of(const GemmFinishTiling& tiling, const Chip& chip) {
  const int64_t tiles = ceil_div(tiling.rows, tiling.tile_rows) * ceil_div(tiling.columns, tiling.chunk);
  return std::min<int64_t>(chip.cores, tiles);
}

bool needs_finish(const MatmulArgs& args) {
  return args.depth == 0 || args.bias || args.addend || args.scale != 1.0f;
}

}  // namespace deepinfer::npu
