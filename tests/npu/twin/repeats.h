// Vector instructions in the form that takes repeats and strides. A repeat takes up to 256 bytes, in eight blocks of 32
// bytes; strides count blocks.
#pragma once

#include <string>
#include <vector>

#include "vector.h"

namespace AscendC {

struct BinaryRepeatParams {
  BinaryRepeatParams(uint8_t to_block, uint8_t left_block, uint8_t right_block, uint8_t to_repeat, uint8_t left_repeat,
                     uint8_t right_repeat)
      : dstBlkStride(to_block), src0BlkStride(left_block), src1BlkStride(right_block), dstRepStride(to_repeat),
        src0RepStride(left_repeat), src1RepStride(right_repeat) {}

  uint8_t dstBlkStride, src0BlkStride, src1BlkStride, dstRepStride, src0RepStride, src1RepStride;
};

struct BrcbRepeatParams {
  BrcbRepeatParams(uint16_t block, uint16_t repeat) : dstRepStride(repeat), dstBlkStride(block) {}

  uint16_t dstRepStride, dstBlkStride;
};

namespace detail {

constexpr int64_t kBlockBytes = 32, kBlocksOfRepeat = 8;

// The blocks that an instruction takes of one of its tensors, in the order in which it takes them.
struct Blocks {
  int64_t repeats, of_repeat;  // how many
  int64_t step, repeat_step;   // in blocks

