// How groups inside rows are laid out over threads: for every kernel that quantises rows.
#pragma once

#include <algorithm>
#include <bit>

#include "../jit/cuda_launch.h"
#include "launch.h"

namespace deepinfer::cuda {

constexpr int kGroupThreads = 256, kMostGroupThreads = 512, kMostGroupVectors = 4;

inline int whole_warps(int64_t threads) { return int(ceil_div(threads, 32) * 32); }

// `n` values are a piece; `wanted` pieces of a group are a thread's, more in groups that would not fit into a warp
// otherwise. Longer groups have a block. A block takes a run of a row, or some short rows.
template <typename Config>
void plan_groups(Config& c, int n, int wanted, int64_t group, int64_t across, int items = 1) {
  const int64_t pieces = ceil_div(group, n);
  c.groups = c.rows = 1;
  c.longer = 0;
  if (pieces <= 32 * kMostGroupVectors) {
    c.lanes = int(std::min<uint64_t>(32, std::bit_ceil(uint64_t(ceil_div(pieces, wanted)))));
    c.vectors = int(std::max<int64_t>(1, ceil_div(pieces, c.lanes)));
    const int64_t most = kGroupThreads / c.lanes, runs = std::max<int64_t>(1, ceil_div(across, most * items));
    c.groups = int(std::max<int64_t>(1, ceil_div(across, runs * items)));
    if (runs == 1) c.rows = int(most / c.groups);
  } else {
    // Few threads with many loads under way each, as far as registers go.
    c.longer = pieces > kMostGroupThreads * kMostGroupVectors;
    c.vectors = c.longer || pieces <= kMostGroupThreads ? 2 : kMostGroupVectors;
    c.lanes = c.longer ? kMostGroupThreads : whole_warps(ceil_div(pieces, c.vectors));
  }
}

// Of a kernel that asks GroupPlace.
template <typename Config>
jit::Grid group_grid(const Config& c, int64_t rows, int64_t across, int items = 1) {
  constexpr int64_t kMostY = 32768;
  const int64_t blocks = ceil_div(rows, c.rows), z = ceil_div(blocks, kMostY);
  return {unsigned(ceil_div(across, c.groups * items)), unsigned(z > 1 ? kMostY : blocks), unsigned(z)};
}

}  // namespace deepinfer::cuda
