// Scores, group limit, top-k and weights of a mixture-of-experts router, one pass over the logits.
//
// The top-k is a tournament: above the keys stand the maxima of one vector of keys each, above them the maxima of
// those, until one vector is left. A round walks down from the root, always into the first lane that equals the
// maximum, so that the lower index wins a tie; takes the key out; and renews the maxima on the way back up. A round is
// one chain of dependent instructions, so several rows go through it side by side.

#include "moe_router.h"

#include <climits>
#include <new>

#include "vec.h"

namespace deepinfer::cpu::DEEPINFER_ISA {

namespace {

// Keys are int32 in the order of the floats they stand for: -0 equals 0, every NaN is the same and the greatest.
// kTaken is below the key of -inf: experts already picked, masked ones and the padding of the last vector.
constexpr int32_t kTaken = INT_MIN;
constexpr int32_t kNaN = INT_MAX;

// One register of keys. GCC takes comparisons of vectors that are wider than a register apart into scalars.
#if defined(__AVX512F__)
constexpr int kWidth = 16;
#elif defined(__AVX2__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif
static_assert(kLanes % kWidth == 0);
typedef int32_t Keys __attribute__((vector_size(4 * kWidth)));
typedef float Values __attribute__((vector_size(4 * kWidth)));

constexpr int kMaxRows = 4;              // rows that share a pass
constexpr int64_t kSharedExperts = 512;  // above this many experts, a row goes alone

inline int64_t padded(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

inline Keys load_keys(const int32_t* p) { Keys x; std::memcpy(&x, p, sizeof(x)); return x; }
inline Values load_values(const float* p) { Values x; std::memcpy(&x, p, sizeof(x)); return x; }
inline void store_keys(int32_t* p, Keys x) { std::memcpy(p, &x, sizeof(x)); }
using ::max, ::min;
inline Keys max(Keys a, Keys b) { return a > b ? a : b; }
inline Keys min(Keys a, Keys b) { return a < b ? a : b; }

inline Keys lanes() {
  Keys lane;
  for (int i = 0; i < kWidth; ++i) lane[i] = i;
  return lane;
}

// Lane i of the result is lane i ^ distance of x.
inline Keys swapped(Keys x, int distance) { return __builtin_shuffle(x, lanes() ^ distance); }

// The maximum in every lane.
inline Keys spread_max(Keys x) {
  for (int distance = kWidth / 2; distance > 0; distance /= 2) x = max(x, swapped(x, distance));
  return x;
}

// The first lane of x that equals m; there is one.
inline int first_equal(Keys x, Keys m) {
#if defined(__AVX512F__)
  return __builtin_ctz(_mm512_cmpeq_epi32_mask((__m512i)x, (__m512i)m));
#elif defined(__AVX2__)
  return __builtin_ctz(_mm256_movemask_ps((__m256)(x == m)));
#else
  int lane = 0;
  while (x[lane] != m[lane]) ++lane;
  return lane;
#endif
}

inline Keys keys_of(Values x) {
  Keys bits = bit_cast<Keys>(x + 0.f);  // -0 + 0 is 0
  Keys key = bits ^ ((bits >> 31) & INT_MAX);
  return (bits & INT_MAX) > 0x7f800000 ? Keys{} + kNaN : key;
}

inline float value_of(int32_t key) { return bit_cast<float>(key ^ ((key >> 31) & INT_MAX)); }

// ---- scores --------------------------------------------------------------------------------------------------------

inline F32 sqrt(F32 x) {
  float a[kLanes];
  std::memcpy(a, &x, sizeof(a));
  for (float& v : a) v = __builtin_sqrtf(v);
  std::memcpy(&x, a, sizeof(a));
  return x;
}

// log(1 + y) for y >= 0, from log(u) of the rounded u = 1 + y and the rest that the rounding lost.
// log(2^n m) = n ln2 + 2 atanh(s), s = (m - 1) / (m + 1), |s| < 0.172.
inline F32 log1p(F32 y) {
  F32 u = 1.f + y;
  I32 bits = bit_cast<I32>(u);
  I32 n = (bits - 0x3f3504f3) >> 23;  // m in [sqrt(1/2), sqrt(2))
  F32 m = bit_cast<F32>(bits - (n << 23));
  F32 s = (m - 1.f) / (m + 1.f), s2 = s * s;
  F32 series = s2 * (1 / 3.f + s2 * (1 / 5.f + s2 * (1 / 7.f + s2 * (1 / 9.f))));
  F32 exponent = __builtin_convertvector(n, F32);
  F32 rest = (y - (u - 1.f)) / u;
  return exponent * 0.693359375f + (2.f * (s + s * series) + (exponent * -2.12194440e-4f + rest));
}

// Softplus is the identity above 20, as torch has it.
inline F32 sqrt_softplus(F32 x) { return sqrt(select(x > 20.f, x, log1p(exp(x)))); }

// Over n values in place; x is padded with -inf to whole vectors, which every score maps to 0 (or the row to NaN).
void apply(Score score, float* x, int64_t n) {
  switch (score) {
    case Score::softmax: {
      F32 top = load(x);
      for (int64_t i = kLanes; i < n; i += kLanes) top = max(top, load(x + i));
      const F32 largest = splat(reduce_max(top));
      F32 sum{};
      for (int64_t i = 0; i < n; i += kLanes) {
        F32 e = exp(load(x + i) - largest);
        sum = sum + e;
        store(x + i, e);
      }
      const F32 total = splat(reduce_add(sum));
      for (int64_t i = 0; i < n; i += kLanes) store(x + i, load(x + i) / total);
      return;
    }
    case Score::sigmoid:
      for (int64_t i = 0; i < n; i += kLanes) store(x + i, sigmoid(load(x + i)));
      return;
    case Score::sqrt_softplus:
      for (int64_t i = 0; i < n; i += kLanes) store(x + i, sqrt_softplus(load(x + i)));
      return;
  }
}

template <typename T>
void to_floats(const T* x, int64_t n, float* out, float fill) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(out + i, load(x + i));
  if (i < n) store(out + i, load_part(x + i, n - i, fill));
}

void to_floats(DType dtype, const void* x, int64_t offset, int64_t n, float* out, float fill) {
  switch (dtype) {
    case DType::f32: return to_floats(static_cast<const float*>(x) + offset, n, out, fill);
    case DType::bf16: return to_floats(static_cast<const bf16*>(x) + offset, n, out, fill);
    case DType::f16: return to_floats(static_cast<const f16*>(x) + offset, n, out, fill);
  }
}

void make_keys(const float* scores, const float* bias, int64_t n, int32_t* keys) {
  for (int64_t i = 0; i < n; i += kWidth) {
    Values score = load_values(scores + i);
    store_keys(keys + i, keys_of(bias ? score + load_values(bias + i) : score));
  }
  for (int64_t i = n; i < padded(n); ++i) keys[i] = kTaken;
}

// ---- tournament ----------------------------------------------------------------------------------------------------

constexpr int levels_of(int64_t keys) { return keys <= kWidth ? 1 : 1 + levels_of((keys + kWidth - 1) / kWidth); }
constexpr int kMaxLevels = levels_of(MoeRouterArgs::kMaxExperts);

// Where the levels above n keys start, counted from the keys themselves.
struct Shape {
  int levels;
  int64_t blocks[kMaxLevels], start[kMaxLevels], total = 0;
  explicit Shape(int64_t n) : levels(levels_of(padded(n))) {
    for (int level = 0; level < levels; ++level) {
      start[level] = total;
      total += padded(n);
      n = blocks[level] = padded(n) / kWidth;
    }
  }
};

// Fills the levels above the keys and returns the maximum.
template <int levels>
inline Keys build(const Shape& shape, int32_t* keys) {
  for (int level = 1; level < levels; ++level) {
    const int32_t* below = keys + shape.start[level - 1];
    int32_t* maxima = keys + shape.start[level];
    const int64_t blocks = shape.blocks[level - 1];
    for (int64_t b = 0; b < blocks; ++b) maxima[b] = spread_max(load_keys(below + b * kWidth))[0];
    for (int64_t b = blocks; b < padded(blocks); ++b) maxima[b] = kTaken;
  }
  return spread_max(load_keys(keys + shape.start[levels - 1]));
}

// Takes out the first key that equals `best`, the maximum, and renews `best`.
template <int levels>
inline int32_t take(const Shape& shape, int32_t* keys, Keys& best) {
  Keys vector[levels];
  int lane[levels];
  int64_t block[levels];
  int64_t at = 0;
  for (int level = levels - 1; level >= 0; --level) {
    block[level] = at;
    vector[level] = load_keys(keys + shape.start[level] + at * kWidth);
    lane[level] = first_equal(vector[level], best);
    at = at * kWidth + lane[level];
  }
  Keys renewed = Keys{} + kTaken;
  for (int level = 0; level < levels; ++level) {
    Keys v = lanes() == lane[level] ? renewed : vector[level];
    store_keys(keys + shape.start[level] + block[level] * kWidth, v);
    renewed = spread_max(v);
  }
  best = renewed;
  return int32_t(at);
}

template <int levels, int rows>
void pick_rows(const Shape& shape, int32_t* keys, int64_t count, int32_t* picked, int64_t picked_stride) {
  Keys best[rows];
  for (int r = 0; r < rows; ++r) best[r] = build<levels>(shape, keys + r * shape.total);
  for (int64_t j = 0; j < count; ++j)
    for (int r = 0; r < rows; ++r)
      picked[r * picked_stride + j] = take<levels>(shape, keys + r * shape.total, best[r]);
}

// The `count` greatest keys of each row, descending, lower index first; they become kTaken.
template <int levels = kMaxLevels>
void pick(const Shape& shape, int rows, int32_t* keys, int64_t count, int32_t* picked, int64_t picked_stride) {
  if constexpr (levels > 1)
    if (shape.levels < levels) return pick<levels - 1>(shape, rows, keys, count, picked, picked_stride);
  if (rows == kMaxRows) return pick_rows<levels, kMaxRows>(shape, keys, count, picked, picked_stride);
  for (int r = 0; r < rows; ++r)
    pick_rows<levels, 1>(shape, keys + r * shape.total, count, picked + r * picked_stride, picked_stride);
}

// ---- groups --------------------------------------------------------------------------------------------------------

inline Keys load_group(const int32_t* keys, int64_t left) {
  return left >= kWidth ? load_keys(keys) : (lanes() < int32_t(left) ? load_keys(keys) : Keys{} + kTaken);
}

float group_max(const int32_t* keys, int64_t size) {
  Keys first = load_group(keys, size);
  for (int64_t i = kWidth; i < size; i += kWidth) first = max(first, load_group(keys + i, size - i));
  return value_of(spread_max(first)[0]);
}

float group_top2_sum(const int32_t* keys, int64_t size) {
  Keys first = load_group(keys, size), second = Keys{} + kTaken;
  for (int64_t i = kWidth; i < size; i += kWidth) {
    Keys v = load_group(keys + i, size - i);
    second = max(second, min(first, v));
    first = max(first, v);
  }
  for (int distance = kWidth / 2; distance > 0; distance /= 2) {
    Keys other_first = swapped(first, distance), other_second = swapped(second, distance);
    second = max(min(first, other_first), max(second, other_second));
    first = max(first, other_first);
  }
  return value_of(first[0]) + value_of(second[0]);
}

// Takes out the experts of all but the best groups.
void mask_groups(const MoeRouterArgs& args, int rows, int32_t* keys, int64_t stride, const Shape& groups,
                 float* group_scores, int32_t* group_keys, int32_t* picked) {
  const int64_t size = args.num_experts / args.num_groups;
  for (int r = 0; r < rows; ++r) {
    for (int64_t g = 0; g < args.num_groups; ++g) {
      const int32_t* group = keys + r * stride + g * size;
      group_scores[g] = args.group_score == GroupScore::max ? group_max(group, size) : group_top2_sum(group, size);
    }
    make_keys(group_scores, nullptr, args.num_groups, group_keys + r * groups.total);
  }
  pick(groups, rows, group_keys, args.topk_groups, picked, 0);
  for (int r = 0; r < rows; ++r)
    for (int64_t g = 0; g < args.num_groups; ++g) {
      if (group_keys[r * groups.total + g] == kTaken) continue;  // picked, so it stays
      int32_t* group = keys + r * stride + g * size;
      for (int64_t i = 0; i < size; ++i) group[i] = kTaken;
    }
}

// ---- results -------------------------------------------------------------------------------------------------------

void finish_weights(const MoeRouterArgs& args, float* w) {
  const int64_t n = args.topk;
  const float fill = args.score_after_topk ? -__builtin_inff() : 0.f;
  for (int64_t i = n; i < padded(n); ++i) w[i] = fill;
  if (args.score_after_topk) {
    apply(args.score, w, n);
    for (int64_t i = n; i < padded(n); ++i) w[i] = 0.f;
  }
  F32 divisor = splat(1.f);
  if (args.renormalize) {
    F32 sum{};
    for (int64_t i = 0; i < n; i += kLanes) sum = sum + load(w + i);
    const float total = reduce_add(sum) + args.renorm_eps;
    divisor = splat(total < args.renorm_min ? args.renorm_min : total);  // NaN stays
  }
  for (int64_t i = 0; i < n; i += kLanes) store(w + i, load(w + i) / divisor * args.scale);
}

template <typename T>
void write(void* out, int64_t row, const float* w, int64_t n) {
  T* to = static_cast<T*>(out) + row * n;
  for (int64_t i = 0; i < n; ++i) store1(to + i, w[i]);
}

template <typename T>
void write_ids(void* out, int64_t row, const int32_t* ids, int64_t n) {
  T* to = static_cast<T*>(out) + row * n;
  for (int64_t i = 0; i < n; ++i) to[i] = ids[i];
}

void write_row(const MoeRouterArgs& args, int64_t row, const float* weights, const int32_t* ids) {
  args.wide_ids ? write_ids<int64_t>(args.ids, row, ids, args.topk) : write_ids<int32_t>(args.ids, row, ids, args.topk);
  switch (args.weights_dtype) {
    case DType::f32: return write<float>(args.weights, row, weights, args.topk);
    case DType::bf16: return write<bf16>(args.weights, row, weights, args.topk);
    case DType::f16: return write<f16>(args.weights, row, weights, args.topk);
  }
}

// Memory of one call, on the stack unless there are very many experts; each array starts on a cache line.
class Scratch {
 public:
  explicit Scratch(int64_t elements) {
    if (elements > kInline) next_ = heap_ = static_cast<char*>(::operator new(elements * 4, kAlignment));
  }
  Scratch(const Scratch&) = delete;
  ~Scratch() { ::operator delete(heap_, kAlignment); }

