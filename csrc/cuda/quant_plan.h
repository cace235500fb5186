// How groups inside rows are laid out over threads: for every kernel that quantises rows.
#pragma once

#include <algorithm>
#include <bit>

#include "launch.h"

namespace deepinfer::cuda {

constexpr int kGroupThreads = 256, kMostGroupThreads = 512, kMostGroupVectors = 4;

inline int whole_warps(int64_t threads) { return int(ceil_div(threads, 32) * 32); }

// `n` values are a piece; `wanted` pieces of a group are a thread's, more in groups that would not fit into a warp
// otherwise. Groups beyond that have a block. A block takes a run of a row, or some short rows.
template <typename Config>
void plan_groups(Config& c, int n, int wanted, int64_t group, int64_t across) {
  const int64_t pieces = ceil_div(group, n);
  if (pieces < 2 * wanted) wanted = 1;
  c.groups = c.rows = 1;
  c.longer = 0;
  if (pieces <= 32 * kMostGroupVectors) {
    c.lanes = int(std::min<uint64_t>(32, std::bit_ceil(uint64_t(ceil_div(pieces, wanted)))));
    c.vectors = int(std::max<int64_t>(1, ceil_div(pieces, c.lanes)));
    const int64_t most = kGroupThreads / c.lanes, runs = std::max<int64_t>(1, ceil_div(across, most));
    c.groups = int(std::max<int64_t>(1, ceil_div(across, runs)));
    if (runs == 1) c.rows = int(most / c.groups);
  } else {
    c.longer = pieces > kMostGroupThreads * kMostGroupVectors;
    c.vectors = c.longer ? 2 : std::max(2, int(ceil_div(pieces, kMostGroupThreads)));
    c.lanes = c.longer ? kMostGroupThreads : whole_warps(ceil_div(pieces, c.vectors));
  }
}

}  // namespace deepinfer::cuda
