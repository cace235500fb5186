// Attention of few queries over many keys. Bound by reading keys and values, once each, for all heads that share them.
//
// A warp takes tiles of 16 keys and works by itself: 16-byte loads bring keys and values straight into registers, laid
// out so that they are operands of the matrix unit as they come. Scores are keys times queries, 16 x 8; elements of a
// row lie four pairs apart from where the instruction has them, in both factors alike. Results are values times weights,
// columns x 8: the operand has two keys in a word, so that words of two keys swap halves. As soon as the
// keys, or the values, of a tile are used, those of the next are on their way: about 10 KB a warp, 12 warps a processor.
//
// Keys that are split over warps and blocks are put together by their greatest scores, in a fixed order: in the shared
// memory of a block, then in that of a cluster of up to eight, or by attention_combine for more.
//
// A mask is read first, to see which tiles hold a key that is seen; the others are not loaded.
#pragma once

#include "attention_config.h"
#include "attention_mask.cuh"
#include "hopper.cuh"
#include "mma.cuh"

namespace deepinfer {

constexpr int kTileKeys = 16;

template <AttentionDecodeConfig c>
struct DecodeShape {
  using T = Element<c.type>;
  static constexpr int pieces = (c.depth + 31) / 32;        // of a key: eight elements for each of four lanes
  static constexpr int chunks = (c.value_depth + 63) / 64;  // of a value: eight elements for each of eight lanes
  static constexpr int rows = 8 * c.columns;
  static constexpr bool reads_mask = c.mask == AttentionMask::boolean || c.mask == AttentionMask::added;
  static constexpr int masks = c.one_mask ? 1 : 2 * c.columns;  // rows of the mask that concern a lane
};

// What the warps of a block leave to each other, and behind that what the block leaves to its cluster.
template <AttentionDecodeConfig c>
struct DecodeShared {
  static constexpr int rows = DecodeShape<c>::rows, slots = c.warps + (c.cluster > 1);
  float sums[slots][rows][c.value_depth];
  float greatest[slots][rows], total[slots][rows];
};

// Where a block, and a lane within it, stands.
template <AttentionDecodeConfig c>
struct DecodePlace {
  using S = DecodeShape<c>;
  using T = typename S::T;
  int g, t, warp;
  int64_t unit, batch, shared;  // unit: batch and key head
  int part, first_row, rows, group;
  int first, end;  // keys
  const T *keys, *values;

  DEVICE DecodePlace(const AttentionDecodeArgs& args) {
    const AttentionArgs& p = args.problem;
    g = threadIdx.x % 32 / 4;
    t = threadIdx.x % 4;
    warp = threadIdx.x / 32;
    part = int(blockIdx.x % args.parts);
    const int rest = int(blockIdx.x / args.parts);
    first_row = rest % args.blocks_of_rows * S::rows;
    unit = rest / args.blocks_of_rows;
    batch = unit / p.key_heads;
    shared = unit % p.key_heads;
    group = int(p.heads / p.key_heads);
    rows = group * int(p.queries);
    const int64_t begin = part * args.span;
    int64_t stop = begin + args.span < p.keys ? begin + args.span : p.keys;
    if constexpr (c.mask == AttentionMask::causal) {
      const int64_t last = first_row + rows_here() - 1;
      if (stop > last / group + 1) stop = last / group + 1;
    }
    first = int(begin);
    end = int(stop);
    keys = static_cast<const T*>(p.key) + batch * p.key_strides.batch + shared * p.key_strides.head;
    values = static_cast<const T*>(p.value) + batch * p.value_strides.batch + shared * p.value_strides.head;
  }

  DEVICE int rows_here() const { return rows - first_row < S::rows ? rows - first_row : S::rows; }
  DEVICE int64_t head(int row) const { return shared * group + row % group; }
  DEVICE int query(int row) const { return row / group; }
  DEVICE int tiles() const { return end > first ? (end - first + kTileKeys - 1) / kTileKeys : 0; }

