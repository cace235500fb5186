// Vector instructions that compare, select and sort.
#pragma once

#include <cmath>
#include <string>
#include <vector>

#include "vector.h"

namespace AscendC {

// One bit an element; whole repeats of 256 bytes.
template <typename T>
void Compares(const LocalTensor<uint8_t>& to, const LocalTensor<T>& from, T scalar, CMPMODE mode, uint32_t count) {
  static_assert(detail::is_floating<T> || std::is_same_v<T, int32_t>);
  const uint32_t tick = twin::core().issue(twin::kV, "Compares");
  detail::check_count(count);
  if (count * sizeof(T) % 256) twin::core().fail("the elements are not whole repeats of 256 bytes");
  if (std::is_same_v<T, int32_t> && mode != CMPMODE::EQ) twin::core().fail("integers are compared for equality only");
  detail::read(tick, from, count);
  detail::write(tick, to, count / 8);
  detail::count_repeats(int64_t(count) * int64_t(sizeof(T)));
  const auto holds = [=](auto x, auto y) {
    switch (mode) {
      case CMPMODE::LT: return x < y;
      case CMPMODE::GT: return x > y;
      case CMPMODE::EQ: return x == y;
      case CMPMODE::LE: return x <= y;
      case CMPMODE::GE: return x >= y;
      default: return x != y;
    }
  };
  std::fill_n(to.raw(), count / 8, uint8_t(0));
  for (uint32_t i = 0; i < count; ++i)
    if (holds(twin::to_float(from.raw()[i]), twin::to_float(scalar))) to.raw()[i / 8] |= uint8_t(1 << i % 8);
}

inline void Not(const LocalTensor<uint16_t>& to, const LocalTensor<uint16_t>& from, int32_t count) {
  detail::elementwise("Not", to, count, [](uint16_t a) { return uint16_t(~a); }, from);
}
inline void And(const LocalTensor<uint16_t>& to, const LocalTensor<uint16_t>& a, const LocalTensor<uint16_t>& b,
                int32_t count) {
  detail::elementwise("And", to, count, [](uint16_t x, uint16_t y) { return uint16_t(x & y); }, a, b);
}
inline void Or(const LocalTensor<uint16_t>& to, const LocalTensor<uint16_t>& a, const LocalTensor<uint16_t>& b,
               int32_t count) {
  detail::elementwise("Or", to, count, [](uint16_t x, uint16_t y) { return uint16_t(x | y); }, a, b);
}

struct GatherMaskParams {
  uint8_t src0BlockStride = 1;
  uint16_t repeatTimes = 0, src0RepeatStride = 0;
  uint8_t src1RepeatStride = 0;
};

namespace detail {

// Those of `count` elements that `selects` names; what follows them in the tensor is undefined.
template <typename T, typename F>
void gather_selected(uint32_t tick, const LocalTensor<T>& to, const LocalTensor<T>& from, uint32_t count, bool counted,
                     const GatherMaskParams& params, uint64_t& kept, F selects) {
  twin::Core& core = twin::core();
  check_count(count);
  if (!counted || params.repeatTimes != 1 || params.src0BlockStride != 1) core.fail("not modelled");
  const size_t touched = std::min<size_t>(count, to.GetSize());
  check_overlap(to, touched * sizeof(T), from, count * sizeof(T));
  read(tick, from, count);
  write(tick, to, int64_t(touched));
  count_repeats(int64_t(count) * int64_t(sizeof(T)));
  std::vector<T> values;
  for (uint32_t i = 0; i < count; ++i)
    if (selects(i)) values.push_back(from.raw()[i]);
  kept = values.size();
  to.require(kept * sizeof(T), 32);
  core.mark_undefined(to.space(), to.offset() + kept * sizeof(T), (touched - kept) * sizeof(T));
  std::copy(values.begin(), values.end(), to.raw());
}

}  // namespace detail

template <typename T, typename U>
void GatherMask(const LocalTensor<T>& to, const LocalTensor<T>& from, const LocalTensor<U>& pattern, bool counted,
                uint32_t count, const GatherMaskParams& params, uint64_t& kept) {
  static_assert(sizeof(U) == sizeof(T) && std::is_unsigned_v<U> && (sizeof(T) == 2 || sizeof(T) == 4));
  const uint32_t tick = twin::core().issue(twin::kV, "GatherMask");
  constexpr uint32_t kBits = 8 * sizeof(U);
  detail::read(tick, pattern, (count + kBits - 1) / kBits);
  detail::gather_selected(tick, to, from, count, counted, params, kept,
                          [&](uint32_t i) { return pattern.raw()[i / kBits] >> i % kBits & 1; });
}
template <typename T>
void GatherMask(const LocalTensor<T>& to, const LocalTensor<T>& from, uint8_t pattern, bool counted, uint32_t count,
                const GatherMaskParams& params, uint64_t& kept) {
  const uint32_t tick = twin::core().issue(twin::kV, "GatherMask");
  if (pattern != 1 && pattern != 2) twin::core().fail("this pattern is not modelled");
  detail::gather_selected(tick, to, from, count, counted, params, kept,
                          [=](uint32_t i) { return i % 2 == uint32_t(pattern - 1); });
}

namespace detail {

struct Pair {
  float score;
  uint32_t index;
};

// How NaN and -0 are ordered is not documented.
inline void check_score(float score) {
  if (std::isnan(score) || (score == 0 && std::signbit(score)))
    twin::core().fail("a score of NaN or -0, whose order is not documented");
}

}  // namespace detail

// Groups of 32, descending; of equal ones the first comes first.
template <typename T>
void Sort32(const LocalTensor<T>& to, const LocalTensor<T>& scores, const LocalTensor<uint32_t>& indices,
            int32_t repeats) {
  static_assert(std::is_same_v<T, float>, "not modelled");
  twin::Core& core = twin::core();
  const uint32_t tick = core.issue(twin::kV, "Sort32");
  if (repeats < 1 || repeats > 255) core.fail("repeatTime is " + std::to_string(repeats) + ", from 1 to 255");
  const int64_t count = 32 * int64_t(repeats);
  scores.require(0, 128);
  indices.require(0, 128);
  to.require(0, 256);
  detail::read(tick, scores, count);
  detail::read(tick, indices, count);
  detail::check_overlap(to, size_t(8 * count), scores, size_t(4 * count));
  detail::check_overlap(to, size_t(8 * count), indices, size_t(4 * count));
  detail::write(tick, to, 2 * count);
  detail::count_repeats(8 * 8 * count);  // a guess: eight passes
  for (int64_t begin = 0; begin < count; begin += 32) {
    std::vector<detail::Pair> pairs;
    for (int64_t i = begin; i < begin + 32; ++i) {
      detail::check_score(scores.raw()[i]);
      pairs.push_back({scores.raw()[i], indices.raw()[i]});
    }
    std::stable_sort(pairs.begin(), pairs.end(), [](auto& a, auto& b) { return a.score > b.score; });
    std::memcpy(to.raw() + 2 * begin, pairs.data(), 32 * sizeof(detail::Pair));
  }
}

template <typename T>
struct MrgSortSrcList {
  LocalTensor<T> src1, src2, src3, src4;
};

struct MrgSort4Info {
  uint16_t elementLengths[4] = {};
  bool ifExhaustedSuspension = false;
  uint16_t validBit = 0;
  uint8_t repeatTimes = 1;
};

// Two to four descending queues become one; of equal ones that of the first queue comes first.
template <typename T>
void MrgSort(const LocalTensor<T>& to, const MrgSortSrcList<T>& sources, const MrgSort4Info& params) {
  static_assert(std::is_same_v<T, float>, "not modelled");
  twin::Core& core = twin::core();
  const uint32_t tick = core.issue(twin::kV, "MrgSort");
  if (params.ifExhaustedSuspension || params.repeatTimes != 1) core.fail("not modelled");
  const int queues = params.validBit == 3 ? 2 : params.validBit == 7 ? 3 : params.validBit == 15 ? 4 : 0;
  if (queues == 0) core.fail("validBit must be 3, 7 or 15");
  const LocalTensor<T>* all[] = {&sources.src1, &sources.src2, &sources.src3, &sources.src4};
  std::vector<detail::Pair> merged;
  for (int q = 0; q < queues; ++q) {
    const int64_t length = params.elementLengths[q];
    if (length < 1 || length > 4095) core.fail("a queue of " + std::to_string(length) + ", from 1 to 4095");
    all[q]->require(size_t(8 * length), 8);
    core.access(twin::kV, tick, all[q]->space(), all[q]->offset(), size_t(8 * length), false);
    detail::check_overlap(to, to.bytes(), *all[q], size_t(8 * length));
    const auto* pairs = reinterpret_cast<const detail::Pair*>(all[q]->raw());
    for (int64_t i = 0; i < length; ++i) {
      detail::check_score(pairs[i].score);
      if (i > 0 && pairs[i - 1].score < pairs[i].score) core.fail("a queue that is not sorted");
      merged.push_back(pairs[i]);
    }
  }
  std::stable_sort(merged.begin(), merged.end(), [](auto& a, auto& b) { return a.score > b.score; });
  detail::write(tick, to, int64_t(2 * merged.size()));
  detail::count_repeats(256 * int64_t(merged.size()));  // a guess: a pair a cycle
  std::memcpy(to.raw(), merged.data(), merged.size() * sizeof(detail::Pair));
}

}  // namespace AscendC
