// The products of one tile, by the warpgroups that multiply.
#pragma once

#include "gemm_ring.cuh"

namespace deepinfer {

// Zeros for the k of a stage from `depth` on, which belong to the next expert.
template <GemmConfig c>
DEVICE void clear_rest(const GemmRing<c>& ring, int stage, int depth) {
  static_assert(!c.weight_dense_k && !c.x_dense_k);  // a row of 128 bytes is one k of 64 rows of an operand
  constexpr int pieces = 128 / kVectorBytes, blocks = GemmShape<c>::stage_bytes / GemmShape<c>::block_bytes;
  constexpr int sharers = GemmShape<c>::sharers, threads = sharers * 128;
  const int cleared = (GemmShape<c>::depth - depth) * pieces;
  for (int i = threadIdx.x % threads; i < blocks * cleared; i += threads)
    *reinterpret_cast<Vec<uint32_t, 4>*>(ring.weight(stage) + i / cleared * GemmShape<c>::block_bytes + depth * 128 +
                                         i % cleared * kVectorBytes) = {};
  publish_to_copies();
  warpgroups_sync<sharers>(sharers == 1 ? 1 + threadIdx.x / 128 : 6);
}

// The products of one tile, `across` columns of the matrix unit wide, added up over `count` stages.
template <GemmConfig c, int across>
DEVICE void multiply_tile(GemmSums<c>& sums, const GemmRing<c>& ring, RingPlace<c.stages>& place, const GemmTile& tile,
                          int count) {
  using Shape = GemmShape<c>;
  constexpr bool rows_dense_k = c.tokens_as_rows ? c.x_dense_k : c.weight_dense_k;
  constexpr bool columns_dense_k = c.tokens_as_rows ? c.weight_dense_k : c.x_dense_k;
  constexpr int part_bytes = 64 * 128;  // of the rows, in both layouts
  constexpr int rows_step = rows_dense_k ? 32 : 16 * 128, columns_step = columns_dense_k ? 32 : 16 * 128;
#pragma unroll
  for (int p = 0; p < Shape::parts; ++p)
#pragma unroll
    for (int i = 0; i < Shape::across / 2; ++i) sums[p][i] = 0.f;
  if constexpr (c.in_turn) await_turn();  // who is early would take a barrier's parity for that of a later round
  int previous = -1;
  for (int step = 0; step < count; ++step, place.advance()) {
    wait_barrier(&ring.full[place.stage], place.parity);
    if constexpr (c.groups == RowGroups::depth) {
      const int left = tile.k_end - tile.k - step * Shape::depth;
      if (left < Shape::depth) clear_rest<c>(ring, place.stage, left);
    }
    const uint64_t rows = matrix_descriptor<rows_dense_k>(
        ring.rows(place.stage) + first_row<c>() * 128, Shape::block_bytes);
    const uint64_t columns = matrix_descriptor<columns_dense_k>(ring.columns(place.stage), Shape::block_bytes);
    begin_products();
#pragma unroll
    for (int k = 0; k < Shape::steps; ++k)
#pragma unroll
      for (int p = 0; p < Shape::parts; ++p)
        multiply<c.type, across, rows_dense_k, columns_dense_k>(
            sums[p], rows + ((p * part_bytes + k * rows_step) >> 4), columns + (k * columns_step >> 4));
    commit_products();
    wait_products<1>();
    if (previous >= 0) release<c>(ring, previous);
    previous = place.stage;
  }
  if constexpr (c.in_turn) pass_turn();
  wait_products<0>();
  if (previous >= 0) release<c>(ring, previous);
}

// Of two neighbouring tokens; where groups begin anywhere they are not aligned.
template <GemmConfig c>
DEVICE Vec<float, 2> token_scales(const float* scales, int row) {
  if constexpr (c.groups == RowGroups::none) return *reinterpret_cast<const Vec<float, 2>*>(scales);
  return {scales[row % 4], scales[row % 4 + 1]};
}

// The same for e4m3. The matrix unit keeps few bits of its sums of e4m3: after each stage they are scaled and added up
// in float32, while the other warpgroup multiplies.
template <GemmConfig c, int tokens>
DEVICE void multiply_scaled_tile(GemmSums<c>& sums, const MatmulArgs& problem, const GemmRing<c>& ring,
                                 RingPlace<c.stages>& place, const GemmTile& tile, int begin, int end) {
  using Shape = GemmShape<c>;
  constexpr int kinds = c.column_scales ? 2 : 1;  // of columns whose scales a thread needs
  const int warpgroup = threadIdx.x / 128, lane = threadIdx.x % 32;
  const float* scales[Shape::parts][kinds];
  float scale[Shape::parts][kinds];
#pragma unroll
  for (int p = 0; p < Shape::parts; ++p)
#pragma unroll
    for (int i = 0; i < kinds; ++i) {
      const int column = tile.n + warpgroup * Shape::tall + p * 64;
      int64_t at = c.column_scales ? column + threadIdx.x / 32 % 4 * 16 + lane / 4 + i * 8 : column / 128;
      const int64_t last = c.column_scales ? problem.columns - 1 : (problem.columns - 1) / 128;
      at = at < last ? at : last;  // columns past the end are not written
      scales[p][i] = problem.weight_scale + tile.expert * problem.scale_expert_stride +
                     at * problem.scale_column_stride;
      scale[p][i] = begin < end ? scales[p][i][begin * problem.scale_depth_stride] : 0.f;
#pragma unroll
      for (int j = 0; j < c.tile_m / 2; ++j) sums[p][j] = 0.f;
    }
  for (int step = begin; step < end; ++step, place.advance()) {
    wait_barrier(&ring.full[place.stage], place.parity);
    const uint64_t weight =
        matrix_descriptor<true>(ring.weight(place.stage) + warpgroup * Shape::parts * 64 * 128, Shape::block_bytes);
    const uint64_t x = matrix_descriptor<true>(ring.x(place.stage), Shape::block_bytes);
    GemmSums<c> products;
    begin_products();
#pragma unroll
    for (int p = 0; p < Shape::parts; ++p) {
      multiply<c.type, tokens, true, true, false>(products[p], weight + (p * 64 * 128 >> 4), x);
#pragma unroll
      for (int k = 1; k < Shape::steps; ++k)
        multiply<c.type, tokens, true, true>(products[p], weight + ((p * 64 * 128 + k * 32) >> 4), x + (k * 32 >> 4));
    }
    commit_products();
    float next[Shape::parts][kinds];
    const int64_t next_step = step + 1 < end ? step + 1 : step;
#pragma unroll
    for (int p = 0; p < Shape::parts; ++p)
#pragma unroll
      for (int i = 0; i < kinds; ++i) next[p][i] = scales[p][i][next_step * problem.scale_depth_stride];
    wait_products<0>();
#pragma unroll
    for (int p = 0; p < Shape::parts; ++p) {
#pragma unroll
      for (int j = 0; j < tokens / 8; ++j) {
        const Vec<float, 2> x_scale = token_scales<c>(ring.scales(place.stage) + j * 8 + lane % 4 * 2, tile.m);
        float both[2][kinds];
#pragma unroll
        for (int i = 0; i < 2 * kinds; ++i) both[i % 2][i / 2] = x_scale.at[i % 2] * scale[p][i / 2];
#pragma unroll
        for (int i = 0; i < 4; ++i)
          sums[p][j * 4 + i] = fmaf(products[p][j * 4 + i], both[i % 2][i / 2 % kinds], sums[p][j * 4 + i]);
      }
#pragma unroll
      for (int i = 0; i < kinds; ++i) scale[p][i] = next[p][i];
    }
    release<c>(ring, place.stage);
  }
}

// ---- many e4m3 tokens, which are the rows of the matrix unit ----

// The scales that a thread needs of one stage: of its two tokens, times those of the columns, which are the same for
// `span` of them.
template <GemmConfig c>
class StageScales {
 public:
  static constexpr int even = c.tile_n & -c.tile_n, span = even < 128 ? even : 128, spans = c.tile_n / span;
  static constexpr int blocks = c.tile_n > 128 || c.tile_n % 128 != 0 ? 2 : 1;  // of 128 columns

