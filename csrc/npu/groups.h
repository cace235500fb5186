// Instructions over many groups of floats that lie side by side on the core: each takes up to 255 repeats, and strides say
// which blocks of 32 bytes a repeat takes. Include from kernel files only.
//
// The names are those that all toolkits know; the newest call BlockReduceMax and BlockReduceSum ReduceDataBlock too.
#pragma once

#include "rows.h"

namespace deepinfer::npu {

constexpr int32_t kLanesOfBlock = 8, kLanesOfRepeat = 64;  // floats

// Powers of two, that folding in pairs of blocks ends at one block; eight groups, that there is room for their ends in
// half of what they take; strides of at most 255 blocks.
__aicore__ inline bool folds_together(int32_t groups, int32_t size) {
  return groups >= 8 && size >= 32 && size <= 1024 && (size & (size - 1)) == 0;
}

// Calls instruction(first, repeats, lanes) for `count` lanes in whole repeats, and for what is left of them.
template <typename Instruction>
__aicore__ inline void for_repeats(int32_t count, Instruction instruction) {
  constexpr int32_t kMost = 255;
  const int32_t whole = count / kLanesOfRepeat;
  for (int32_t first = 0; first < whole; first += kMost)
    instruction(first, whole - first < kMost ? whole - first : kMost, kLanesOfRepeat);
  if (count % kLanesOfRepeat) instruction(whole, 1, count % kLanesOfRepeat);
}

// Absolute values to the bit, also of NaN, which are then the largest integers. `mask` is a repeat of 0x7fffffff.
__aicore__ inline void clear_signs(const LocalTensor<uint16_t>& to, const LocalTensor<uint16_t>& from,
                                   const LocalTensor<uint16_t>& mask, int32_t count) {
  const BinaryRepeatParams strides(1, 1, 1, 8, 8, 0);
  for_repeats(count, [&](int32_t first, int32_t repeats, int32_t lanes) {
    const uint32_t at = uint32_t(2 * first * kLanesOfRepeat);
    And(to[at], from[at], mask, uint64_t(2 * lanes), uint8_t(repeats), strides);
  });
}

// Pairs of neighbouring blocks to the larger values of both, of which there are `count`.
__aicore__ inline void fold_pairs(const LocalTensor<int32_t>& to, const LocalTensor<int32_t>& from, int32_t count) {
  const BinaryRepeatParams strides(1, 2, 2, 8, 16, 16);
  for_repeats(count, [&](int32_t first, int32_t repeats, int32_t lanes) {
    const uint32_t at = uint32_t(first * kLanesOfRepeat);
    Max(to[at], from[2 * at], from[2 * at + kLanesOfBlock], uint64_t(lanes), uint8_t(repeats), strides);
  });
  PipeBarrier<PIPE_V>();
}

// The magnitudes of each group folded to a block, as floats, one block after the other: in `work` somewhere, which is as
// large as the values.
__aicore__ inline LocalTensor<float> fold_magnitudes(const LocalTensor<float>& values, const LocalTensor<float>& work,
                                                     const LocalTensor<uint16_t>& mask, int32_t groups, int32_t size) {
  LocalTensor<int32_t> folded = work.template ReinterpretCast<int32_t>(), other = folded[uint32_t(groups * size / 2)];
  const int32_t step = groups / 2;
  for (int32_t first = 0; first < groups; first += step) {
    const int32_t n = (groups - first < step ? groups - first : step) * size;
    clear_signs(other.template ReinterpretCast<uint16_t>(),
                values[uint32_t(first * size)].template ReinterpretCast<uint16_t>(), mask, n);
    PipeBarrier<PIPE_V>();
    fold_pairs(folded[uint32_t(first * size / 2)], other, n / 2);
  }
  for (int32_t lanes = size / 4; lanes >= kLanesOfBlock; lanes /= 2) {
    fold_pairs(other, folded, groups * lanes);
    const LocalTensor<int32_t> last = folded;
    folded = other;
    other = last;
  }
  return folded.template ReinterpretCast<float>();
}

// Each value to a block of its own.
__aicore__ inline void spread(const LocalTensor<float>& to, const LocalTensor<float>& from, int32_t count) {
  const BrcbRepeatParams strides(1, 8);
  for_repeats(count * kLanesOfBlock, [&](int32_t first, int32_t repeats, int32_t) {
    Brcb(to[uint32_t(first * kLanesOfRepeat)], from[uint32_t(first * kLanesOfBlock)], uint8_t(repeats), strides);
  });
}

// Each group times its factor, of which there is a block.
__aicore__ inline void scale_groups(const LocalTensor<float>& values, const LocalTensor<float>& factors, int32_t groups,
                                    int32_t size) {
  const uint8_t step = uint8_t(size / kLanesOfBlock);
  const BinaryRepeatParams strides(1, 1, 0, step, step, 1);
  const int32_t lanes = size < kLanesOfRepeat ? size : kLanesOfRepeat;
  for (int32_t begin = 0; begin < size; begin += lanes)
    for_repeats(groups * kLanesOfRepeat, [&](int32_t first, int32_t repeats, int32_t) {
      const LocalTensor<float> part = values[uint32_t(first * size + begin)];
      Mul(part, part, factors[uint32_t(first * kLanesOfBlock)], uint64_t(lanes), uint8_t(repeats), strides);
    });
}

}  // namespace deepinfer::npu