  int64_t count() const { return repeats * of_repeat; }
  int64_t byte(int64_t i) const { return (i / of_repeat * repeat_step + i % of_repeat * step) * kBlockBytes; }
};

void check_repeats(int64_t repeats);
// `last`: bytes of the last block of a repeat that are taken.
void access_blocks(uint32_t tick, const Place& place, const Blocks& blocks, int64_t last, bool write);
// Repeats overlap: what one of them reads, no other one may write, and it only where it reads it.
void check_overlap(const Place& to, const Blocks& written, const Place& from, const Blocks& read);

template <typename T>
T* block_at(T* tensor, const Blocks& blocks, int64_t block) { return tensor + blocks.byte(block) / int64_t(sizeof(T)); }

template <typename T, typename F>
void repeated(const char* name, const LocalTensor<T>& to, const LocalTensor<T>& left, const LocalTensor<T>& right,
              uint64_t mask, uint8_t repeats, const BinaryRepeatParams& p, F f) {
  constexpr int64_t kLanes = kBlockBytes / int64_t(sizeof(T));
  const uint32_t tick = twin::core().issue(twin::kV, name);
  check_repeats(repeats);
  if (mask < 1 || mask > uint64_t(kBlocksOfRepeat * kLanes))
    twin::core().fail("the mask is " + std::to_string(mask) + ", from 1 to " + std::to_string(kBlocksOfRepeat * kLanes));
  const int64_t of_repeat = (int64_t(mask) + kLanes - 1) / kLanes, last = int64_t(mask) - (of_repeat - 1) * kLanes;
  const Blocks out{repeats, of_repeat, p.dstBlkStride, p.dstRepStride};
  const Blocks a{repeats, of_repeat, p.src0BlkStride, p.src0RepStride};
  const Blocks b{repeats, of_repeat, p.src1BlkStride, p.src1RepStride};
  check_overlap(to.place(), out, left.place(), a);
  check_overlap(to.place(), out, right.place(), b);
  access_blocks(tick, left.place(), a, last * int64_t(sizeof(T)), false);
  access_blocks(tick, right.place(), b, last * int64_t(sizeof(T)), false);
  access_blocks(tick, to.place(), out, last * int64_t(sizeof(T)), true);
  count_repeats(256 * int64_t(repeats));
  T *results = to.raw(), *lefts = left.raw(), *rights = right.raw();
  for (int64_t block = 0; block < out.count(); ++block) {
    const int64_t lanes = block % of_repeat + 1 < of_repeat ? kLanes : last;
    const T *x = block_at(lefts, a, block), *y = block_at(rights, b, block);
    T* result = block_at(results, out, block);
    for (int64_t i = 0; i < lanes; ++i) result[i] = compute<T>(f, x[i], y[i]);
  }
}

// Each block to one element: of a repeat, to eight neighbours.
template <typename T>
void reduce_blocks(const char* name, const LocalTensor<T>& to, const LocalTensor<T>& from, int32_t repeats, int32_t mask,
                   int32_t to_repeat, int32_t from_block, int32_t from_repeat, float (*f)(float, float)) {
  static_assert(is_floating<T>);
  constexpr int64_t kLanes = kBlockBytes / int64_t(sizeof(T));
  const uint32_t tick = twin::core().issue(twin::kV, name);
  check_repeats(repeats);
  if (mask != kBlocksOfRepeat * kLanes) twin::core().fail("parts of a repeat are not modelled");
  const Blocks in{repeats, kBlocksOfRepeat, from_block, from_repeat};
  const int64_t bytes = kBlocksOfRepeat * int64_t(sizeof(T));  // of the results of a repeat
  to.require(size_t(((repeats - 1) * to_repeat + 1) * bytes), size_t(bytes));
  access_blocks(tick, from.place(), in, kBlockBytes, false);
  std::vector<T> results;
  for (int64_t block = 0; block < in.count(); ++block)
    results.push_back(twin::from_float<T>(reduce<T>(block_at(from.raw(), in, block), kLanes, f)));
  count_repeats(256 * int64_t(repeats));
  for (int64_t repeat = 0; repeat < repeats; ++repeat) {
    const LocalTensor<T> target = to[uint32_t(repeat * to_repeat * kBlocksOfRepeat)];
    twin::core().access(twin::kV, tick, target.space(), target.offset(), size_t(bytes), true);
    std::copy_n(results.begin() + repeat * kBlocksOfRepeat, kBlocksOfRepeat, target.raw());
  }
}

}  // namespace detail

#define TWIN_REPEATED(name, allowed, expression)                                                                \
  template <typename T>                                                                                         \
  void name(const LocalTensor<T>& to, const LocalTensor<T>& left, const LocalTensor<T>& right, uint64_t mask,   \
            uint8_t repeats, const BinaryRepeatParams& params) {                                                \
    static_assert(allowed<T>, #name " does not take this element type");                                        \
    detail::repeated(#name, to, left, right, mask, repeats, params, [](auto x, auto y) { return expression; }); \
  }
TWIN_REPEATED(Add, detail::is_arithmetic, x + y)
TWIN_REPEATED(Mul, detail::is_arithmetic, x * y)
TWIN_REPEATED(Max, detail::is_arithmetic, x < y ? y : x)
TWIN_REPEATED(And, detail::is_word, x & y)
#undef TWIN_REPEATED

template <typename T>
void BlockReduceMax(const LocalTensor<T>& to, const LocalTensor<T>& from, int32_t repeats, int32_t mask,
                    int32_t to_repeat, int32_t from_block, int32_t from_repeat) {
  detail::reduce_blocks("BlockReduceMax", to, from, repeats, mask, to_repeat, from_block, from_repeat,
                        [](float x, float y) { return x < y ? y : x; });
}
template <typename T>
void BlockReduceSum(const LocalTensor<T>& to, const LocalTensor<T>& from, int32_t repeats, int32_t mask,
                    int32_t to_repeat, int32_t from_block, int32_t from_repeat) {
  detail::reduce_blocks("BlockReduceSum", to, from, repeats, mask, to_repeat, from_block, from_repeat,
                        [](float x, float y) { return x + y; });
}

// Each repeat to one element; `to_repeat` counts elements.
template <typename T>
void WholeReduceSum(const LocalTensor<T>& to, const LocalTensor<T>& from, int32_t mask, int32_t repeats,
                    int32_t to_repeat, int32_t from_block, int32_t from_repeat) {
  static_assert(detail::is_floating<T>);
  constexpr int32_t kLanes = int32_t(detail::kBlockBytes / sizeof(T));
  const uint32_t tick = twin::core().issue(twin::kV, "WholeReduceSum");
  detail::check_repeats(repeats);
  if (mask < 1 || mask > 8 * kLanes || mask % kLanes) twin::core().fail("parts of a block are not modelled");
  if (from_block != 1) twin::core().fail("not modelled");
  const detail::Blocks in{repeats, mask / kLanes, 1, from_repeat};
  to.require(size_t((repeats - 1) * to_repeat + 1) * sizeof(T), sizeof(T));
  detail::access_blocks(tick, from.place(), in, detail::kBlockBytes, false);
  detail::count_repeats(256 * int64_t(repeats));
  std::vector<T> sums;
  for (int64_t i = 0; i < repeats; ++i)
    sums.push_back(twin::from_float<T>(detail::reduce<T>(
        detail::block_at(from.raw(), in, i * in.of_repeat), mask, [](float x, float y) { return x + y; })));
  for (int64_t i = 0; i < repeats; ++i) {
    const size_t at = to.offset() + size_t(i * to_repeat) * sizeof(T);
    twin::core().access(twin::kV, tick, to.space(), at, sizeof(T), true);
    to.raw()[i * to_repeat] = sums[size_t(i)];
  }
}

// Eight elements a repeat, each to a block of its own.
template <typename T>
void Brcb(const LocalTensor<T>& to, const LocalTensor<T>& from, uint8_t repeats, const BrcbRepeatParams& p) {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4);
  constexpr int64_t kLanes = detail::kBlockBytes / int64_t(sizeof(T));
  const uint32_t tick = twin::core().issue(twin::kV, "Brcb");
  detail::check_repeats(repeats);
  const int64_t elements = repeats * detail::kBlocksOfRepeat;
  const detail::Blocks out{repeats, detail::kBlocksOfRepeat, p.dstBlkStride, p.dstRepStride};
  const int64_t blocks = (elements + kLanes - 1) / kLanes;
  detail::check_overlap(to.place(), out, from.place(), {1, blocks, 1, 0});
  detail::read(tick, from, elements);
  detail::access_blocks(tick, to.place(), out, detail::kBlockBytes, true);
  detail::count_repeats(256 * int64_t(repeats));
  for (int64_t i = 0; i < elements; ++i) std::fill_n(detail::block_at(to.raw(), out, i), kLanes, from.raw()[i]);
}

}  // namespace AscendC
