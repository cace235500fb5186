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

struct Kept {
  int64_t count;
  uint32_t bound;  // the others' keys do not exceed it
};

// Keeps the k greatest of `count` > k entries, in place and in order; of equal ones the first. Up to `slack` more may
// stay. A radix selection, digit by digit from the top, that ends when whole bins will do.
inline Kept keep_greatest(Entry* entries, int64_t count, int64_t k, int64_t slack = 0) {
  uint32_t prefix = 0, known = 0;  // the bits of the k-th key that are known
  int64_t wanted = k;              // among the entries that have them
  bool whole = false;
  for (int pass = 0; pass < 3 && !whole; ++pass) {
    const int shift = kDigitShifts[pass];
    const uint32_t mask = pass == 2 ? (1 << 10) - 1 : kDigits - 1;
    uint32_t bins[kDigits] = {};
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t key = key_of(entries[i]);
      bins[(key >> shift) & mask] += (key & known) == prefix;
    }
    uint32_t digit = mask;
    while (bins[digit] < wanted) wanted -= bins[digit--];
    prefix |= digit << shift;
    known |= mask << shift;
    whole = bins[digit] <= wanted + slack;
  }
  // No key is 0.
  const uint32_t bound = whole ? prefix - 1 : prefix;
  int64_t kept = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t key = key_of(entries[i]);
    const bool equal = !whole && key == prefix && wanted > 0;
    wanted -= equal;
    entries[kept] = entries[i];
    kept += key > bound || equal;
  }
  return {kept, bound};
}

// The k greatest elements of [begin, end) of a row, in order of index. They are collected in a list that takes whatever
// exceeds the threshold, and is cut to about k when it is full, which raises the threshold: most elements cost one
// comparison. What equals the threshold comes after k others that are no less: it is not among the first of equals.
template <typename T>
class Selection {
 public:
  static constexpr int64_t kStep = 256;

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
    if (count_ > k_) cut(i < end ? k_ / 4 : 0);
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
      if (count_ > limit_) cut(k_ / 4);
    }
    if (count_ > k_) cut(0);
    return count_;
  }

 private:
  static int64_t limit_of(int64_t k) { return 2 * k + 256; }

  void cut(int64_t slack) {
    const Kept kept = keep_greatest(list_, count_, k_, slack);
    count_ = kept.count;
    constexpr uint32_t kInfinity = 0xff800000u;
    threshold_ = value_of(kept.bound < kInfinity ? kept.bound : kInfinity);
    saturated_ = kept.bound == 0xffffffffu;  // nothing exceeds NaN
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
