// Selection of the greatest elements of a row, for the kernels that need it. Include from kernel files only, after
// vec.h's rules: everything is in an unnamed namespace.
#pragma once

#include <new>

#include "vec.h"

namespace {

// An integer in the order of the floats: -0 equals +0, and NaN of either sign is the greatest.
inline uint32_t key_of(float x) {
  if (x != x) return 0xffffffffu;
  const uint32_t bits = bit_cast<uint32_t>(x + 0.f);  // -0 + 0 is +0
  return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}

inline U32 keys_of(F32 x) {
  const U32 bits = bit_cast<U32>(x + 0.f);
  const U32 key = bits ^ (bit_cast<U32>(bit_cast<I32>(bits) >> 31) | 0x80000000u);
  return x != x ? U32{} + 0xffffffffu : key;
}

inline float value_of(uint32_t key) { return bit_cast<float>(key ^ (key >> 31 ? 0x80000000u : 0xffffffffu)); }

// Which lanes are above the threshold; NaN is.
inline uint32_t lanes_above(F32 x, float threshold) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(threshold), _CMP_NLE_UQ);
#elif defined(__AVX2__)
  __m256 half[2];
  std::memcpy(half, &x, sizeof(half));
  const __m256 limit = _mm256_set1_ps(threshold);
  return uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(half[0], limit, _CMP_NLE_UQ))) |
         uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(half[1], limit, _CMP_NLE_UQ))) << 8;
#else
  uint32_t mask = 0;
  for (int i = 0; i < kLanes; ++i) mask |= uint32_t(!(x[i] <= threshold)) << i;
  return mask;
#endif
}

// Memory that is not initialised.
template <typename T>
class Scratch {
 public:
  explicit Scratch(int64_t count) : data_(static_cast<T*>(::operator new(size_t(count) * sizeof(T)))) {}
  ~Scratch() { ::operator delete(data_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  operator T*() const { return data_; }

 private:
  T* data_;
};

// An element of a row: its key above its index. A list in the order of the indices stays in it through all of this.
using Entry = uint64_t;
inline Entry entry_of(uint32_t key, int64_t index) { return Entry(key) << 32 | uint32_t(index); }
inline uint32_t key_of(Entry entry) { return uint32_t(entry >> 32); }
inline uint32_t index_of(Entry entry) { return uint32_t(entry); }

constexpr int kDigitBits = 11;
constexpr int kDigitShifts[3] = {21, 10, 0};  // of the digits of a key, the last one of 10 bits
constexpr int kDigits = 1 << kDigitBits;

// Keeps the k greatest of `count` > k entries, in place and in order; of equal ones the first. Returns the least key
// that is kept: a radix selection, digit by digit from the top, that ends as soon as the kept ones fill whole bins.
inline uint32_t keep_greatest(Entry* entries, int64_t count, int64_t k) {
  uint32_t prefix = 0, known = 0;  // the bits of the k-th key that are known
  int64_t wanted = k;              // among the entries that have them
  for (int pass = 0; pass < 3; ++pass) {
    const int shift = kDigitShifts[pass];
    const uint32_t digits = pass == 2 ? 1 << 10 : kDigits;
    int64_t bins[kDigits] = {};
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t key = key_of(entries[i]);
      bins[(key >> shift) & (digits - 1)] += (key & known) == prefix;
    }
    int digit = int(digits) - 1;
    while (bins[digit] < wanted) wanted -= bins[digit--];
    prefix |= uint32_t(digit) << shift;
    known |= (digits - 1) << shift;
    if (bins[digit] == wanted) break;
  }
  const uint32_t last = prefix | ~known;  // keys above it are kept, `wanted` of those that share its prefix too
  int64_t kept = 0;
  uint32_t least = 0xffffffffu;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t key = key_of(entries[i]);
    const bool equal = (key & known) == prefix;
    const bool keep = key > last || (equal && wanted > 0);
    wanted -= equal && keep;
    entries[kept] = entries[i];
    kept += keep;
    least = keep && key < least ? key : least;
  }
  return least;
}

