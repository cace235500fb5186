// Instructions over many groups of floats that lie side by side on the core: each takes up to 255 repeats, and strides say
// which blocks of 32 bytes a repeat takes. Include from kernel files only.
//
// The names are those that all toolkits know; the newest call BlockReduceMax and BlockReduceSum ReduceDataBlock too.
#pragma once

#include "rows.h"

namespace deepinfer::npu {

constexpr int32_t kLanesOfBlock = 8, kLanesOfRepeat = 64;  // floats
constexpr int32_t kMostRepeats = 255;  // of an instruction, and blocks from repeat to repeat

// Powers of two, that folding in pairs of blocks ends at one block; eight groups, that there is room for their ends in
// half of what they take; strides of at most 255 blocks.
__aicore__ inline bool folds_together(int32_t groups, int32_t size) {
  return groups >= 8 && size >= 32 && size <= 1024 && (size & (size - 1)) == 0;
}

// Calls instruction(first, repeats, lanes) for `count` lanes in whole repeats, and for what is left of them.
template <typename Instruction>
__aicore__ inline void for_repeats(int32_t count, Instruction instruction) {
  const int32_t whole = count / kLanesOfRepeat;
  for (int32_t first = 0; first < whole; first += kMostRepeats)
    instruction(first, whole - first < kMostRepeats ? whole - first : kMostRepeats, kLanesOfRepeat);
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

// So many values, up to whole repeats of spread().
__aicore__ inline int32_t up_to_repeats(int32_t values) {
  return (values + kLanesOfBlock - 1) / kLanesOfBlock * kLanesOfBlock;
}

// Each value to a block of its own, to the bit.
__aicore__ inline void spread(const LocalTensor<float>& to, const LocalTensor<float>& from, int32_t count) {
  const LocalTensor<uint32_t> blocks = to.template ReinterpretCast<uint32_t>(),
                              words = from.template ReinterpretCast<uint32_t>();
  const BrcbRepeatParams strides(1, 8);
  for_repeats(count * kLanesOfBlock, [&](int32_t first, int32_t repeats, int32_t) {
    Brcb(blocks[uint32_t(first * kLanesOfRepeat)], words[uint32_t(first * kLanesOfBlock)], uint8_t(repeats), strides);
  });
}

// Calls instruction(row, rows, column, lanes) for rows of `size` floats, up to 64 columns and 255 rows at once: each row is
// a repeat.
template <typename Instruction>
__aicore__ inline void for_columns(int32_t rows, int32_t size, Instruction instruction) {
  for (int32_t column = 0; column < size; column += kLanesOfRepeat) {
    const int32_t lanes = size - column < kLanesOfRepeat ? size - column : kLanesOfRepeat;
    for (int32_t row = 0; row < rows; row += kMostRepeats)
      instruction(row, rows - row < kMostRepeats ? rows - row : kMostRepeats, column, lanes);
  }
}

// Each group times its factor, of which there is a block.
__aicore__ inline void scale_groups(const LocalTensor<float>& values, const LocalTensor<float>& factors, int32_t groups,
                                    int32_t size) {
  const uint8_t step = uint8_t(size / kLanesOfBlock);
  const BinaryRepeatParams strides(1, 1, 0, step, step, 1);
  for_columns(groups, size, [&](int32_t first, int32_t n, int32_t column, int32_t lanes) {
    const LocalTensor<float> part = values[uint32_t(first * size + column)];
    Mul(part, part, factors[uint32_t(first * kLanesOfBlock)], uint64_t(lanes), uint8_t(n), strides);
  });
}

// Rows of `size` floats, `pitch` apart, times those of one row; to rows that lie `to_pitch` apart.
__aicore__ inline void times_row(const LocalTensor<float>& to, int32_t to_pitch, const LocalTensor<float>& from,
                                 int32_t pitch, const LocalTensor<float>& row, int32_t count, int32_t size) {
  const BinaryRepeatParams strides(1, 1, 1, uint8_t(to_pitch / kLanesOfBlock), uint8_t(pitch / kLanesOfBlock), 0);
  for_columns(count, size, [&](int32_t first, int32_t n, int32_t column, int32_t lanes) {
    Mul(to[uint32_t(first * to_pitch + column)], from[uint32_t(first * pitch + column)], row[uint32_t(column)],
        uint64_t(lanes), uint8_t(n), strides);
  });
}

}  // namespace deepinfer::npu