  // Where the row of the mask begins.
  DEVICE int64_t mask_row(const AttentionArgs& p, int row) const {
    if (row >= rows) row = rows - 1;
    return batch * p.mask_batch + head(row) * p.mask_head + query(row) * p.mask_query;
  }
};

// seen[i]: whether any query of the block sees a key of tile i. Eight loads of a warp are on their way at once.
template <AttentionDecodeConfig c>
DEVICE void find_tiles(const AttentionArgs& p, const DecodePlace<c>& at, uint8_t* seen) {
  constexpr int kAtOnce = 8;
  const int lane = threadIdx.x % 32, pairs = (at.tiles() + 1) / 2;
  const int rows = c.one_mask ? 1 : at.rows_here();
  for (int from = at.warp * kAtOnce; from < pairs; from += c.warps * kAtOnce) {
    bool any[kAtOnce] = {};
    for (int row = 0; row < rows; ++row) {
      const int64_t mask_row = at.mask_row(p, at.first_row + row);
      float added[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int key = at.first + (from + i) * 32 + lane, there = key < at.end ? key : at.end - 1;
        added[i] = added_to_score<c.mask, c.mask_type>(p, mask_row + there * p.mask_key, 0, there);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        any[i] |= added[i] != hidden_score() && at.first + (from + i) * 32 + lane < at.end;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const uint32_t keys = __ballot_sync(0xffffffff, any[i]);
      if (lane < 2 && from + i < pairs) seen[2 * (from + i) + lane] = (keys >> (16 * lane) & 0xffff) != 0;
    }
  }
}

// What a lane holds of the keys of a tile, with what the mask adds to their scores: keys g and g + 8.
template <AttentionDecodeConfig c>
struct KeyTile {
  using S = DecodeShape<c>;
  using T = typename S::T;
  Vec<T, 8> low[S::pieces], high[S::pieces];
  float added[S::masks][2];

  DEVICE void load(const AttentionArgs& p, const DecodePlace<c>& at, const int64_t (&mask_rows)[S::masks], int first) {
    const int key = first + at.g;
    const bool has_low = key < at.end, has_high = key + 8 < at.end;
    const T* from = at.keys + key * p.key_strides.token + 8 * at.t;
#pragma unroll
    for (int i = 0; i < S::pieces; ++i) {
      const bool inside = c.depth % 32 == 0 || 32 * i + 8 * at.t < c.depth;
      low[i] = load_access<T, 8>(from + 32 * i, has_low && inside);
      high[i] = load_access<T, 8>(from + 8 * p.key_strides.token + 32 * i, has_high && inside);
    }
    if constexpr (S::reads_mask) {
#pragma unroll
      for (int m = 0; m < S::masks; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int there = key + 8 * half < at.end ? key + 8 * half : at.end - 1;
          added[m][half] = added_to_score<c.mask, c.mask_type>(p, mask_rows[m] + there * p.mask_key, 0, there);
        }
    }
  }
};

// Keys 2t, 2t + 1, 2t + 8 and 2t + 9.
template <AttentionDecodeConfig c>
struct ValueTile {
  using S = DecodeShape<c>;
  using T = typename S::T;
  Vec<T, 8> at_key[4][S::chunks];

  static DEVICE int key(const DecodePlace<c>& at, int i) { return 2 * at.t + i % 2 + i / 2 * 8; }

  DEVICE void load(const AttentionArgs& p, const DecodePlace<c>& at, int first) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = first + key(at, i);
      const T* from = at.values + token * p.value_strides.token + 8 * at.g;
#pragma unroll
      for (int j = 0; j < S::chunks; ++j) {
        const bool inside = c.value_depth % 64 == 0 || 64 * j + 8 * at.g < c.value_depth;
        at_key[i][j] = load_access<T, 8>(from + 64 * j, token < at.end && inside);
      }
    }
  }

  // Keys that no query sees: they may hold NaN, which no weight of 0 takes away. `low` and `high`: a bit of each lane
  // for keys g and g + 8.
  DEVICE void drop_unseen(const DecodePlace<c>& at, uint32_t low, uint32_t high) {
    bool keep[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) keep[i] = ((i < 2 ? low : high) >> 4 * (key(at, i) % 8) & 15) != 0;
    if (__all_sync(0xffffffff, keep[0] && keep[1] && keep[2] && keep[3])) return;
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int j = 0; j < S::chunks; ++j)
#pragma unroll
        for (int w = 0; w < 4; ++w) word(at_key[i][j], w) = keep[i] ? word(at_key[i][j], w) : 0;
  }
};

// Rows 8n + 2t and 8n + 2t + 1 of the queries, for all n.
template <AttentionDecodeConfig c>
struct DecodeState {
  using S = DecodeShape<c>;
  using T = typename S::T;
  float sums[c.columns][4 * S::chunks][4];  // columns 64j + 8g + 2w and the next one of both rows in sums[n][4j + w]
  float greatest[c.columns][2], total[c.columns][2];

