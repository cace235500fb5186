// Rotary embedding. A row of cosines and sines becomes two float tables in the order of the output, with the sign of
// the rotation in the sines, so that every style is out = x * cos + partner * sin; the tables then serve all heads of
// the position. Work goes by blocks of positions: the tables of a block stay in the L1 cache, and whatever the order of
// heads and positions in memory is, a block reads and writes runs of a few KB. Bound by memory: read x, write the
// result. With a norm in front, a row is normed into a scratch row, which is then rotated. What all heads of a position
// share is rotated once and copied. Rows that a cache takes go to the slots of their tokens.

#include "rope.h"

#include "norm_row.h"

namespace deepinfer::cpu::DEEPINFER_ISA {

namespace {

constexpr int64_t kPairs = 256;        // of one table; wider rows take several turns
constexpr int64_t kPositions = 64;     // of a block, at most
constexpr int64_t kFloats = 4 * 1024;  // of all tables of a block: 16 KB

inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }

int64_t slot_at(const RopeCache& cache, int64_t at) {
  return cache.wide_slots ? static_cast<const int64_t*>(cache.slots)[at] : static_cast<const int32_t*>(cache.slots)[at];
}

template <typename C>
void read_columns(const void* data, int64_t offset, int64_t stride, int64_t n, float* to) {
  const C* from = static_cast<const C*>(data) + offset;
  if (stride == 1) {
    for (int64_t i = 0; i < n; ++i) to[i] = load1(from + i);
  } else {
    for (int64_t i = 0; i < n; ++i) to[i] = load1(from + i * stride);
  }
}

void read_columns(DType dtype, const RopeTable& table, int64_t row, int64_t column, int64_t n, float* to) {
  const int64_t offset = row + column * table.column_stride;
  switch (dtype) {
    case DType::f32: return read_columns<float>(table.data, offset, table.column_stride, n, to);
    case DType::bf16: return read_columns<bf16>(table.data, offset, table.column_stride, n, to);
    case DType::f16: return read_columns<f16>(table.data, offset, table.column_stride, n, to);
  }
}

// One value for each output element of the pairs [first, first + n), in the order of the output, the two halves of the
// styles that write halves one after the other: times `sign_a` for the first elements of the pairs, `sign_b` for the
// second.
void expand(const RopeArgs& args, const RopeTable& table, int64_t row, int64_t first, int64_t n, float sign_a,
            float sign_b, float* to) {
  const bool per_pair = args.columns != args.rotary_dim;
  if (args.style == RopeStyle::interleaved) {
    if (per_pair) {
      float pair[kPairs];
      read_columns(args.table_dtype, table, row, first, n, pair);
      for (int64_t i = 0; i < n; ++i) to[2 * i] = to[2 * i + 1] = pair[i];
    } else {
      read_columns(args.table_dtype, table, row, 2 * first, 2 * n, to);
    }
    for (int64_t i = 0; i < n; ++i) {
      to[2 * i] *= sign_a;
      to[2 * i + 1] *= sign_b;
    }
  } else {
    read_columns(args.table_dtype, table, row, first, n, to);
    read_columns(args.table_dtype, table, row, per_pair ? first : args.rotary_dim / 2 + first, n, to + n);
    for (int64_t i = 0; i < n; ++i) {
      to[i] *= sign_a;
      to[n + i] *= sign_b;
    }
  }
}

// The table of n pairs: 2n cosines, 2n sines.
void fill_table(const RopeArgs& args, const RopeTensor& x, int64_t group, int64_t first, int64_t n, float* to) {
  int64_t cos_row, sin_row;
  if (args.positions) {
    const int64_t at = row_offset(x.position_groups, group);
    const int64_t position = args.wide_positions ? static_cast<const int64_t*>(args.positions)[at]
                                                 : static_cast<const int32_t*>(args.positions)[at];
    cos_row = position * x.cos.row_stride;
    sin_row = position * x.sin.row_stride;
  } else {
    cos_row = row_offset(x.cos.groups, group);
    sin_row = row_offset(x.sin.groups, group);
  }
  expand(args, x.cos, cos_row, first, n, 1.f, 1.f, to);
  expand(args, x.sin, sin_row, first, n, -args.sin_sign, args.sin_sign, to + 2 * n);
}

// The product of two values of T rounded to T. For bf16 without the test for NaN: one made by bf16 operands has a zero
// low half and survives the rounding, which adds less than 1 to the high half.
template <typename T>
inline float rounded_product(float a, float b) { return round_to1<T>(a * b); }
template <>
inline float rounded_product<bf16>(float a, float b) {
  const uint32_t u = bit_cast<uint32_t>(a * b);
  return bit_cast<float>((u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u);
}

template <typename T, bool round_products>
inline float rotate(float x, float cos, float partner, float sin) {
  if constexpr (round_products) return rounded_product<T>(x, cos) + rounded_product<T>(partner, sin);
  return x * cos + partner * sin;
}

// Plain loops, which the compiler vectorises better than it does vector types wider than the registers. ivdep: x and
// out are the same or apart, and a pair is read before it is written.
template <typename T, RopeStyle style, bool round_products, typename From>
void rotate_row(const From* x, T* out, int64_t half, int64_t first, int64_t n, const float* table) {
  const float *cos = table, *sin = table + 2 * n;
  if constexpr (style == RopeStyle::interleaved) {
    x += 2 * first;
    out += 2 * first;
#pragma GCC ivdep
    for (int64_t i = 0; i < 2 * n; i += 2) {
      const float a = load1(x + i), b = load1(x + i + 1);
      store1(out + i, rotate<T, round_products>(a, cos[i], b, sin[i]));
      store1(out + i + 1, rotate<T, round_products>(b, cos[i + 1], a, sin[i + 1]));
    }
  } else {
    constexpr int step = style == RopeStyle::half ? 1 : 2;
    const From* x_a = x + step * first;
    const From* x_b = style == RopeStyle::half ? x_a + half : x_a + 1;
    T *out_a = out + first, *out_b = out + half + first;
    const float *cos_b = cos + n, *sin_b = sin + n;
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) {
      const float a = load1(x_a + step * i), b = load1(x_b + step * i);
      store1(out_a + i, rotate<T, round_products>(a, cos[i], b, sin[i]));
      store1(out_b + i, rotate<T, round_products>(b, cos_b[i], a, sin_b[i]));
    }
  }
}

// The same for f16, whose conversions the compiler does not vectorise: rows of x and of the partners in floats, both in
// the order of the output, and 16 lanes at a time.
template <typename T, RopeStyle style, bool round_products, typename From>
  requires(dtype_of<T>::value == DType::f16)
void rotate_row(const From* x, T* out, int64_t half, int64_t first, int64_t n, const float* table) {
  float own[2 * kPairs + kLanes], partner[2 * kPairs + kLanes];
  auto read = [](const From* from, int64_t count, float* to) {
    for (int64_t i = 0; i < count; i += kLanes)
      store(to + i, count - i < kLanes ? load_part(from + i, int(count - i)) : load(from + i));
  };
  auto write = [](const float* from, int64_t count, T* to) {
    for (int64_t i = 0; i < count; i += kLanes)
      count - i < kLanes ? store_part(to + i, load(from + i), int(count - i)) : store(to + i, load(from + i));
  };
  if constexpr (style == RopeStyle::half) {
    read(x + first, n, own);
    read(x + half + first, n, own + n);
  } else if constexpr (style == RopeStyle::interleaved) {
    read(x + 2 * first, 2 * n, own);
  } else {
    read(x + 2 * first, 2 * n, partner);
    for (int64_t i = 0; i < n; ++i) {
      own[i] = partner[2 * i];
      own[n + i] = partner[2 * i + 1];
    }
  }
  const int64_t step = style == RopeStyle::interleaved ? 2 : 1, to_partner = style == RopeStyle::interleaved ? 1 : n;
  for (int64_t i = 0; i < step * n; i += step) {
    partner[i] = own[i + to_partner];
    partner[i + to_partner] = own[i];
  }
  for (int64_t i = 0; i < 2 * n; i += kLanes) {
    F32 a = load(own + i) * load(table + i), b = load(partner + i) * load(table + 2 * n + i);
    store(own + i, round_products ? round_to<T>(a) + round_to<T>(b) : a + b);
  }
  if constexpr (style == RopeStyle::interleaved) {
    write(own, 2 * n, out + 2 * first);
  } else {
    write(own, n, out + first);
    write(own + n, n, out + half + first);
  }
}

template <typename T>
using NormRow = void (*)(const T* x, const void* weight, float* out, int64_t n, float eps);

template <typename T, typename W, WeightForm form>
void norm_head(const T* x, const void* weight, float* out, int64_t n, float eps) {
  norm_row<T, W, T, form, false>(x, nullptr, static_cast<const W*>(weight), out, nullptr, n, eps);
}

template <typename T, typename W>
NormRow<T> norm_of(WeightForm form) {
  switch (form) {
    case WeightForm::cast_mul: return norm_head<T, W, WeightForm::cast_mul>;
    case WeightForm::mul_cast: return norm_head<T, W, WeightForm::mul_cast>;
    case WeightForm::one_plus: return norm_head<T, W, WeightForm::one_plus>;
    case WeightForm::none: return norm_head<T, W, WeightForm::none>;
  }
  return nullptr;
}

template <typename T>
NormRow<T> norm_of(const RopeArgs& args) {
  if (!args.normed) return nullptr;
  switch (args.norm.weight_dtype) {
    case DType::f32: return norm_of<T, float>(args.norm.form);
    case DType::bf16: return norm_of<T, bf16>(args.norm.form);
    case DType::f16: return norm_of<T, f16>(args.norm.form);
  }
  return nullptr;
}

// Item i belongs to block i / (block * heads); inside a block, positions change faster than heads.
template <typename T, RopeStyle style, bool round_products>
void rotate_rows(const RopeArgs& args, const RopeTensor& x, int64_t begin, int64_t end) {
  const int64_t half = args.rotary_dim / 2, rest = x.rest_size;
  const int64_t heads = x.in_rows.count, groups = x.in_groups.count;
  const int64_t widest = min(half, kPairs), block = min(kPositions, kFloats / (4 * widest));
  alignas(64) float tables[kFloats + kLanes];  // vectors may read past the end
  int64_t in_offset[kPositions], out_offset[kPositions], rest_offset[kPositions];
  const NormRow<T> norm = norm_of<T>(args);
  const bool shared = x.in_rows.dims == 1 && x.in_rows.strides[0] == 0 && half <= kPairs && !norm;
  const bool is_k = &x != args.tensors, cached = is_k && args.cache.slots;
  const void* weight = norm ? args.norm.weights[is_k] : nullptr;
  alignas(64) float normed[RopeNorm::kMostHeadSize];
  while (begin < end) {
    const int64_t first_group = begin / (block * heads) * block, positions = min(block, groups - first_group);
    const int64_t block_begin = first_group * heads, block_end = min(end, block_begin + positions * heads);
    const T* rotated[kPositions] = {};
    for (int64_t j = 0; j < positions; ++j) {
      in_offset[j] = row_offset(x.in_groups, first_group + j);
      out_offset[j] = row_offset(x.out_groups, first_group + j);
      if (cached) {
        const int64_t at = row_offset(args.cache.slot_groups, first_group + j);
        out_offset[j] += slot_at(args.cache, at) * args.cache.key_stride;
      }
      rest_offset[j] = row_offset(x.rest_groups, first_group + j);
    }
    for (int64_t first = 0; first < half; first += kPairs) {
      const int64_t n = min(half - first, kPairs);
      for (int64_t j = 0; j < positions; ++j) fill_table(args, x, first_group + j, first, n, tables + j * 4 * n);
      int64_t head = (begin - block_begin) / positions, j = (begin - block_begin) % positions;
      for (int64_t i = begin; i < block_end; ++head, j = 0) {
        const T* in = static_cast<const T*>(x.in) + row_offset(x.in_rows, head);
        T* out = static_cast<T*>(x.out) + row_offset(x.out_rows, head);
        const T* passed = static_cast<const T*>(x.rest) + row_offset(x.rest_rows, head);
        T* passed_out = static_cast<T*>(x.rest_out) + row_offset(x.out_rows, head);
        for (; j < positions && i < block_end; ++j, ++i) {
          const T* from = in + in_offset[j];
          T* to = out + out_offset[j];
          if (norm) {
            norm(from, weight, normed, args.head_size, args.norm.eps);
            rotate_row<T, style, round_products>(normed, to, half, first, n, tables + j * 4 * n);
            if (first == 0)
              for_lanes(rest, [&](int64_t at, int count) {
                store(to + args.rotary_dim + at, load(normed + args.rotary_dim + at, count), count);
              });
            continue;
          }
          if (shared && rotated[j]) {
            std::memcpy(to, rotated[j], args.rotary_dim * sizeof(T));
          } else {
            rotate_row<T, style, round_products>(from, to, half, first, n, tables + j * 4 * n);
            rotated[j] = to;
          }
          const T* passed_from = passed + rest_offset[j];
          T* passed_to = passed_out + out_offset[j];
          if (first == 0 && rest > 0 && passed_from != passed_to) std::memcpy(passed_to, passed_from, rest * sizeof(T));
        }
      }
    }
    begin = block_end;
  }
}

template <typename T, RopeStyle style>
void with_rounding(const RopeArgs& args, const RopeTensor& x, int64_t begin, int64_t end) {
  args.round_products ? rotate_rows<T, style, true>(args, x, begin, end)
                      : rotate_rows<T, style, false>(args, x, begin, end);
}

template <typename T>
void with_style(const RopeArgs& args, const RopeTensor& x, int64_t begin, int64_t end) {
  switch (args.style) {
    case RopeStyle::half: return with_rounding<T, RopeStyle::half>(args, x, begin, end);
    case RopeStyle::interleaved: return with_rounding<T, RopeStyle::interleaved>(args, x, begin, end);
    case RopeStyle::interleaved_to_half: return with_rounding<T, RopeStyle::interleaved_to_half>(args, x, begin, end);
  }
}

void rotate_tensor(const RopeArgs& args, const RopeTensor& x, int64_t begin, int64_t end) {
  switch (args.dtype) {
    case DType::f32: return with_style<float>(args, x, begin, end);
    case DType::bf16: return with_style<bf16>(args, x, begin, end);
    case DType::f16: return with_style<f16>(args, x, begin, end);
  }
}

void copy_values(const RopeArgs& args, int64_t begin, int64_t end) {
  const RopeCache& cache = args.cache;
  const int64_t item = args.dtype == DType::f32 ? 4 : 2, bytes = cache.value_size * item;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t head = i % cache.sizes[2], token = i / cache.sizes[2] % cache.sizes[1];
    const int64_t batch = i / cache.sizes[2] / cache.sizes[1];
    const int64_t slot = slot_at(cache, batch * cache.slot_strides[0] + token * cache.slot_strides[1]);
    const auto offset = [&](const int64_t* strides, int64_t at) {
      return (batch * strides[0] + at * strides[1] + head * strides[2]) * item;
    };
    std::memcpy(static_cast<char*>(cache.value_cache) + offset(cache.out_strides, slot),
                static_cast<const char*>(cache.values) + offset(cache.in_strides, token), bytes);
  }
}

}  // namespace

void rotary_embedding(const RopeArgs& args, int64_t begin, int64_t end) {
  const int64_t k_begin = args.rows[0], v_begin = k_begin + args.rows[1];
  if (begin < k_begin) rotate_tensor(args, args.tensors[0], begin, min(end, k_begin));
  if (begin < v_begin && end > k_begin)
    rotate_tensor(args, args.tensors[1], begin > k_begin ? begin - k_begin : 0, min(end, v_begin) - k_begin);
  if (end > v_begin) copy_values(args, begin > v_begin ? begin - v_begin : 0, end - v_begin);
}

}  // namespace deepinfer::cpu::DEEPINFER_ISA
