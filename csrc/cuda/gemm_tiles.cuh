// What all matrix kernels share: which tile of the result a block works on, and what becomes of a sum.
#pragma once

#include "gemm_config.h"
#include "hopper.cuh"

namespace deepinfer {

struct GemmTile {
  int expert;
  int n, m;  // its first column and row
  int end;   // of the rows that may be written
  int k, k_end;  // by depth: the part of k that makes it

  template <int most> DEVICE int rows() const { return end - m < most ? end - m : most; }
};

// Tiles side by side along n count as one for the blocks of a cluster that share tokens. They come in bands of a few
// tiles along m: what the processors work on at one time stays in the L2 cache.
DEVICE void place_in_bands(int i, int n_tiles, int m_tiles, int& n, int& m) {
  constexpr int band = 8;
  const int before = i / (band * n_tiles) * band, height = m_tiles - before < band ? m_tiles - before : band;
  const int rest = i - before * n_tiles;
  m = before + rest % height;
  n = rest / height;
}

template <GemmConfig c>
struct GemmTiles {
  static constexpr bool apart = c.groups == RowGroups::batch || c.groups == RowGroups::depth;  // a result each
  static constexpr bool counted = c.groups == RowGroups::ends || c.groups == RowGroups::counts;  // on the device
  static constexpr int side_by_side = c.split ? 1 : c.cluster;
  static constexpr int kMostExperts = 1024;

  int count;
  const int32_t* tile_ends;  // of the tiles of each expert, in shared memory
  const MatmulArgs* problem;

  DEVICE int first() const { return blockIdx.x / c.cluster; }
  DEVICE int step() const { return gridDim.x / c.cluster; }
  DEVICE int n_tiles() const {
    return int((problem->columns + c.tile_n * side_by_side - 1) / (c.tile_n * side_by_side));
  }

  // Whether it is the expert that sees all tokens.
  DEVICE bool is_shared(int expert) const { return c.shared && expert == int(problem->experts); }
  DEVICE int shared_count() const {
    return c.shared ? int((problem->shared_rows + c.tile_m - 1) / c.tile_m) * n_tiles() : 0;
  }

  // The rows of an expert. Whatever the groups hold, they stay inside x.
  DEVICE void rows_of(int expert, int& begin, int& end) const {
    const int rows = int(problem->rows);
    if (is_shared(expert)) {
      begin = rows;
      end = rows + int(problem->shared_rows);
      return;
    }
    if constexpr (c.groups == RowGroups::ends) {
      const int low = expert > 0 ? problem->groups[expert - 1] : 0, high = problem->groups[expert];
      end = high < 0 ? 0 : high > rows ? rows : high;
      begin = low < 0 ? 0 : low > end ? end : low;
    } else if constexpr (c.groups == RowGroups::counts) {
      const int most = int(problem->group_rows), wanted = problem->groups[expert];
      begin = expert * most;
      end = begin + (wanted < 0 ? 0 : wanted > most ? most : wanted);
    } else {
      begin = 0;
      end = rows;
    }
  }

  // Until the product before has written all rows of an expert; see MatmulArgs. By one thread, before the copy engine
  // reads them.
  DEVICE void await_rows(int expert) const {
    int begin, end;
    rows_of(expert, begin, end);
    const int32_t all = (end - begin) * int32_t(problem->depth + 1);
    while (load_acquire(problem->awaited + expert) != all) {}
    publish_to_copies_of_memory();
  }