  DEVICE DecodeState() {
#pragma unroll
    for (int n = 0; n < c.columns; ++n) {
#pragma unroll
      for (int i = 0; i < 4 * S::chunks; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) sums[n][i][j] = 0.f;
      greatest[n][0] = greatest[n][1] = hidden_score();
      total[n][0] = total[n][1] = 0.f;
    }
  }

  // From scores to weights, and what was summed before scaled to the same base.
  DEVICE void weigh(float (&scores)[c.columns][4], uint32_t (&weights)[c.columns][2]) {
#pragma unroll
    for (int n = 0; n < c.columns; ++n) {
      float weight[4], kept[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float most = fmaxf(fmaxf(scores[n][r], scores[n][2 + r]), greatest[n][r]);
#pragma unroll
        for (int lanes = 4; lanes < 32; lanes *= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, lanes));
        const float base = base_of(most);
        kept[r] = weight_of(greatest[n][r], base);
        greatest[n][r] = most;
        weight[r] = weight_of(scores[n][r], base);
        weight[2 + r] = weight_of(scores[n][2 + r], base);
        total[n][r] = total[n][r] * kept[r] + (weight[r] + weight[2 + r]);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half)
        weights[n][half] = transposed(Pair<T>::from_floats(weight[2 * half], weight[2 * half + 1]));
#pragma unroll
      for (int i = 0; i < 4 * S::chunks; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) sums[n][i][j] *= kept[j % 2];
    }
  }

  DEVICE void add(const ValueTile<c>& v, const uint32_t (&weights)[c.columns][2]) {
#pragma unroll
    for (int j = 0; j < S::chunks; ++j)
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const uint32_t first = word(v.at_key[0][j], w), second = word(v.at_key[1][j], w);
        const uint32_t third = word(v.at_key[2][j], w), fourth = word(v.at_key[3][j], w);
        const uint32_t operand[4] = {low_halves(first, second), high_halves(first, second), low_halves(third, fourth),
                                     high_halves(third, fourth)};
#pragma unroll
        for (int n = 0; n < c.columns; ++n) multiply_add<T>(sums[n][4 * j + w], operand, weights[n][0], weights[n][1]);
      }
  }

  DEVICE void leave(DecodeShared<c>& shared, const DecodePlace<c>& at) {
#pragma unroll
    for (int n = 0; n < c.columns; ++n)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = 8 * n + 2 * at.t + r;
        float sum = total[n][r];
#pragma unroll
        for (int lanes = 4; lanes < 32; lanes *= 2) sum += __shfl_xor_sync(0xffffffff, sum, lanes);
        if (at.first_row + row >= at.rows) continue;
        if (at.g == 0) {
          shared.greatest[at.warp][row] = greatest[n][r];
          shared.total[at.warp][row] = sum;
        }
#pragma unroll
        for (int j = 0; j < S::chunks; ++j) {
          const int column = 64 * j + 8 * at.g;
          if (c.value_depth % 64 != 0 && column >= c.value_depth) continue;
#pragma unroll
          for (int w = 0; w < 4; ++w) {
            shared.sums[at.warp][row][column + 2 * w] = sums[n][4 * j + w][r];
            shared.sums[at.warp][row][column + 2 * w + 1] = sums[n][4 * j + w][2 + r];
          }
        }
      }
  }
};

template <AttentionDecodeConfig c>
DEVICE void store_result(const AttentionArgs& p, const DecodePlace<c>& at, int row, int column, const float (&sums)[4],
                         float total) {
  using T = Element<c.type>;
  const float factor = total == 0.f ? 0.f : 1.f / total;
  T* out = static_cast<T*>(p.out) + at.batch * p.out_strides.batch + at.head(row) * p.out_strides.head +
           at.query(row) * p.out_strides.token;
  store_access(out + column, rounded<T, 4>([&](int j) { return sums[j] * factor; }));
}

