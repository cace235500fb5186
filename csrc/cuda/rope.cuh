// Rotary embedding. The threads of a row lie next to each other, then come the rows of one position, then the
// positions: a row of the tables is fetched into the L1 cache once and used by all heads. The loads of x do not wait
// for those of the position and the tables. Bound by memory: read x, write the result.
#pragma once

#include "device.cuh"
#include "rope_config.h"

namespace deepinfer {

template <RopeConfig c>
constexpr int pairs_of_piece = kVectorBytes / sizeof(Element<c.x>) / (c.style == RopeStyle::half ? 1 : 2);

// Of threads, rows and positions: divisions of 64 bits take many times as long as those of 32.
template <bool wide> struct IndexOf { using type = uint32_t; };
template <> struct IndexOf<true> { using type = uint64_t; };

// ---- pieces of a row ----

// One piece is held as the row has it: for the styles with halves n first elements and n second ones, for interleaved
// pairs n times a first and a second one.
template <bool halves, int n> DEVICE constexpr int first_of(int pair) { return halves ? pair : 2 * pair; }
template <bool halves, int n> DEVICE constexpr int second_of(int pair) { return halves ? n + pair : 2 * pair + 1; }

// Where a piece of 2n elements lies in a row: in two runs of n, one in each half, or in one run, which for the elements
// beyond rotary_dim it always is.
template <RopeConfig c, bool halves>
struct Place {
  static constexpr int n = pairs_of_piece<c>;
  int first, first_end, second, second_end;