  // By all threads of the block.
  DEVICE void prepare(const MatmulArgs& of) {
    problem = &of;
    if constexpr (!counted) {
      count = n_tiles() * int((of.rows + c.tile_m - 1) / c.tile_m) * (apart ? int(of.experts) : 1);
    } else {
      __shared__ int32_t ends[kMostExperts];
      const int experts = int(of.experts);
      for (int e = threadIdx.x; e < experts; e += blockDim.x) {
        int begin, end;
        rows_of(e, begin, end);
        ends[e] = (end - begin + c.tile_m - 1) / c.tile_m * n_tiles();
      }
      __syncthreads();
      if (threadIdx.x < 32) {
        const int lane = threadIdx.x;
        int before = 0;
        for (int e = 0; e < experts; e += 32) {
          int tiles = e + lane < experts ? ends[e + lane] : 0;
#pragma unroll
          for (int step = 1; step < 32; step *= 2) {
            const int below = __shfl_up_sync(0xffffffff, tiles, step);
            if (lane >= step) tiles += below;
          }
          if (e + lane < experts) ends[e + lane] = before + tiles;
          before += __shfl_sync(0xffffffff, tiles, 31);
        }
      }
      __syncthreads();
      tile_ends = ends;
      count = (experts > 0 ? ends[experts - 1] : 0) + shared_count();
    }
  }

  DEVICE GemmTile at(int i, uint32_t rank) const {
    int expert = 0, begin, end, n, m, k = 0, k_end = 0;
    if constexpr (apart) {
      const int each = count / int(problem->experts);
      expert = i / each;
      i %= each;
    }
    if constexpr (c.shared) {
      // The tiles of the shared expert lie evenly among the others: they are bound by the matrix unit, those by memory.
      const int64_t shared = shared_count();
      const int before = int(i * shared / count);
      if ((i + 1) * shared / count != before) {
        expert = int(problem->experts);
        i = before;
      } else {
        i -= before;
      }
    }
    if (counted && !is_shared(expert)) {
      int last = int(problem->experts) - 1;  // the first expert whose tiles end after i
      while (expert < last) {
        const int middle = (expert + last) / 2;
        if (tile_ends[middle] > i) last = middle;
        else expert = middle + 1;
      }
      if (expert > 0) i -= tile_ends[expert - 1];
    }
    rows_of(expert, begin, end);
    if constexpr (c.groups == RowGroups::depth) {
      const int low = expert > 0 ? problem->groups[expert - 1] : 0, high = problem->groups[expert];
      const int depth = int(problem->depth);
      k_end = high < 0 ? 0 : high > depth ? depth : high;
      k = low < 0 ? 0 : low > k_end ? k_end : low;
    }
    place_in_bands(i, n_tiles(), (end - begin + c.tile_m - 1) / c.tile_m, n, m);
    const int aside = side_by_side > 1 ? int(rank) : 0;
    return {expert, (n * side_by_side + aside) * c.tile_n, begin + m * c.tile_m, end, k, k_end};
  }

  // Zeros for the rows that belong to no expert.
  DEVICE void fill_other_rows(const MatmulArgs& of) const {
    using Out = Element<c.out>;
    for (int expert = 0; expert < (c.groups == RowGroups::counts ? int(of.experts) : 1); ++expert) {
      int begin, end, last;
      if constexpr (c.groups == RowGroups::counts) {
        rows_of(expert, begin, end);
        last = begin + int(of.group_rows);
      } else {
        last = int(of.rows);
        if (of.experts > 0) rows_of(int(of.experts) - 1, begin, end);
        else end = 0;
      }
      for (int row = end + int(blockIdx.x); row < last; row += gridDim.x) {
        Out* out = static_cast<Out*>(of.out) + row * of.out_stride;
        for (int64_t i = int(threadIdx.x) * c.access; i < of.columns; i += int(blockDim.x) * c.access)
          store_access(out + i, Vec<Out, c.access>{});
      }
    }
  }
};

template <GemmConfig c>
DEVICE float load_bias(const MatmulArgs& problem, int expert, int n) {
  if constexpr (c.bias == BiasStep::none) return 0.f;
  if (n >= problem.columns) return 0.f;
  return to_float(static_cast<const Element<c.out>*>(problem.bias)[expert * problem.bias_stride + n]);
}

template <GemmConfig c>
DEVICE float finish(float sum, float scale, float bias) {
  if constexpr (c.bias == BiasStep::rounded) return round_to<Element<c.out>>(sum * scale) + bias;
  return c.bias == BiasStep::once ? sum * scale + bias : sum * scale;
}

}  // namespace deepinfer