// The warps' sums on one base: into the result, or to where parts are put together.
template <AttentionDecodeConfig c>
DEVICE void join_warps(const AttentionDecodeArgs& args, const DecodePlace<c>& at, DecodeShared<c>& shared) {
  constexpr int kVectors = c.value_depth / 4;
  for (int i = threadIdx.x; i < at.rows_here() * kVectors; i += 32 * c.warps) {
    const int row = i / kVectors, column = i % kVectors * 4;
    float most = hidden_score();
#pragma unroll
    for (int w = 0; w < c.warps; ++w) most = fmaxf(most, shared.greatest[w][row]);
    const float base = base_of(most);
    float total = 0.f, sums[4] = {};
#pragma unroll
    for (int w = 0; w < c.warps; ++w) {
      const float share = weight_of(shared.greatest[w][row], base);
      total += shared.total[w][row] * share;
#pragma unroll
      for (int j = 0; j < 4; ++j) sums[j] = fmaf(share, shared.sums[w][row][column + j], sums[j]);
    }
    if constexpr (c.cluster > 1) {
#pragma unroll
      for (int j = 0; j < 4; ++j) shared.sums[c.warps][row][column + j] = sums[j];
      if (column == 0) {
        shared.greatest[c.warps][row] = most;
        shared.total[c.warps][row] = total;
      }
    } else if constexpr (c.scratch) {
      const int64_t to = (at.unit * args.parts + at.part) * at.rows + at.first_row + row;
      store_access(args.sums + to * c.value_depth + column, rounded<float, 4>([&](int j) { return sums[j]; }));
      if (column == 0) {
        args.stats[2 * to] = most;
        args.stats[2 * to + 1] = total;
      }
    } else {
      store_result(args.problem, at, at.first_row + row, column, sums, total);
    }
  }
}

// The sums of a cluster's blocks on one base: each block writes a part of the result.
template <AttentionDecodeConfig c>
DEVICE void join_blocks(const AttentionArgs& p, const DecodePlace<c>& at, const DecodeShared<c>& shared) {
  constexpr int kVectors = c.value_depth / 4, kThreads = 32 * c.warps;
  const auto of_block = [](const float& x, int block) {
    return __int_as_float(load_from_cluster(reinterpret_cast<const int32_t*>(&x), block));
  };
  for (int i = at.part * kThreads + threadIdx.x; i < at.rows_here() * kVectors; i += c.cluster * kThreads) {
    const int row = i / kVectors, column = i % kVectors * 4;
    float greatest[c.cluster], totals[c.cluster], most = hidden_score();
    Vec<float, 4> parts[c.cluster];
#pragma unroll
    for (int block = 0; block < c.cluster; ++block) {
      greatest[block] = of_block(shared.greatest[c.warps][row], block);
      totals[block] = of_block(shared.total[c.warps][row], block);
      parts[block] = load_from_cluster(&shared.sums[c.warps][row][column], uint32_t(block));
      most = fmaxf(most, greatest[block]);
    }
    const float base = base_of(most);
    float total = 0.f, sums[4] = {};
#pragma unroll
    for (int block = 0; block < c.cluster; ++block) {
      const float share = weight_of(greatest[block], base);
      total += totals[block] * share;
#pragma unroll
      for (int j = 0; j < 4; ++j) sums[j] = fmaf(share, parts[block].at[j], sums[j]);
    }
    store_result(p, at, at.first_row + row, column, sums, total);
  }
}