  DEVICE StageScales(const MatmulArgs& problem, const GemmTile& tile)
      : stride_(problem.scale_depth_stride), offset_(blocks > 1 ? tile.n % 128 : 0),
        token_(threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + (c.groups == RowGroups::none ? 0 : tile.m % 4)) {
#pragma unroll
    for (int b = 0; b < blocks; ++b) {
      const int64_t last = (problem.columns - 1) / 128, block = tile.n / 128 + b;
      weight_[b] = problem.weight_scale + tile.expert * problem.scale_expert_stride +
                   (block < last ? block : last) * problem.scale_column_stride;
    }
  }

  // Those of the weight are on their way while the products are made.
  DEVICE void fetch(int step) {
#pragma unroll
    for (int b = 0; b < blocks; ++b) next_[b] = weight_[b][step * stride_];
  }
  DEVICE void read(const float* tokens) {
    const float low = tokens[token_], high = tokens[token_ + 8];
#pragma unroll
    for (int b = 0; b < blocks; ++b) {
      both_[b][0] = low * next_[b];
      both_[b][1] = high * next_[b];
    }
  }
  DEVICE void add_scaled(GemmSums<c>& sums, const GemmSums<c>& products) const {
#pragma unroll
    for (int s = 0; s < spans; ++s) {
      const bool second = blocks > 1 && offset_ + s * span >= 128;
      const float low = second ? both_[blocks - 1][0] : both_[0][0], high = second ? both_[blocks - 1][1] : both_[0][1];
#pragma unroll
      for (int i = 0; i < span / 2; ++i) {
        float& sum = sums[0][s * span / 2 + i];
        sum = fmaf(products[0][s * span / 2 + i], i % 4 < 2 ? low : high, sum);
      }
    }
  }

