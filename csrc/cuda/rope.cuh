// Rotary embedding. The threads of a row lie next to each other, then come the rows of one position, then the
// positions: a row of the tables is fetched into the L1 cache once and used by all heads. The loads of x do not wait
// for those of the position and the tables. A norm in front sums over the threads of a row. Bound by memory: read x,
// write the result.
#pragma once

#include "norm_row.cuh"
#include "rope_config.h"

namespace deepinfer {

template <RopeConfig c>
constexpr int pairs_of_piece =
    kVectorBytes / sizeof(Element<c.x>) / (c.style == RopeStyle::half && !c.exchange ? 1 : 2);

// ---- pieces of a row ----

// A thread has 2n elements of a row, which belong to n pairs, as they lie there: in two runs of n, one in each half, or
// in one run, which for the elements beyond rotary_dim it always is. With `exchange` a run holds one side of 2n pairs.
template <RopeConfig c> using Piece = Vec<Element<c.x>, 2 * pairs_of_piece<c>>;

template <RopeConfig c> constexpr bool reads_halves = c.style == RopeStyle::half && !c.exchange;
template <RopeConfig c> constexpr bool writes_halves = c.style != RopeStyle::interleaved && !c.exchange;
template <RopeConfig c> constexpr int turned_pieces = (c.rotary_dim / 2 + pairs_of_piece<c> - 1) / pairs_of_piece<c>;

template <RopeConfig c, bool halves>
struct Place {
  static constexpr int n = pairs_of_piece<c>;
  int first, first_end, second, second_end;