template <AttentionDecodeConfig c>
DEVICE void attention_decode(const AttentionDecodeArgs& args) {
  using S = DecodeShape<c>;
  using T = typename S::T;
  extern __shared__ __align__(16) char dynamic_shared[];
  auto& shared = *reinterpret_cast<DecodeShared<c>*>(dynamic_shared);
  auto* seen = reinterpret_cast<uint8_t*>(dynamic_shared + sizeof(DecodeShared<c>));
  const AttentionArgs& p = args.problem;
  const DecodePlace<c> at(args);
  wait_for_previous_kernel();
  let_next_kernel_start();

  Vec<T, 8> queries[c.columns][S::pieces];
#pragma unroll
  for (int n = 0; n < c.columns; ++n) {
    const int row = at.first_row + 8 * n + at.g;
    const T* from = static_cast<const T*>(p.query) + at.batch * p.query_strides.batch +
                    at.head(row) * p.query_strides.head + at.query(row) * p.query_strides.token + 8 * at.t;
#pragma unroll
    for (int i = 0; i < S::pieces; ++i)
      queries[n][i] = load_access<T, 8>(
          from + 32 * i, row < at.rows && (c.depth % 32 == 0 || 32 * i + 8 * at.t < c.depth));
  }
  int64_t mask_rows[S::masks];
#pragma unroll
  for (int m = 0; m < S::masks; ++m)
    mask_rows[m] = at.mask_row(p, at.first_row + (c.one_mask ? 0 : m / 2 * 8 + 2 * at.t + m % 2));
  if constexpr (S::reads_mask) {
    if (at.tiles() > 0) find_tiles(p, at, seen);
    __syncthreads();
  }
  const int tiles = at.tiles();
  const auto next = [&](int tile) {
    do tile += c.warps;
    while (S::reads_mask && tile < tiles && !seen[tile]);
    return tile;
  };

  DecodeState<c> state;
  KeyTile<c> keys;
  ValueTile<c> values;
  int tile = next(at.warp - c.warps);
  if (tile < tiles) {
    keys.load(p, at, mask_rows, at.first + tile * kTileKeys);
    values.load(p, at, at.first + tile * kTileKeys);
  }
  while (tile < tiles) {
    const int first = at.first + tile * kTileKeys;
    float scores[c.columns][4] = {};
#pragma unroll
    for (int i = 0; i < S::pieces; ++i)
#pragma unroll
      for (int w = 0; w < 4; w += 2) {
        const uint32_t operand[4] = {word(keys.low[i], w), word(keys.high[i], w), word(keys.low[i], w + 1),
                                     word(keys.high[i], w + 1)};
#pragma unroll
        for (int n = 0; n < c.columns; ++n)
          multiply_add<T>(scores[n], operand, word(queries[n][i], w), word(queries[n][i], w + 1));
      }
    bool is_seen[2] = {};
#pragma unroll
    for (int n = 0; n < c.columns; ++n)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int key = first + at.g + j / 2 * 8, row = at.first_row + 8 * n + 2 * at.t + j % 2;
        float added = 0.f;
        if constexpr (S::reads_mask) added = keys.added[c.one_mask ? 0 : 2 * n + j % 2][j / 2];
        if constexpr (c.mask == AttentionMask::causal) added = key <= at.query(row) ? 0.f : hidden_score();
        const bool visible = key < at.end && added != hidden_score() && (c.one_mask || row < at.rows);
        is_seen[j / 2] |= visible;
        scores[n][j] = visible ? scores[n][j] * p.scale + added : hidden_score();
      }
    const int following = next(tile);
    if (following < tiles) keys.load(p, at, mask_rows, at.first + following * kTileKeys);

    uint32_t weights[c.columns][2];
    state.weigh(scores, weights);
    if constexpr (S::reads_mask)
      values.drop_unseen(at, __ballot_sync(0xffffffff, is_seen[0]), __ballot_sync(0xffffffff, is_seen[1]));
    state.add(values, weights);
    tile = following;
    if (tile < tiles) values.load(p, at, at.first + tile * kTileKeys);
  }
  state.leave(shared, at);
  __syncthreads();
  join_warps(args, at, shared);
  if constexpr (c.cluster > 1) {
    cluster_sync();
    join_blocks(p, at, shared);
    cluster_sync();  // before the memory of a block goes away
  }
}

// The parts of each query on one base, a warp for each.
template <AttentionCombineConfig c>
DEVICE void attention_combine(const AttentionDecodeArgs& args) {
  using T = Element<c.type>;
  const AttentionArgs& p = args.problem;
  const int lane = threadIdx.x % 32, group = int(p.heads / p.key_heads), rows = group * int(p.queries);
  const int64_t i = int64_t(blockIdx.x) * (c.threads / 32) + threadIdx.x / 32;
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (i >= p.batch * p.key_heads * rows) return;
  const int64_t unit = i / rows, first = unit * args.parts * rows + i % rows;
  const bool there = lane < args.parts;
  const Vec<float, 2> own = load_access<float, 2>(args.stats + 2 * (first + int64_t(lane) * rows), there);
  const float greatest = there ? own.at[0] : hidden_score();
  const float base = base_of(over_warp<Maximum, 32>(greatest)), share = weight_of(greatest, base);
  const float total = over_warp<Addition, 32>(own.at[1] * share), factor = total == 0.f ? 0.f : 1.f / total;
  const int row = int(i % rows);
  T* out = static_cast<T*>(p.out) + unit / p.key_heads * p.out_strides.batch +
           (unit % p.key_heads * group + row % group) * p.out_strides.head + row / group * p.out_strides.token;
  for (int column = 0; column < p.value_depth; column += 128) {
    const int own_column = column + 4 * lane;
    const bool inside = own_column < p.value_depth;
    float sums[4] = {};
#pragma unroll 8
    for (int part = 0; part < args.parts; ++part) {
      const float* from = args.sums + (first + int64_t(part) * rows) * p.value_depth + own_column;
      const Vec<float, 4> sum = load_access<float, 4>(from, inside);
      const float weight = __shfl_sync(0xffffffff, share, part);
#pragma unroll
      for (int j = 0; j < 4; ++j) sums[j] = fmaf(weight, sum.at[j], sums[j]);
    }
    if (inside) store_access(out + own_column, rounded<T, 4>([&](int j) { return sums[j] * factor; }));
  }
}

}  // namespace deepinfer
