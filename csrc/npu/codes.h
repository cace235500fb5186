// Codes of int8, float8 e4m3 and float4 e2m1 from floats on the core, and back. The latter two are arithmetic with documented
// rounding but for the casts of e4m3, whose edges they keep away from: NaN and what is too large. Include from kernel
// files only.
#pragma once

#include "../ops/quant.h"
#include "rows.h"

namespace deepinfer::npu {

#if __NPU_ARCH__ >= 3510
using E4m3 = fp8_e4m3fn_t;
#else
struct E4m3;  // of which there is none, nor a kernel for it
#endif

template <Code code>
struct Format;
template <>
struct Format<Code::e4m3> {
  static constexpr float kMost = 448.0f, kFloor = 1e-4f;
  static constexpr int16_t kNaNs = 0x7f7f;  // two codes
};
template <>
struct Format<Code::int8> {
  static constexpr float kMost = 127.0f, kFloor = 1e-10f;
  static constexpr int16_t kNaNs = 0;
};
template <>
struct Format<Code::e2m1> {
  static constexpr float kMost = 6.0f, kFloor = 6 * 1.17549435e-38f;
  static constexpr int16_t kNaNs = 0;
};

// Bytes of so many codes.
template <Code code>
__aicore__ inline int32_t code_bytes(int32_t elements) {
  return code == Code::e2m1 ? elements / 2 : elements;
}
template <Code code>
__aicore__ inline int64_t code_bytes(int64_t elements) {
  return code == Code::e2m1 ? elements / 2 : elements;
}

// Codes of `elements` floats within the range of the code, none of them NaN. Values and `work`, as large, are overwritten;
// so is `more` for e2m1.
template <Code code>
__aicore__ inline void encode(const LocalTensor<uint8_t>& codes, const LocalTensor<float>& values,
                              const LocalTensor<float>& work, const LocalTensor<float>& more, int32_t elements) {
  const uint32_t n = uint32_t(elements);
  const LocalTensor<half> halves = values.template ReinterpretCast<half>();
  if constexpr (code == Code::e4m3) {
    Cast(codes.template ReinterpretCast<E4m3>(), values, RoundMode::CAST_RINT, n);
  } else if constexpr (code == Code::int8) {  // all steps are exact after the first one
    const LocalTensor<int16_t> whole = work.template ReinterpretCast<int16_t>();
    Cast(whole, values, RoundMode::CAST_RINT, n);
    PipeBarrier<PIPE_V>();
    Cast(halves, whole, RoundMode::CAST_RINT, n);
    PipeBarrier<PIPE_V>();
    Cast(codes.template ReinterpretCast<int8_t>(), halves, RoundMode::CAST_RINT, n);
  } else {
    // The codes are even steps of 1/2 to 2, of 1 to 4 and of 2 to 6: each stretch rounds by itself.
    const LocalTensor<int32_t> sign = values.template ReinterpretCast<int32_t>();
    Abs(work, values, elements);
    PipeBarrier<PIPE_V>();
    ShiftRight(values.template ReinterpretCast<uint32_t>(), values.template ReinterpretCast<uint32_t>(), 31u, elements);
    PipeBarrier<PIPE_V>();
    Cast(values, sign, RoundMode::CAST_RINT, n);
    PipeBarrier<PIPE_V>();
    Muls(values, values, 8.0f, elements);
    PipeBarrier<PIPE_V>();
    Adds(values, values, -4.0f, elements);
    const auto add_stretch = [&](float low, float high, float factor) {
      Maxs(more, work, low, elements);
      PipeBarrier<PIPE_V>();
      Mins(more, more, high, elements);
      PipeBarrier<PIPE_V>();
      Muls(more, more, factor, elements);
      PipeBarrier<PIPE_V>();
      Cast(more, more, RoundMode::CAST_RINT, n);
      PipeBarrier<PIPE_V>();
      Add(values, values, more, elements);
      PipeBarrier<PIPE_V>();
    };
    add_stretch(0.0f, 2.0f, 2.0f);
    add_stretch(2.0f, 4.0f, 1.0f);
    add_stretch(4.0f, 6.0f, 0.5f);
    // One a byte, then a pair: low + high / 16 of a word is low + 16 high + 256 high, without its upper byte the pair.
    const LocalTensor<uint8_t> bytes = more.template ReinterpretCast<uint8_t>();
    const LocalTensor<int16_t> pairs = more.template ReinterpretCast<int16_t>(),
                               shifted = work.template ReinterpretCast<int16_t>();
    const LocalTensor<uint16_t> words = work.template ReinterpretCast<uint16_t>();
    Cast(work.template ReinterpretCast<half>(), values, RoundMode::CAST_RINT, n);
    PipeBarrier<PIPE_V>();
    Cast(bytes, work.template ReinterpretCast<half>(), RoundMode::CAST_RINT, n);
    PipeBarrier<PIPE_V>();
    ShiftRight(shifted, pairs, int16_t(4), elements / 2);
    PipeBarrier<PIPE_V>();
    Add(shifted, shifted, pairs, elements / 2);
    PipeBarrier<PIPE_V>();
    ShiftLeft(words, words, uint16_t(8), elements / 2);
    PipeBarrier<PIPE_V>();
    ShiftRight(words, words, uint16_t(8), elements / 2);
    PipeBarrier<PIPE_V>();
    Cast(halves, shifted, RoundMode::CAST_RINT, n / 2);
    PipeBarrier<PIPE_V>();
    Cast(codes, halves, RoundMode::CAST_RINT, n / 2);
  }
  PipeBarrier<PIPE_V>();
}

// The same for any floats: too large saturates, NaN gives NaN, or 0 where there is none.
template <Code code>
__aicore__ inline void encode_any(const LocalTensor<uint8_t>& codes, const LocalTensor<float>& values,
                                  const LocalTensor<float>& work, const LocalTensor<float>& more, int32_t elements) {
  const LocalTensor<uint32_t> magnitude = more.template ReinterpretCast<uint32_t>();
  const LocalTensor<int32_t> mask = more.template ReinterpretCast<int32_t>();
  const LocalTensor<uint16_t> words = values.template ReinterpretCast<uint16_t>();
  ShiftLeft(magnitude, values.template ReinterpretCast<uint32_t>(), 1u, elements);
  PipeBarrier<PIPE_V>();
  ShiftRight(magnitude, magnitude, 1u, elements);
  PipeBarrier<PIPE_V>();
  Adds(mask, mask, -0x7f800001, elements);
  PipeBarrier<PIPE_V>();
  ShiftRight(mask, mask, 31, elements);  // 0 for NaN, else all ones
  PipeBarrier<PIPE_V>();
  And(words, words, more.template ReinterpretCast<uint16_t>(), 2 * elements);
  PipeBarrier<PIPE_V>();
  Mins(values, values, Format<code>::kMost, elements);
  PipeBarrier<PIPE_V>();
  Maxs(values, values, -Format<code>::kMost, elements);
  PipeBarrier<PIPE_V>();
  encode<code>(codes, values, work, more, elements);
  if constexpr (Format<code>::kNaNs != 0) {
    const LocalTensor<int16_t> pairs = codes.template ReinterpretCast<int16_t>();
    Adds(mask, mask, 1, elements);
    PipeBarrier<PIPE_V>();
    Muls(mask, mask, Format<code>::kNaNs & 0xff, elements);
    PipeBarrier<PIPE_V>();
    Cast(work.template ReinterpretCast<uint8_t>(), mask, RoundMode::CAST_NONE, uint32_t(elements));
    PipeBarrier<PIPE_V>();
    Add(pairs, pairs, work.template ReinterpretCast<int16_t>(), elements / 2);  // to codes that are 0 there
    PipeBarrier<PIPE_V>();
  }
}

// Codes of e2m1 in floats, 0 to 15, to what they stand for. Magnitudes m rise by 1/2 up to code 4, by 1 up to code 6, and
// by 2: 2 m - min(m, 6) - min(m, 4) / 2. From 8 on they are negative.
__aicore__ inline void values_of_nibbles(const LocalTensor<float>& values, const LocalTensor<float>& codes,
                                         const LocalTensor<float>& sign, int32_t n) {
  Maxs(sign, codes, 7.0f, n);
  PipeBarrier<PIPE_V>();
  Mins(sign, sign, 8.0f, n);
  PipeBarrier<PIPE_V>();
  Muls(sign, sign, -2.0f, n);
  PipeBarrier<PIPE_V>();
  Adds(sign, sign, 15.0f, n);
  PipeBarrier<PIPE_V>();
  Muls(values, sign, 4.0f, n);
  PipeBarrier<PIPE_V>();
  Adds(values, values, -4.0f, n);
  PipeBarrier<PIPE_V>();
  Add(values, values, codes, n);
  PipeBarrier<PIPE_V>();
  Mins(codes, values, 6.0f, n);
  Muls(values, values, 2.0f, n);
  PipeBarrier<PIPE_V>();
  Sub(values, values, codes, n);
  Mins(codes, codes, 4.0f, n);
  PipeBarrier<PIPE_V>();
  Muls(codes, codes, 0.5f, n);
  PipeBarrier<PIPE_V>();
  Sub(values, values, codes, n);
  PipeBarrier<PIPE_V>();
  Mul(values, values, sign, n);
}

// Codes as floats, exactly. `work` is as large as the values, and so is `more`, for e2m1.
template <Code code>
__aicore__ inline void decode(const LocalTensor<float>& values, const LocalTensor<uint8_t>& codes,
                              const LocalTensor<float>& work, const LocalTensor<float>& more, int32_t elements) {
  const uint32_t n = uint32_t(elements);
  const LocalTensor<half> halves = work.template ReinterpretCast<half>();
  if constexpr (code == Code::e4m3) {
    Cast(values, codes.template ReinterpretCast<E4m3>(), RoundMode::CAST_NONE, n);
  } else if constexpr (code == Code::int8) {
    Cast(halves, codes.template ReinterpretCast<int8_t>(), RoundMode::CAST_NONE, n);
    PipeBarrier<PIPE_V>();
    Cast(values, halves, RoundMode::CAST_NONE, n);
  } else {
    // A byte of low + 16 high becomes a word of low + 256 high: one code a byte.
    const LocalTensor<int16_t> pairs = work.template ReinterpretCast<int16_t>(),
                               high = values.template ReinterpretCast<int16_t>();
    Cast(values.template ReinterpretCast<half>(), codes, RoundMode::CAST_NONE, n / 2);
    PipeBarrier<PIPE_V>();
    Cast(pairs, values.template ReinterpretCast<half>(), RoundMode::CAST_RINT, n / 2);
    PipeBarrier<PIPE_V>();
    ShiftRight(high, pairs, int16_t(4), elements / 2);
    PipeBarrier<PIPE_V>();
    Muls(high, high, int16_t(240), elements / 2);
    PipeBarrier<PIPE_V>();
    Add(pairs, pairs, high, elements / 2);
    PipeBarrier<PIPE_V>();
    const LocalTensor<half> nibbles = values.template ReinterpretCast<half>();
    Cast(nibbles, work.template ReinterpretCast<uint8_t>(), RoundMode::CAST_NONE, n);
    PipeBarrier<PIPE_V>();
    Cast(work, nibbles, RoundMode::CAST_NONE, n);
    PipeBarrier<PIPE_V>();
    values_of_nibbles(values, work, more, elements);
  }
  PipeBarrier<PIPE_V>();
}

}  // namespace deepinfer::npu
