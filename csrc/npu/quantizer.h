// Floats on the core to codes, in groups that share a scale: what the quantisation kernels and the fused ones do alike.
//
// Many groups of a power of two of floats, side by side, share their instructions (groups.h): their magnitudes fold as
// integers, of which NaN is the largest, to a block each, and one more instruction makes one value of each block. Others
// are measured one by one: fold, then one reduction, and the factors go through the scalar unit. What is infinite or NaN
// shows in the sum of x * 0, whatever a maximum of floats makes of it. Scales and factors of all groups are computed
// together. Bound by the vector pipe: some 13 bytes an element shared, some 20 instructions a group alone.
//
// Include from kernel files only.
#pragma once

#include "codes.h"
#include "groups.h"
#include "scales.h"

namespace deepinfer::npu {

// Largest magnitudes to scales and factors, n of each. `bad` is 0, or NaN where there is no scale, and so is `amax` after it.
template <Code code, ScaleType type>
__aicore__ inline void scales_of(const LocalTensor<float>& amax, const LocalTensor<float>& bad,
                                 const LocalTensor<float>& factors, const LocalTensor<float>& scales, int32_t n) {
  const LocalTensor<int32_t> bits = scales.template ReinterpretCast<int32_t>();
  Maxs(amax, amax, Format<code>::kFloor, n);
  Duplicate(factors, Format<code>::kMost, n);
  PipeBarrier<PIPE_V>();
  Div(scales, amax, factors, n);
  Div(factors, factors, amax, n);
  PipeBarrier<PIPE_V>();
  if constexpr (is_power(type)) {
    // The next power of two, by the bits: any mantissa carries into the exponent. Its inverse has exponent 254 - e.
    const LocalTensor<int32_t> inverse = factors.template ReinterpretCast<int32_t>();
    Adds(bits, bits, 0x7fffff, n);
    PipeBarrier<PIPE_V>();
    ShiftRight(bits, bits, 23, n);
    PipeBarrier<PIPE_V>();
    Muls(inverse, bits, -1, n);
    PipeBarrier<PIPE_V>();
    Adds(inverse, inverse, 254, n);
    PipeBarrier<PIPE_V>();
    ShiftLeft(inverse, inverse, 23, n);
    ShiftLeft(bits, bits, 23, n);
    PipeBarrier<PIPE_V>();
  }
  Add(scales, scales, bad, n);
  PipeBarrier<PIPE_V>();
  Muls(amax, scales, 0.0f, n);
  PipeBarrier<PIPE_V>();
  if constexpr (is_exponent(type)) {  // without a sign, which NaN may have
    const LocalTensor<uint32_t> words = scales.template ReinterpretCast<uint32_t>();
    ShiftLeft(words, words, 1u, n);
    PipeBarrier<PIPE_V>();
    ShiftRight(words, words, 24u, n);
    PipeBarrier<PIPE_V>();
  }
}

template <Code code, ScaleType type>
class Quantizer {
  static constexpr int32_t kLanes = 64;
  static constexpr int32_t kStep = kScaleStep;

 public:
  // Takes quantizer_bytes(groups) of the unified buffer, and kRounding of it.
  __aicore__ inline void init(TPipe& pipe, GM_ADDR scales, int64_t bytes, const Scales& layout, int32_t groups) {
    pipe_ = &pipe;
    writer_.init(pipe, scales, bytes, layout);
    small_ = up_to_repeats(groups) * kStep;
    pipe.InitBuffer(scale_queue_, 1, uint32_t(small_) * sizeof(float));
    pipe.InitBuffer(small_buffer_, 3 * uint32_t(small_) * sizeof(float));
    pipe.InitBuffer(total_buffer_, 3 * kLanes * sizeof(float));
    most_ = total_buffer_.template Get<float>();
    sum_ = most_[kLanes];
    magnitude_ = most_[2 * kLanes].template ReinterpretCast<int32_t>();
    Duplicate(magnitude_, int32_t(0x7fffffff), kLanes);
    PipeBarrier<PIPE_V>();
  }