  DEVICE explicit Place(int piece) {
    constexpr int half = c.rotary_dim / 2, turned = (half + n - 1) / n;
    const bool beyond = c.rest && piece >= turned;
    if (beyond) first = c.rotary_dim + (piece - turned) * 2 * n;
    else first = piece * (halves ? n : 2 * n);
    second = halves && !beyond ? half + first : first + n;
    first_end = beyond ? c.head_size : halves ? half : c.rotary_dim;
    second_end = beyond ? c.head_size : c.rotary_dim;
  }
};

// Nothing past the end of the run, and nothing at all unless `wanted`.
template <RopeConfig c>
DEVICE auto read_piece(const Element<c.x>* row, int piece, bool wanted) {
  constexpr bool halves = c.style == RopeStyle::half;
  constexpr int n = pairs_of_piece<c>;
  const Place<c, halves> place(piece);
  if constexpr (!halves) {
    return load_vector<Reuse::once, c.access, 2 * n>(row, place.first, wanted ? place.first_end : 0);
  } else {
    const auto a = load_vector<Reuse::once, c.access, n>(row, place.first, wanted ? place.first_end : 0);
    const auto b = load_vector<Reuse::once, c.access, n>(row, place.second, wanted ? place.second_end : 0);
    Vec<Element<c.x>, 2 * n> v;
#pragma unroll
    for (int i = 0; i < n; ++i) {
      v.at[i] = a.at[i];
      v.at[n + i] = b.at[i];
    }
    return v;
  }
}

template <RopeConfig c>
DEVICE void write_piece(Element<c.x>* row, int piece, const Vec<Element<c.x>, 2 * pairs_of_piece<c>>& v) {
  constexpr bool halves = c.style != RopeStyle::interleaved;
  constexpr int n = pairs_of_piece<c>;
  // A row of pairs of halves: what divides rotary_dim need not divide the half.
  constexpr int access = c.style == RopeStyle::interleaved_to_half ? (c.access + 1) / 2 : c.access;
  const Place<c, halves> place(piece);
  if constexpr (!halves) {
    store_vector<access, 2 * n>(row, place.first, place.first_end, v);
  } else {
    Vec<Element<c.x>, n> a, b;
#pragma unroll
    for (int i = 0; i < n; ++i) {
      a.at[i] = v.at[i];
      b.at[i] = v.at[n + i];
    }
    store_vector<access, n>(row, place.first, place.first_end, a);
    store_vector<access, n>(row, place.second, place.second_end, b);
  }
}

// ---- tables ----

// n columns of one row of a table from `first` on, those before `end`.
template <RopeConfig c, int n>
DEVICE Vec<Element<c.table>, n> read_columns(const Element<c.table>* row, int64_t stride, int first, int end) {
  if constexpr (c.table_access > 0) {
    return load_vector<Reuse::often, c.table_access, n>(row, first, end);
  } else {
    using C = Element<c.table>;
    Vec<C, n> v;
#pragma unroll
    for (int i = 0; i < n; ++i)
      v.at[i] = load_access<Reuse::often, C, 1>(row + (first + i) * stride, first + i < end).at[0];
    return v;
  }
}

// The cosines or sines of the first and of the second elements of n pairs; zeros unless `wanted`.
template <int n>
struct Angles { float first[n], second[n]; };

template <RopeConfig c>
DEVICE auto read_angles(const RopeTable& table, int64_t offset, int piece, bool wanted) {
  constexpr bool halves = c.style != RopeStyle::interleaved;
  constexpr int n = pairs_of_piece<c>, half = c.rotary_dim / 2;
  const auto* row = static_cast<const Element<c.table>*>(table.data) + offset;
  const int end = wanted ? half : 0;
  Angles<n> angles;
  if constexpr (c.per_pair || halves) {
    const auto first = read_columns<c, n>(row, table.column_stride, piece * n, end);
    const auto second = c.per_pair ? first : read_columns<c, n>(row + half * table.column_stride, table.column_stride,
                                                                piece * n, end);
#pragma unroll
    for (int i = 0; i < n; ++i) {
      angles.first[i] = to_float(first.at[i]);
      angles.second[i] = to_float(second.at[i]);
    }
  } else {
    const auto both = read_columns<c, 2 * n>(row, table.column_stride, piece * 2 * n, 2 * end);
#pragma unroll
    for (int i = 0; i < n; ++i) {
      angles.first[i] = to_float(both.at[2 * i]);
      angles.second[i] = to_float(both.at[2 * i + 1]);
    }
  }
  return angles;
}

template <RopeConfig c>
DEVICE int64_t read_position(const RopeArgs& args, const RopeTensor& x, int64_t group, bool wanted) {
  const int64_t at = row_offset<c.strided>(x.position_groups, group);
  if constexpr (c.position_bytes == 8)
    return load_access<Reuse::often, int64_t, 1>(static_cast<const int64_t*>(args.positions) + at, wanted).at[0];
  else
    return load_access<Reuse::often, int32_t, 1>(static_cast<const int32_t*>(args.positions) + at, wanted).at[0];
}

// ---- rotation ----

// x cos + sign * partner sin, with the roundings of the CPU kernel.
template <RopeConfig c, int sign>
DEVICE float rotate(float x, float cos, float partner, float sin) {
  float a = x * cos, b = partner * sin;
  if constexpr (c.round_products) a = round_to<Element<c.x>>(a), b = round_to<Element<c.x>>(b);
  return sign > 0 ? a + b : a - b;
}

template <RopeConfig c>
DEVICE auto rotate_piece(const Vec<Element<c.x>, 2 * pairs_of_piece<c>>& x, const Angles<pairs_of_piece<c>>& cos,
                         const Angles<pairs_of_piece<c>>& sin) {
  using T = Element<c.x>;
  constexpr bool from_halves = c.style == RopeStyle::half, to_halves = c.style != RopeStyle::interleaved;
  constexpr int n = pairs_of_piece<c>;
  Vec<T, 2 * n> y;
#pragma unroll
  for (int i = 0; i < n; ++i) {
    const float a = to_float(x.at[first_of<from_halves, n>(i)]), b = to_float(x.at[second_of<from_halves, n>(i)]);
    y.at[first_of<to_halves, n>(i)] = from_float<T>(rotate<c, -1>(a, cos.first[i], b, sin.first[i]));
    y.at[second_of<to_halves, n>(i)] = from_float<T>(rotate<c, 1>(b, cos.second[i], a, sin.second[i]));
  }
  return y;
}

// How often the threads of a position go through its rows.
template <RopeConfig c>
DEVICE int64_t turns_of(const RopeTensor& x) { return (x.in_rows.count + c.heads - 1) / c.heads; }

template <RopeConfig c>
DEVICE void rotary_embedding(const RopeArgs& args) {
  using T = Element<c.x>;
  using Index = typename IndexOf<c.wide>::type;
  constexpr int n = pairs_of_piece<c>, turned = (c.rotary_dim / 2 + n - 1) / n;

  // Blocks for q, then blocks for k.
  const int64_t q_threads = args.rows[0] ? turns_of<c>(args.tensors[0]) * args.tensors[0].in_groups.count * c.lanes : 0;
  const uint32_t q_blocks = uint32_t((q_threads + kRopeThreads - 1) / kRopeThreads);
  const bool is_k = blockIdx.x >= q_blocks;
  const RopeTensor& x = args.tensors[is_k];
  const Index stride = Index(turns_of<c>(x));  // between the rows of a thread
  const Index thread = Index(blockIdx.x - (is_k ? q_blocks : 0)) * kRopeThreads + threadIdx.x;
  const int piece = int(thread % c.lanes);
  const Index group = thread / c.lanes / stride, first_row = thread / c.lanes % stride;
  const bool active = group < x.in_groups.count;
  const Index rows = active ? Index(x.in_rows.count) : 0;
  const bool beyond = c.rest && piece >= turned, turns = active && !beyond;
  const T* in = static_cast<const T*>(x.in) + row_offset<c.strided>(x.in_groups, group);
  T* out = static_cast<T*>(x.out) + row_offset<c.strided>(x.out_groups, group);

  wait_for_previous_kernel();

  int64_t position = 0;
  if constexpr (c.position_bytes > 0) position = read_position<c>(args, x, group, turns);
  Vec<T, 2 * n> held[c.heads];
#pragma unroll
  for (int j = 0; j < c.heads; ++j) {
    const Index row = first_row + j * stride;
    held[j] = read_piece<c>(in + row_offset<c.strided>(x.in_rows, row), piece, row < rows);
  }
  __syncwarp();  // or the assembler puts some of these loads behind those that wait for the position

  int64_t cos_row, sin_row;
  bool valid = true;
  if constexpr (c.position_bytes > 0) {
    cos_row = position * x.cos.row_stride;
    sin_row = position * x.sin.row_stride;
    valid = position >= 0 && position < args.cache_rows;
  } else {
    cos_row = row_offset<c.strided>(x.cos.groups, group);
    sin_row = row_offset<c.strided>(x.sin.groups, group);
  }
  const auto cos = read_angles<c>(x.cos, cos_row, piece, turns && valid);
  auto sin = read_angles<c>(x.sin, sin_row, piece, turns && valid);
  const float sign = valid ? args.sin_sign : __uint_as_float(0x7fffffff);  // a NaN spoils every sum
#pragma unroll
  for (int i = 0; i < n; ++i) {
    sin.first[i] *= sign;
    sin.second[i] *= sign;
  }
  let_next_kernel_start();
  if constexpr (c.ordered && c.lanes > 32) __syncthreads();

#pragma unroll
  for (int j = 0; j < c.heads; ++j)
    if (const Index row = first_row + j * stride; row < rows)
      write_piece<c>(out + row_offset<c.strided>(x.out_rows, row), piece,
                     beyond ? held[j] : rotate_piece<c>(held[j], cos, sin));
}

}  // namespace deepinfer