 private:
  const float* weight_[blocks];
  int64_t stride_;
  int offset_, token_;
  float next_[blocks], both_[blocks][2];
};

template <GemmConfig c>
DEVICE void issue_products(GemmSums<c>& products, const GemmRing<c>& ring, RingPlace<c.stages> place) {
  wait_barrier(&ring.full[place.stage], place.parity);
  const uint64_t x = matrix_descriptor<true>(ring.rows(place.stage) + first_row<c>() * 128, 0);
  const uint64_t weight = matrix_descriptor<true>(ring.columns(place.stage), 0);
  if constexpr (GemmShape<c>::staggered) await_turn();
  begin_products();
  multiply<c.type, c.tile_n, true, true, false>(products[0], x, weight);
#pragma unroll
  for (int k = 1; k < GemmShape<c>::steps; ++k)
    multiply<c.type, c.tile_n, true, true>(products[0], x + (k * 32 >> 4), weight + (k * 32 >> 4));
  commit_products();
  if constexpr (GemmShape<c>::staggered) pass_turn();
}

// A promise to the compiler that these registers are read no earlier.
template <GemmConfig c>
DEVICE void made(GemmSums<c>& products) {
#pragma unroll
  for (int i = 0; i < c.tile_n / 2; ++i) asm volatile("" : "+f"(products[0][i]) :: "memory");
}

template <GemmConfig c>
DEVICE void finish_last_products(GemmSums<c>& sums, GemmSums<c>& products, StageScales<c>& scales,
                                 const GemmRing<c>& ring, RingPlace<c.stages>& place) {
  scales.read(ring.scales(place.stage));
  wait_products<0>();
  made<c>(products);
  release<c>(ring, place.stage);
  place.advance();
  scales.add_scaled(sums, products);
}

// Those of one stage, while those of the next are made.
template <GemmConfig c, int which>
DEVICE void finish_products(GemmSums<c>& sums, GemmSums<c> (&products)[2], StageScales<c>& scales,
                            const GemmRing<c>& ring, RingPlace<c.stages>& place, int step) {
  const int stage = place.stage;
  place.advance();
  issue_products<c>(products[1 - which], ring, place);
  scales.read(ring.scales(stage));
  scales.fetch(step + 1);
  wait_products<1>();
  made<c>(products[which]);
  release<c>(ring, stage);
  scales.add_scaled(sums, products[which]);
}

// After each stage the products are scaled and added up in float32. Where there is room for two sets of them, the
// matrix unit makes one while the other is added up.
template <GemmConfig c>
DEVICE void multiply_upright_tile(GemmSums<c>& sums, const MatmulArgs& problem, const GemmRing<c>& ring,
                                  RingPlace<c.stages>& place, const GemmTile& tile, int begin, int end) {
  static_assert(GemmShape<c>::parts == 1 && !c.in_turn && !c.column_scales);
  StageScales<c> scales(problem, tile);
#pragma unroll
  for (int i = 0; i < c.tile_n / 2; ++i) sums[0][i] = 0.f;
  if (begin == end) return;
  scales.fetch(begin);
  if constexpr (GemmShape<c>::paired) {
    GemmSums<c> products[2];
    issue_products<c>(products[0], ring, place);
    int step = begin;
    for (; step + 2 < end; step += 2) {
      finish_products<c, 0>(sums, products, scales, ring, place, step);
      finish_products<c, 1>(sums, products, scales, ring, place, step + 1);
    }
    if (step + 1 < end) {
      finish_products<c, 0>(sums, products, scales, ring, place, step);
      finish_last_products<c>(sums, products[1], scales, ring, place);
    } else {
      finish_last_products<c>(sums, products[0], scales, ring, place);
    }
  } else {
    GemmSums<c> products;
    for (int step = begin; step < end; ++step) {
      issue_products<c>(products, ring, place);
      finish_last_products<c>(sums, products, scales, ring, place);
      scales.fetch(step + 1 < end ? step + 1 : step);
    }
  }
}

// For a warpgroup none of whose tokens exist.
template <GemmConfig c>
DEVICE void skip_stages(const GemmRing<c>& ring, RingPlace<c.stages>& place, int count) {
  for (; count > 0; --count, place.advance()) {
    wait_barrier(&ring.full[place.stage], place.parity);
    if constexpr (GemmShape<c>::staggered) {
      await_turn();
      pass_turn();
    }
    release<c>(ring, place.stage);
  }
}

// Groups end anywhere: a tile that is not full is multiplied with fewer tokens.
template <GemmConfig c, int tokens = c.tile_m>
DEVICE void multiply_rows(GemmSums<c>& sums, const MatmulArgs& problem, const GemmRing<c>& ring,
                          RingPlace<c.stages>& place, const GemmTile& tile, int begin, int end) {
  using Shape = GemmShape<c>;
  constexpr int step = Shape::row_step;
  if constexpr (Shape::ragged && !c.tokens_as_rows && tokens > step) {
    if (tile.rows<c.tile_m>() <= tokens - step)
      return multiply_rows<c, tokens - step>(sums, problem, ring, place, tile, begin, end);
  }
  if constexpr (Shape::ragged && c.tokens_as_rows)
    if (first_row<c>() >= tile.rows<c.tile_m>()) return skip_stages<c>(ring, place, end - begin);
  if constexpr (!Shape::scaled)
    multiply_tile<c, c.tokens_as_rows ? c.tile_n : tokens>(sums, ring, place, tile, end - begin);
  else if constexpr (c.tokens_as_rows)
    multiply_upright_tile<c>(sums, problem, ring, place, tile, begin, end);
  else
    multiply_scaled_tile<c, tokens>(sums, problem, ring, place, tile, begin, end);
}

}  // namespace deepinfer