  DEVICE explicit Place(int piece) {
    constexpr int half = c.rotary_dim / 2, turned = turned_pieces<c>;
    const bool beyond = c.rest && piece >= turned;
    constexpr int start = c.apart ? 0 : c.rotary_dim, end = c.apart ? c.head_size - c.rotary_dim : c.head_size;
    if (beyond) first = start + (piece - turned) * 2 * n;
    else first = piece * (halves ? n : 2 * n);
    second = halves && !beyond ? half + first : first + n;
    first_end = beyond ? end : halves ? half : c.rotary_dim;
    second_end = beyond ? end : c.rotary_dim;
  }
};

// Nothing past the end of the run, and nothing at all unless `wanted`.
template <RopeConfig c, int access, typename E>
DEVICE Vec<E, 2 * pairs_of_piece<c>> read_piece(const E* row, int piece, bool wanted) {
  constexpr bool halves = reads_halves<c>;
  constexpr int n = pairs_of_piece<c>;
  const Place<c, halves> place(piece);
  if constexpr (!halves) {
    return load_vector<access, 2 * n>(row, place.first, wanted ? place.first_end : 0);
  } else {
    return joined(load_vector<access, n>(row, place.first, wanted ? place.first_end : 0),
                  load_vector<access, n>(row, place.second, wanted ? place.second_end : 0));
  }
}

template <RopeConfig c>
DEVICE void write_piece(Element<c.x>* row, int piece, const Piece<c>& v) {
  constexpr bool halves = writes_halves<c>;
  constexpr int n = pairs_of_piece<c>;
  // A row of pairs of halves: what divides rotary_dim need not divide the half.
  constexpr int access = c.style == RopeStyle::interleaved_to_half ? (c.access + 1) / 2 : c.access;
  const Place<c, halves> place(piece);
  if constexpr (!halves) {
    store_vector<access, 2 * n>(row, place.first, place.first_end, v);
  } else if (c.rest && piece >= turned_pieces<c>) {  // in one go: half a sector takes as long as a whole one
    store_vector<c.access, 2 * n>(row, place.first, place.first_end, v);
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
    return load_vector<c.table_access, n>(row, first, end);
  } else {
    using C = Element<c.table>;
    Vec<C, n> v;
#pragma unroll
    for (int i = 0; i < n; ++i)
      v.at[i] = load_access<C, 1>(row + (first + i) * stride, first + i < end).at[0];
    return v;
  }
}

// The cosines or sines of a piece, one for each element in the order of the output.
template <RopeConfig c> using Angles = Vec<Element<c.table>, 2 * pairs_of_piece<c>>;

template <RopeConfig c>
DEVICE Angles<c> read_angles(const RopeTable& table, int64_t offset, int piece, bool wanted) {
  constexpr int n = pairs_of_piece<c>, half = c.rotary_dim / 2;
  const auto* row = static_cast<const Element<c.table>*>(table.data) + offset;
  const int64_t stride = table.column_stride;
  const int end = wanted ? half : 0;
  if constexpr (c.exchange) {
    const int first = piece * 2 * n;
    return read_columns<c, 2 * n>(row, stride, c.per_pair && first >= half ? first - half : first,
                                  c.per_pair ? end : 2 * end);
  } else if constexpr (writes_halves<c>) {
    const auto first = read_columns<c, n>(row, stride, piece * n, end);
    if constexpr (c.per_pair) return joined(first, first);
    else return joined(first, read_columns<c, n>(row + half * stride, stride, piece * n, end));
  } else if constexpr (c.per_pair) {
    const auto pairs = read_columns<c, n>(row, stride, piece * n, end);
    Angles<c> both;
#pragma unroll
    for (int i = 0; i < 2 * n; ++i) both.at[i] = pairs.at[i / 2];
    return both;
  } else {
    return read_columns<c, 2 * n>(row, stride, piece * 2 * n, 2 * end);
  }
}

template <RopeConfig c>
DEVICE int64_t read_position(const RopeArgs& args, const RopeTensor& x, int64_t group, bool wanted) {
  const int64_t at = row_offset<c.strided>(x.position_groups, group);
  if constexpr (c.position_bytes == 8)
    return load_access<int64_t, 1>(static_cast<const int64_t*>(args.positions) + at, wanted).at[0];
  else
    return load_access<int32_t, 1>(static_cast<const int32_t*>(args.positions) + at, wanted).at[0];
}

// ---- the norm in front ----

// The sum over a row, in the order of the norm kernel, from those over the 16 bytes that the norm takes at a time: a
// thread holds one such part, or two in two runs. Thread i starts with the parts i and i + lanes; what is missing is 0.
template <RopeConfig c>
DEVICE float sum_of_row(const Piece<c>& x) {
  constexpr int n = pairs_of_piece<c>;
  if constexpr (!reads_halves<c>) {
    return sum_over<c.lanes>(sum_of_squares(x), nullptr);
  } else {
    constexpr int half = c.rotary_dim / 2 / n, parts = c.head_size / n;
    const float low = sum_of_squares<0, n>(x), high = sum_of_squares<n, 2 * n>(x);
    if constexpr (half == c.lanes) return sum_over<c.lanes>(low + high, nullptr);
    auto part = [&](int i) {  // the halves of the rotation, then what lies beyond it, two parts a thread
      const int beyond = i - 2 * half;
      const int thread = beyond >= 0 ? half + beyond / 2 : i % half;
      const float a = __shfl_sync(0xffffffff, low, thread, c.lanes), b = __shfl_sync(0xffffffff, high, thread, c.lanes);
      return i >= parts ? 0.f : (beyond >= 0 ? beyond % 2 : i >= half) ? b : a;
    };
    const int thread = threadIdx.x % c.lanes;
    const float first = part(thread);
    return sum_over<c.lanes>(first + part(thread + c.lanes), nullptr);
  }
}

// ---- rotation ----

// The elements in the order of the output, and the partner of each.
template <RopeConfig c>
struct Turned {
  static constexpr int n = pairs_of_piece<c>;
  Piece<c> own, partner;