  // Before the groups of a tile, which are measured one by one unless measure_all() finds that they need not be.
  __aicore__ inline void begin() {
    together_ = false;
    place(small_, kStep);
    Duplicate(amax_, 0.0f, 3 * small_);
    PipeBarrier<PIPE_V>();
  }

  // ---- groups of `size` values each, side by side ----

  // `work` is as large as the values.
  __aicore__ inline void measure_all(const LocalTensor<float>& values, const LocalTensor<float>& work, int32_t groups,
                                     int32_t size) {
    if (!folds_together(groups, size)) {
      begin();
      for (int32_t i = 0; i < groups; ++i) measure(values[uint32_t(i * size)], work[uint32_t(i * size)], i, size);
      return;
    }
    together_ = true;
    const int32_t n = up_to_repeats(groups), repeats = n / kLanesOfBlock;
    place(n, 1);
    const LocalTensor<float> folded =
        fold_magnitudes(values, work, magnitude_.template ReinterpretCast<uint16_t>(), groups, size);
    // After the last group, up to whole repeats, something else is reduced that nobody uses.
    BlockReduceMax(amax_, folded, repeats, kLanes, 1, 1, kLanesOfBlock);
    PipeBarrier<PIPE_V>();
    Muls(folded, folded, 0.0f, n * kLanesOfBlock);
    PipeBarrier<PIPE_V>();
    BlockReduceSum(bad_, folded, repeats, kLanes, 1, 1, kLanesOfBlock);
    PipeBarrier<PIPE_V>();
  }

  // Values to what encode() takes.
  __aicore__ inline void scale_all(const LocalTensor<float>& values, int32_t groups, int32_t size) const {
    if (together_ && !any_bad_) {
      scale_groups(values, spread_, groups, size);
    } else {
      for (int32_t i = 0; i < groups; ++i) scale(values[uint32_t(i * size)], i, size);
    }
  }

  // After encode(): the codes, `bytes` a group, of groups without a scale.
  __aicore__ inline void spoil_all(const LocalTensor<uint8_t>& codes, int32_t groups, int32_t bytes) const {
    if (together_ && !any_bad_) return;
    for (int32_t i = 0; i < groups; ++i) spoil(codes[uint32_t(i * bytes)], i, bytes);
  }

  // ---- one by one ----

  // A group as a whole. `work` is as large as the values.
  __aicore__ inline void measure(const LocalTensor<float>& values, const LocalTensor<float>& work, int32_t group,
                                 int32_t size) {
    begin_group();
    add(values, work, size);
    end_group(work, group);
  }

  __aicore__ inline void begin_group() {
    Duplicate(most_, 0.0f, kLanes);
    Duplicate(sum_, 0.0f, kLanes);
    PipeBarrier<PIPE_V>();
  }
  __aicore__ inline void add(const LocalTensor<float>& values, const LocalTensor<float>& work, int32_t size) {
    Abs(work, values, size);
    PipeBarrier<PIPE_V>();
    Max(most_, most_, work, fold<true>(work, size));
    PipeBarrier<PIPE_V>();
    Muls(work, values, 0.0f, size);
    PipeBarrier<PIPE_V>();
    Add(sum_, sum_, work, fold<false>(work, size));
    PipeBarrier<PIPE_V>();
  }
  __aicore__ inline void end_group(const LocalTensor<float>& work, int32_t group) {
    ReduceMax(amax_[uint32_t(group * kStep)], most_, work, kLanes);
    ReduceSum(bad_[uint32_t(group * kStep)], sum_, work[kStep], kLanes);
    PipeBarrier<PIPE_V>();
  }

  // Computes and writes the scales of blocks [first, first + count).
  __aicore__ inline void make_scales(int64_t first, int32_t count) {
    LocalTensor<float> scales = scale_queue_.template AllocTensor<float>();
    if (together_) {
      const int32_t n = up_to_repeats(count);
      scales_of<code, type>(amax_, bad_, factors_, close_, n);
      spread(scales, close_, n);
      spread(spread_, factors_, n);
      ReduceSum(any_, amax_, any_[kStep], count);
    } else {
      scales_of<code, type>(amax_, bad_, factors_, scales, count * kStep);
    }
    hand_over<HardEvent::V_S>(*pipe_);
    if (together_) any_bad_ = any_.GetValue(0) != 0.0f;
    scale_queue_.EnQue(scales);
    scales = scale_queue_.template DeQue<float>();
    writer_.write(scales, first, count);
    scale_queue_.FreeTensor(scales);
  }

