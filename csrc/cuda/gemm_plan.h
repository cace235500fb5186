// The choice of tiles, a pure function of the shape and of the device.
#pragma once

#include "../ops/gemm.h"

namespace deepinfer::cuda {

// How the result is written.
struct GemmResult {
  int staged_bytes;  // of an element on its way out
  bool bulk;         // by the copy engine, where blocks do not share a tile
  bool scaled;       // e4m3 operands, with scales
  bool column_scales = false;  // of the weight: for each column
};

struct GemmShapeFacts {
  int64_t rows, columns, depth, experts;  // rows of all experts
  bool weight_dense_k, x_dense_k;
  RowGroups groups;
  GemmResult result;
};

// See GemmConfig.
struct GemmTiling {
  int tile_n, tile_m, warpgroups, stages, cluster, split, streamed, blocks;
  int tokens_as_rows = 0, in_turn = 0;
};

// How the tiles of a streamed product are shared out, see GemmKernelArgs, and the scratch for the sums of parts.
struct GemmShares {
  int whole, left, share, longer, clusters;
  int64_t partial_bytes;
};
GemmShares share_out(const GemmTiling& tiling, int64_t rows, int64_t columns, int64_t stages, int multiprocessors);

GemmTiling choose_tiling(const GemmShapeFacts& facts, int multiprocessors);

// The tokens that a warpgroup writes at once.
int gemm_chunk(const GemmTiling& tiling);

// The dynamic shared memory of a block, and as many stages as fit.
int gemm_shared_bytes(const GemmTiling& tiling, const GemmResult& result, bool grouped);
int gemm_stages(const GemmTiling& tiling, const GemmResult& result, bool grouped);

}  // namespace deepinfer::cuda
