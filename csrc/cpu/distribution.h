// Distributions over a vocabulary, as weights that are integers: sums of them are exact, whatever their order, and so
// is the choice that a random number makes. Include from kernel files only, as vec.h.
#pragma once

#include "../ops/sampling.h"
#include "select.h"

namespace {

typedef uint64_t U64 __attribute__((vector_size(128)));

// Four random words for a counter of four and a key of two (Philox4x32-10; Salmon et al., 2011).
struct Philox {
  uint32_t words[4];

  Philox(uint64_t key, uint64_t counter, uint32_t stream)
      : words{uint32_t(counter), uint32_t(counter >> 32), stream, 0} {
    uint32_t low = uint32_t(key), high = uint32_t(key >> 32);
    for (int round = 0; round < 10; ++round) {
      const uint64_t a = uint64_t(0xD2511F53u) * words[0], b = uint64_t(0xCD9E8D57u) * words[2];
      const uint32_t next[4] = {uint32_t(b >> 32) ^ words[1] ^ low, uint32_t(b), uint32_t(a >> 32) ^ words[3] ^ high,
                                uint32_t(a)};
      std::memcpy(words, next, sizeof(words));
      low += 0x9E3779B9u;
      high += 0xBB67AE85u;
    }
  }

  uint64_t first() const { return uint64_t(words[1]) << 32 | words[0]; }
  uint64_t second() const { return uint64_t(words[3]) << 32 | words[2]; }
};

// random / 2^64 of `total`.
inline uint64_t portion(uint64_t random, uint64_t total) {
  return uint64_t((unsigned __int128)random * total >> 64);
}

struct Distribution {
  int64_t only = -1;  // the one element that may be taken, if not -1
  float greatest = 0, inverse = 1;  // logit; 1 / temperature
  Entry last = 0;      // that is kept, in descending order; 0: all are
  uint64_t floor = 1;  // the least weight that is kept
  uint64_t total = 0;  // of the weights that are kept

  // exp((x - greatest) / temperature) in units of 2^-40, by one sequence of roundings on every device; 0 below the
  // floor.
  U64 weights(F32 x) const {
    F32 d = (x - greatest) * inverse;
    const I32 counts = (d > -28.f) & (x > -__builtin_inff());
    d = select(counts, d, F32{});
    const F32 magic = splat(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer
    const F32 n = (d * 1.44269504088896341f + magic) - magic;
    F32 r = fma(n, splat(-0.693359375f), d);
    r = fma(n, splat(2.12194440e-4f), r);
    F32 p = splat(1.3888889e-3f);
    p = fma(p, r, splat(8.3333333e-3f));
    p = fma(p, r, splat(4.1666667e-2f));
    p = fma(p, r, splat(1.6666667e-1f));
    p = fma(p, r, splat(0.5f));
    p = fma(p * r, r, r) + 1.f;
    const I32 exponent = __builtin_convertvector(n, I32) + (127 + 40);
    const F32 scaled = select(counts, p * bit_cast<F32>(exponent << 23), F32{});
    const U64 weight = __builtin_convertvector(scaled, U64);
    return weight >= floor ? weight : U64{};
  }

  // Of the elements from `index` on of a row of `size`; 0 for those that are not kept.
  U64 kept_weights(F32 x, int64_t index, int64_t size) const {
    typedef int64_t I64 __attribute__((vector_size(128)));
    const I32 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    if (last == 0 && index + kLanes <= size) return weights(x);
    constexpr uint32_t kZeroKey = 0x80000000;  // the key before it is that of -0, which equals 0
    if (!lanes_above(x, value_of(key_of(last) - (key_of(last) == kZeroKey ? 2 : 1)))) return U64{};
    const U32 keys = keys_of(x);
    const I32 at = lane + int32_t(index);
    const I32 kept = (at < int32_t(size)) &
                     ((keys > key_of(last)) | ((keys == key_of(last)) & (at <= int32_t(index_of(last)))));
    return weights(x) & bit_cast<U64>(__builtin_convertvector(kept, I64));
  }
};

inline uint64_t sum_of(U64 x) {
  uint64_t total = 0;
  for (int i = 0; i < kLanes; ++i) total += x[i];
  return total;
}

// NaN if there is one.
template <typename T>
inline float greatest_of(const T* row, int64_t size) {
  F32 greatest = splat(-__builtin_inff());
  I32 unordered{};
  for_lanes(size, [&](int64_t i, int n) {
    const F32 x = n == kLanes ? load(row + i) : load_part(row + i, n, load1(row + i));
    unordered |= x != x;
    greatest = max(x, greatest);
  });
  for (int j = 0; j < kLanes; ++j)
    if (unordered[j]) return __builtin_nanf("");
  return reduce_max(greatest);
}

template <typename T>
inline int64_t first_of(const T* row, float wanted) {
  for (int64_t at = 0;; ++at) {
    const float x = load1(row + at);
    if (wanted != wanted ? x != x : x == wanted) return at;
  }
}

// The parameters of a row.
struct Filter {
  float temperature, top_p, min_p;
  int64_t top_k;