// The k greatest elements of [begin, end) of a row, in order of index. They are collected in a list that holds whatever
// exceeds the k-th greatest so far, and is cut to k when it is full: most elements cost one comparison. What equals the
// k-th greatest comes after k others, so it is never among the first of equals.
template <typename T>
class Selection {
 public:
  static constexpr int64_t kStep = 1024;

  // Entries that `list` has to hold for rows of `size` elements.
  static int64_t capacity(int64_t k, int64_t size) {
    const int64_t wanted = limit_of(k) + kStep;
    return wanted < size ? wanted : size;
  }

  explicit Selection(Entry* list, int64_t k) : list_(list), k_(k), limit_(limit_of(k)) {}

  int64_t run(const T* row, int64_t begin, int64_t end) {
    int64_t i = begin;
    for (const int64_t stop = end - begin < limit_ ? end : begin + limit_; i < stop; i += kLanes) {
      const int n = int(stop - i < kLanes ? stop - i : kLanes);
      const U32 keys = keys_of(load(row + i, n));
      for (int j = 0; j < n; ++j) list_[count_++] = entry_of(keys[j], i + j);
    }
    i = begin + count_;
    if (count_ > k_) cut();
    while (i < end && !saturated_) {
      const int64_t stop = end - i < kStep ? end : i + kStep;
      for (; i < stop; i += kLanes) {
        const int n = int(stop - i < kLanes ? stop - i : kLanes);
        uint32_t above = lanes_above(load(row + i, n), threshold_) & ((1u << n) - 1);
        for (; above; above &= above - 1) {
          const int64_t at = i + __builtin_ctz(above);
          list_[count_++] = entry_of(key_of(load1(row + at)), at);
        }
      }
      i = stop;
      if (count_ > limit_) cut();
    }
    if (count_ > k_) cut();
    return count_;
  }

 private:
  static int64_t limit_of(int64_t k) { return 2 * k + 1024; }

  void cut() {
    const uint32_t least = keep_greatest(list_, count_, k_);
    count_ = k_;
    threshold_ = value_of(least);
    saturated_ = least == 0xffffffffu;  // nothing exceeds NaN
  }

  Entry* list_;
  int64_t k_, limit_, count_ = 0;
  float threshold_ = 0;
  bool saturated_ = false;
};

// Sorts by descending key, equal keys in their order. `other` is as large as `entries`.
inline void sort_by_key(Entry* entries, Entry* other, int64_t count) {
  constexpr int64_t kFew = 32;
  if (count <= kFew) {
    for (int64_t i = 1; i < count; ++i) {
      const Entry entry = entries[i];
      int64_t j = i;
      for (; j > 0 && key_of(entries[j - 1]) < key_of(entry); --j) entries[j] = entries[j - 1];
      entries[j] = entry;
    }
    return;
  }
  Entry *from = entries, *to = other;
  for (int pass = 2; pass >= 0; --pass) {
    const int shift = kDigitShifts[pass];
    const uint32_t mask = pass == 2 ? (1 << 10) - 1 : kDigits - 1;
    int64_t bins[kDigits] = {};
    for (int64_t i = 0; i < count; ++i) ++bins[(key_of(from[i]) >> shift) & mask];
    if (bins[(key_of(from[0]) >> shift) & mask] == count) continue;
    int64_t start = 0;
    for (int digit = int(mask); digit >= 0; --digit) {
      const int64_t size = bins[digit];
      bins[digit] = start;
      start += size;
    }
    for (int64_t i = 0; i < count; ++i) to[bins[(key_of(from[i]) >> shift) & mask]++] = from[i];
    Entry* swap = from;
    from = to;
    to = swap;
  }
  if (from != entries) std::memcpy(entries, from, size_t(count) * sizeof(Entry));
}

}  // namespace