  // A group without a scale: for the scalar unit, after make_scales.
  __aicore__ inline bool is_bad(int32_t group) const { return amax_.GetValue(uint32_t(group * step_)) != 0.0f; }

  // Values to what encode() takes.
  __aicore__ inline void scale(const LocalTensor<float>& values, int32_t group, int32_t size) const {
    if (is_bad(group)) Duplicate(values, 0.0f, size);
    else Muls(values, values, factors_.GetValue(uint32_t(group * step_)), size);
  }

  // After encode(): the codes, `bytes` of them, of a group without a scale.
  __aicore__ inline void spoil(const LocalTensor<uint8_t>& codes, int32_t group, int32_t bytes) const {
    if constexpr (Format<code>::kNaNs != 0)
      if (is_bad(group)) Duplicate(codes.template ReinterpretCast<int16_t>(), Format<code>::kNaNs, bytes / 2);
  }

  // Rows [row, row + count) of `size` values, `pitch` apart, whose groups are whole blocks of codes: everything but to copy
  // the codes out. `work`, and `more` as encode() has it, are as large.
  __aicore__ inline void quantize_rows(const LocalTensor<uint8_t>& codes, const LocalTensor<float>& values,
                                       const LocalTensor<float>& work, const LocalTensor<float>& more, int64_t row,
                                       int32_t count, int32_t size, int32_t pitch, int32_t group) {
    const int32_t across = (size + group - 1) / group, groups = count * across;
    const bool side_by_side = size == pitch && size % group == 0;
    const auto for_groups = [&](auto visit) {
      for (int32_t piece = 0; piece < groups; ++piece) {
        const int32_t begin = piece % across * group, left = size - begin;
        visit(piece, uint32_t(piece / across * pitch + begin), left < group ? left : group);
      }
    };
    if (side_by_side) {
      measure_all(values, work, groups, group);
    } else {
      begin();
      for_groups([&](int32_t piece, uint32_t at, int32_t n) { measure(values[at], work[at], piece, n); });
    }
    make_scales(row * across, groups);
    if (side_by_side) scale_all(values, groups, group);
    else for_groups([&](int32_t piece, uint32_t at, int32_t n) { scale(values[at], piece, n); });
    PipeBarrier<PIPE_V>();
    encode<code>(codes, values, work, more, count * pitch);
    if (side_by_side) {
      spoil_all(codes, groups, code_bytes<code>(group));
    } else {
      for_groups([&](int32_t piece, uint32_t at, int32_t n) {
        spoil(codes[uint32_t(code_bytes<code>(int32_t(at)))], piece, code_bytes<code>(n));
      });
    }
    end();
  }

  // The scales and factors have been read by the scalar unit.
  __aicore__ inline void end() { hand_over<HardEvent::S_V>(*pipe_); }

 private:
  // Where `n` values of each kind lie, `step` from group to group; the last three are for groups that share instructions.
  __aicore__ inline void place(int32_t n, int32_t step) {
    step_ = step;
    amax_ = small_buffer_.template Get<float>();
    bad_ = amax_[uint32_t(n)];
    factors_ = amax_[uint32_t(2 * n)];
    if (!together_) return;
    close_ = amax_[uint32_t(3 * n)];
    spread_ = amax_[uint32_t(small_)];
    any_ = amax_[uint32_t(2 * small_)];
  }

  TPipe* pipe_ = nullptr;
  int32_t small_ = 0, step_ = 0;
  bool together_ = false, any_bad_ = false;
  ScaleWriter<type> writer_;
  TQue<TPosition::VECOUT, 1> scale_queue_;
  TBuf<TPosition::VECCALC> small_buffer_, total_buffer_;
  LocalTensor<float> amax_, bad_, factors_, most_, sum_, close_, spread_, any_;
  LocalTensor<int32_t> magnitude_;
};

}  // namespace deepinfer::npu
