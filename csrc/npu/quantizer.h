// Floats on the core to codes, in groups that share a scale: what the quantisation kernels and the fused ones do alike.
//
// Largest magnitude of a group: fold, then one reduction. What is infinite or NaN shows in the sum of x * 0, whatever
// the maximum makes of it. Scales and factors of many groups are computed together; the factors go through the scalar
// unit, once for all groups. Bound by the number of vector instructions: about 20 a group.
//
// Include from kernel files only.
#pragma once

#include "codes.h"
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
    groups_ = groups;
    writer_.init(pipe, scales, bytes, layout);
    const uint32_t small = uint32_t(groups * kStep);
    pipe.InitBuffer(scale_queue_, 1, small * sizeof(float));
    pipe.InitBuffer(small_buffer_, 3 * small * sizeof(float));
    pipe.InitBuffer(total_buffer_, 2 * kLanes * sizeof(float));
    amax_ = small_buffer_.template Get<float>();
    bad_ = amax_[small];
    factors_ = amax_[2 * small];
    most_ = total_buffer_.template Get<float>();
    sum_ = most_[kLanes];
  }

  // Before the groups of a tile.
  __aicore__ inline void begin() {
    Duplicate(amax_, 0.0f, 3 * groups_ * kStep);
    PipeBarrier<PIPE_V>();
  }

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
    scales_of<code, type>(amax_, bad_, factors_, scales, count * kStep);
    hand_over<HardEvent::V_S>(*pipe_);
    scale_queue_.EnQue(scales);
    scales = scale_queue_.template DeQue<float>();
    writer_.write(scales, first, count);
    scale_queue_.FreeTensor(scales);
  }

  // A group without a scale: for the scalar unit, after make_scales.
  __aicore__ inline bool is_bad(int32_t group) const { return amax_.GetValue(uint32_t(group * kStep)) != 0.0f; }

  // Values to what encode() takes.
  __aicore__ inline void scale(const LocalTensor<float>& values, int32_t group, int32_t size) const {
    if (is_bad(group)) Duplicate(values, 0.0f, size);
    else Muls(values, values, factors_.GetValue(uint32_t(group * kStep)), size);
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
    const int32_t across = (size + group - 1) / group;
    const auto for_groups = [&](auto visit) {
      for (int32_t piece = 0; piece < count * across; ++piece) {
        const int32_t begin = piece % across * group, left = size - begin;
        visit(piece, uint32_t(piece / across * pitch + begin), left < group ? left : group);
      }
    };
    begin();
    for_groups([&](int32_t piece, uint32_t at, int32_t n) { measure(values[at], work[at], piece, n); });
    make_scales(row * across, count * across);
    for_groups([&](int32_t piece, uint32_t at, int32_t n) { scale(values[at], piece, n); });
    PipeBarrier<PIPE_V>();
    encode<code>(codes, values, work, more, count * pitch);
    for_groups([&](int32_t piece, uint32_t at, int32_t n) {
      spoil(codes[uint32_t(code_bytes<code>(int32_t(at)))], piece, code_bytes<code>(n));
    });
    end();
  }

  // The scales and factors have been read by the scalar unit.
  __aicore__ inline void end() { hand_over<HardEvent::S_V>(*pipe_); }

 private:
  TPipe* pipe_ = nullptr;
  int32_t groups_ = 0;
  ScaleWriter<type> writer_;
  TQue<TPosition::VECOUT, 1> scale_queue_;
  TBuf<TPosition::VECCALC> small_buffer_, total_buffer_;
  LocalTensor<float> amax_, bad_, factors_, most_, sum_;
};

}  // namespace deepinfer::npu