  Filter(const deepinfer::Distributions& from, int64_t row)
      : temperature(from.temperature ? from.temperature[row] : from.all.temperature),
        top_p(from.top_p ? from.top_p[row] : from.all.top_p),
        min_p(from.min_p ? from.min_p[row] : from.all.min_p),
        top_k(from.top_k ? from.top_k[row] : from.all.top_k) {
    if (top_k <= 0 || top_k > from.size) top_k = from.size;
  }
};

// How much of `total` the kept elements have to reach: the least that leaves no element out before which less than
// top_p of it lies.
inline uint64_t nucleus_mass(float top_p, uint64_t total) {
  if (!(top_p < 1.f)) return total;
  const double mass = __builtin_ceil(double(top_p) * double(total));
  return mass < 1 ? 1 : mass < double(total) ? uint64_t(mass) : total;
}

// The distribution of a row.
template <typename T>
class RowDistribution : public Distribution {
 public:
  RowDistribution(const deepinfer::Distributions& from, int64_t row)
      : row_(static_cast<const T*>(from.logits) + row_offset(from.rows, row)), size_(from.size) {
    const Filter filter(from, row);
    greatest = greatest_of(row_, size_);
    if (!(filter.temperature >= deepinfer::kLeastTemperature) || !(__builtin_fabsf(greatest) < __builtin_inff())) {
      only = first_of(row_, greatest);
      return;
    }
    inverse = 1.f / filter.temperature;
    if (filter.top_k < size_) {
      cut(from.keep_ties ? with_ties(filter.top_k) : filter.top_k,
          [&](uint64_t listed) { return nucleus_mass(filter.top_p, listed); });
    } else if (filter.top_p < 1.f) {
      const uint64_t mass = nucleus_mass(filter.top_p, row_total());
      for (int64_t k = 256; !cut(k < size_ ? k : size_, [&](uint64_t) { return mass; });) k *= 8;
    }
    if (filter.min_p > 0.f) {
      const double share = filter.min_p < 1.f ? filter.min_p : 1.f;
      const double least = __builtin_ceil(share * double(deepinfer::kWeightOne));
      floor = least > 1 ? uint64_t(least) : 1;
    }
    total = row_total();
  }

  uint64_t weight(int64_t index) const {
    if (only >= 0) return index == only;
    return kept_weights(splat(load1(row_ + index)), index, size_)[0];
  }

  // Calls visit(first index, weights of 16 elements) until it returns true.
  template <typename Visit>
  void each(Visit&& visit) const {
    for (int64_t i = 0; i < size_; i += kLanes) {
      const int n = int(size_ - i < kLanes ? size_ - i : kLanes);
      if (visit(i, kept_weights(load(row_ + i, n), i, size_))) return;
    }
  }

 private:
  uint64_t row_total() const {
    U64 sums{};
    each([&](int64_t, U64 weights) {
      sums += weights;
      return false;
    });
    return sum_of(sums);
  }

  // How many elements are no less than the k-th.
  int64_t with_ties(int64_t k) const {
    const Scratch<Entry> list(Selection<T>::capacity(k, size_));
    const int64_t count = Selection<T>(list, k).run(row_, 0, size_);
    uint32_t kth = key_of(list[0]);
    for (int64_t i = 1; i < count; ++i) kth = key_of(list[i]) < kth ? key_of(list[i]) : kth;
    const float least = value_of(kth);
    int64_t found = 0;
    for (int64_t i = 0; i < size_; i += kLanes) {
      const int n = int(size_ - i < kLanes ? size_ - i : kLanes);
      const I32 reach = load(row_ + i, n) >= least;
      for (int j = 0; j < n; ++j) found -= reach[j];
    }
    return found;
  }

  // Finds the last element of the nucleus among the k greatest, whose mass depends on the mass of these. False if they
  // do not reach it.
  template <typename Mass>
  bool cut(int64_t k, Mass&& mass_of) {
    const Scratch<Entry> list(Selection<T>::capacity(k, size_)), other(k);
    const int64_t count = Selection<T>(list, k).run(row_, 0, size_);
    sort_by_key(list, other, count);
    const Scratch<uint64_t> weight(count);
    uint64_t listed = 0;
    for (int64_t i = 0; i < count; i += kLanes) {
      const int n = int(count - i < kLanes ? count - i : kLanes);
      F32 x{};
      for (int j = 0; j < n; ++j) x[j] = value_of(key_of(list[i + j]));
      const U64 w = weights(x);
      for (int j = 0; j < n; ++j) listed += weight[i + j] = w[j];
    }
    const uint64_t mass = mass_of(listed);
    if (listed < mass) return false;
    uint64_t sum = 0;
    int64_t at = -1;
    while (sum < mass) sum += weight[++at];
    last = list[at];
    return true;
  }

  const T* row_;
  int64_t size_;
};

}  // namespace