  DEVICE explicit Turned(const Piece<c>& x) : own(x) {
    if constexpr (c.exchange) {
#pragma unroll
      for (int i = 0; i < int(kVectorBytes / 4); ++i)
        word(partner, i) = __shfl_xor_sync(0xffffffff, word(x, i), turned_pieces<c> / 2, 32);
    } else {
      constexpr bool from_halves = reads_halves<c>, to_halves = writes_halves<c>;
#pragma unroll
      for (int i = 0; i < n; ++i) {
        const auto a = x.at[from_halves ? i : 2 * i], b = x.at[from_halves ? n + i : 2 * i + 1];
        own.at[to_halves ? i : 2 * i] = partner.at[to_halves ? n + i : 2 * i + 1] = a;
        own.at[to_halves ? n + i : 2 * i + 1] = partner.at[to_halves ? i : 2 * i] = b;
      }
    }
  }
};

DEVICE float negated(float x) { return -x; }
DEVICE bf16 negated(bf16 x) { return {uint16_t(x.bits ^ 0x8000)}; }
DEVICE f16 negated(f16 x) { return {uint16_t(x.bits ^ 0x8000)}; }

// With the sign that the rotation gives them: minus for the first element of a pair, else plus; the other way round if
// `inverse`.
template <RopeConfig c>
DEVICE void give_signs(Angles<c>& sin, int piece, bool inverse) {
  constexpr int n = pairs_of_piece<c>;
#pragma unroll
  for (int i = 0; i < 2 * n; ++i) {
    const bool first = c.exchange ? piece < turned_pieces<c> / 2 : writes_halves<c> ? i < n : i % 2 == 0;
    if (first != inverse) sin.at[i] = negated(sin.at[i]);
  }
}

// own * cos + partner * sin, with the roundings of the CPU kernel.
template <RopeConfig c>
DEVICE Piece<c> rotate_piece(const Piece<c>& x, const Angles<c>& cos, const Angles<c>& sin) {
  const Turned<c> turned(x);
  if constexpr (c.round_products)
    return sum(product(turned.own, cos), product(turned.partner, sin));
  else
    return rounded<Element<c.x>, 2 * pairs_of_piece<c>>([&](int i) {
      return value(turned.own, i) * value(cos, i) + value(turned.partner, i) * value(sin, i);
    });
}

// How often the threads of a position go through its rows.
template <RopeConfig c>
DEVICE int64_t turns_of(const RopeTensor& x) { return (x.in_rows.count + c.heads - 1) / c.heads; }

template <RopeConfig c>
DEVICE uint32_t blocks_of(const RopeArgs& args, int tensor) {
  const RopeTensor& x = args.tensors[tensor];
  const int64_t threads = args.rows[tensor] ? turns_of<c>(x) * x.in_groups.count * c.lanes : 0;
  return uint32_t((threads + kRopeThreads - 1) / kRopeThreads);
}

// ---- caches ----

template <RopeConfig c>
DEVICE int64_t read_slot(const RopeCache& cache, int64_t at, bool wanted) {
  using Slot = Choose<c.slot_bytes == 8, int64_t, int32_t>;
  return load_access<Slot, 1>(static_cast<const Slot*>(cache.slots) + at, wanted).at[0];
}

DEVICE bool is_slot(const RopeCache& cache, int64_t slot) { return slot >= 0 && slot < cache.length; }

// A row of v to the slot of its token, unless the cache has none there.
template <RopeConfig c, typename Index>
DEVICE void write_values(const RopeCache& cache, Index thread) {
  using T = Element<c.x>;
  constexpr int n = kVectorBytes / sizeof(T);
  const int first = int(thread % c.value_lanes) * n;
  const Index row = thread / c.value_lanes, heads = Index(cache.sizes[2]), tokens = Index(cache.sizes[1]);
  const int64_t head = row % heads, token = row / heads % tokens, batch = row / heads / tokens;
  const bool active = batch < cache.sizes[0];
  const auto offset = [&](const int64_t* strides, int64_t at) {
    return batch * strides[0] + at * strides[1] + head * strides[2];
  };

  wait_for_previous_kernel();
  const int64_t slot = read_slot<c>(cache, batch * cache.slot_strides[0] + token * cache.slot_strides[1], active);
  const auto piece = load_vector<c.value_access, n>(
      static_cast<const T*>(cache.values) + offset(cache.in_strides, token), first, active ? cache.value_size : 0);
  let_next_kernel_start();
  if (active && is_slot(cache, slot))
    store_vector<c.value_access, n>(static_cast<T*>(cache.value_cache) + offset(cache.out_strides, slot), first,
                                    cache.value_size, piece);
}

template <RopeConfig c>
DEVICE void rotary_embedding(const RopeArgs& args) {
  using T = Element<c.x>;
  using W = Element<c.weight>;
  // Of threads, rows and positions: divisions of 64 bits take many times as long as those of 32.
  using Index = Choose<c.wide, uint64_t, uint32_t>;

  // Blocks for q, then blocks for k, then blocks for v.
  const uint32_t q_blocks = blocks_of<c>(args, 0);
  const bool is_k = blockIdx.x >= q_blocks;
  if constexpr (c.slot_bytes > 0)
    if (const uint32_t others = q_blocks + blocks_of<c>(args, 1); blockIdx.x >= others)
      return write_values<c>(args.cache, Index(blockIdx.x - others) * kRopeThreads + threadIdx.x);
  const RopeTensor& x = args.tensors[is_k];
  const Index stride = Index(turns_of<c>(x));  // between the rows of a thread
  const Index thread = Index(blockIdx.x - (is_k ? q_blocks : 0)) * kRopeThreads + threadIdx.x;
  const int piece = int(thread % c.lanes);
  const Index group = thread / c.lanes / stride, first_row = thread / c.lanes % stride;
  const bool beyond = c.rest && piece >= turned_pieces<c>, apart = c.apart && beyond;
  const bool active = group < x.in_groups.count && !(apart && x.rest_size == 0), turns = active && !beyond;
  const Index rows = active ? Index(x.in_rows.count) : 0;
  const Rows &in_groups = apart ? x.rest_groups : x.in_groups, &in_rows = apart ? x.rest_rows : x.in_rows;
  const T* in = static_cast<const T*>(apart ? x.rest : x.in) + row_offset<c.strided>(in_groups, group);
  T* out = static_cast<T*>(apart ? x.rest_out : x.out) + row_offset<c.strided>(x.out_groups, group);

  wait_for_previous_kernel();

  int64_t position = 0;
  if constexpr (c.position_bytes > 0) position = read_position<c>(args, x, group, turns);
  int64_t slot = 0;
  if constexpr (c.slot_bytes > 0)
    slot = read_slot<c>(args.cache, row_offset<c.strided>(args.cache.slot_groups, group), active && is_k);
  Piece<c> held[c.heads];
#pragma unroll
  for (int j = 0; j < c.heads; ++j) {
    const Index row = first_row + j * stride;
    held[j] = read_piece<c, c.access>(in + row_offset<c.strided>(in_rows, row), piece, row < rows);
  }
  Vec<W, 2 * pairs_of_piece<c>> weight{};
  if constexpr (c.normed && c.form != WeightForm::none)
    weight = read_piece<c, c.weight_access>(static_cast<const W*>(args.norm.weights[is_k]), piece, active);
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
  give_signs<c>(sin, piece, args.sin_sign < 0);
  if (!valid) {
#pragma unroll
    for (auto& each : sin.at) each = from_float<Element<c.table>>(__uint_as_float(0x7fffffff));  // spoils every sum
  }
  let_next_kernel_start();
  if constexpr (c.ordered && c.lanes > 32) __syncthreads();
  bool written = true;
  if constexpr (c.slot_bytes > 0)
    if (is_k) {
      out += slot * args.cache.key_stride;
      written = is_slot(args.cache, slot);
    }

#pragma unroll
  for (int j = 0; j < c.heads; ++j) {
    if constexpr (c.normed) {
      const float squares = sum_of_row<c>(held[j]);
      held[j] = normed<T, c.form>(held[j], weight, inverse_norm(squares, c.head_size, args.norm.eps));
    }
    auto result = rotate_piece<c>(held[j], cos, sin);
    if constexpr (c.rest) {  // word by word: a choice between two structures goes through memory
#pragma unroll
      for (int i = 0; i < int(sizeof(result) / 4); ++i)
        word(result, i) = beyond ? word(held[j], i) : word(result, i);
    }
    if (const Index row = first_row + j * stride; row < rows && written)
      write_piece<c>(out + row_offset<c.strided>(x.out_rows, row), piece, result);
  }
}

}  // namespace deepinfer