  // n is a multiple of 16.
  template <typename T>
  T* take(int64_t n) {
    T* start = reinterpret_cast<T*>(next_);
    next_ += n * sizeof(T);
    return start;
  }

 private:
  static constexpr std::align_val_t kAlignment{64};
  static constexpr int64_t kInline = 8192;
  alignas(64) char inline_[kInline * 4];
  char* heap_ = nullptr;
  char* next_ = inline_;
};

}  // namespace

void moe_router(const MoeRouterArgs& args, int64_t begin, int64_t end) {
  const int64_t n = args.num_experts, width = padded(n);
  const int together = n <= kSharedExperts && end - begin >= kMaxRows ? kMaxRows : 1;
  const Shape shape(n), groups(args.num_groups);
  Scratch scratch((2 + 2 * together) * width + together * (shape.total + groups.total));
  float* bias = scratch.take<float>(width);
  float* weights = scratch.take<float>(width);
  float* scores = scratch.take<float>(together * width);
  int32_t* keys = scratch.take<int32_t>(together * shape.total);
  int32_t* group_keys = scratch.take<int32_t>(together * groups.total);
  int32_t* picked = scratch.take<int32_t>(together * width);
  if (args.bias) to_floats(args.bias_dtype, args.bias, 0, n, bias, 0.f);
  for (int64_t row = begin; row < end; row += together) {
    const int rows = int(end - row < together ? end - row : together);
    for (int r = 0; r < rows; ++r) {
      float* x = scores + r * width;
      to_floats(args.dtype, args.logits, (row + r) * args.row_stride, n, x, -__builtin_inff());
      if (!args.score_after_topk) apply(args.score, x, n);
      make_keys(x, args.bias ? bias : nullptr, n, keys + r * shape.total);
    }
    if (args.topk_groups < args.num_groups)
      mask_groups(args, rows, keys, shape.total, groups, weights, group_keys, picked);
    pick(shape, rows, keys, args.topk, picked, args.topk);
    for (int r = 0; r < rows; ++r) {
      const int32_t* ids = picked + r * args.topk;
      for (int64_t j = 0; j < args.topk; ++j) weights[j] = scores[r * width + ids[j]];
      finish_weights(args, weights);
      write_row(args, row + r, weights, ids);
    }
  }
}

}  // namespace deepinfer::cpu::DEEPINFER_ISA
