// Scales on the way between global memory and the core, where each has a block of 32 bytes of its own: that is how copies
// take them apart, whatever their strides. Include from kernel files only.
#pragma once

#include "../ops/quant.h"
#include "rows.h"

namespace deepinfer::npu {

constexpr int32_t kScaleStep = 8;  // floats from scale to scale on the core

constexpr bool is_power(ScaleType type) { return type != ScaleType::f32; }
constexpr bool is_exponent(ScaleType type) { return type == ScaleType::e8m0 || type == ScaleType::packed; }

// Calls move(piece, count, address, gap) for the scales of blocks [first, first + count) of all bands: `count` scales of
// pieces `piece`, piece + kLines, ..., of which the first lies at byte `address` and the next `gap` bytes after its end.
template <ScaleType type, typename Move>
__aicore__ inline void for_scales(const Scales& scales, int64_t first, int32_t count, Move move) {
  constexpr int32_t kLines = type == ScaleType::packed ? 4 : 1;  // bytes of a word that copies take one by one
  constexpr int64_t kItem = is_exponent(type) ? 1 : 4, kWord = type == ScaleType::e8m0 ? 1 : 4;
  for (int32_t piece = 0; piece < count;) {
    const int64_t block = first + piece, band = block / scales.across, column = block % scales.across;
    const int64_t left = scales.across - column;
    const int32_t run = left < count - piece ? int32_t(left) : count - piece;
    const int64_t begin = band / scales.rows * scales.matrix + band % scales.rows * int64_t(scales.row);
    const int64_t step = int64_t(scales.column) * kWord, gap = step - kItem;
    for (int32_t line = 0; line < kLines && line < run; ++line) {
      const int32_t n = (run - line + kLines - 1) / kLines;
      const int64_t at = column + line, address = (begin + at / kLines * scales.column) * kWord + at % kLines;
      if (gap >= 0 && gap <= kLongestGap) {
        move(piece + line, n, address, uint32_t(gap));
      } else {
        for (int32_t i = 0; i < n; ++i) move(piece + line + i * kLines, 1, address + i * step, 0u);
      }
    }
    piece += run;
  }
}

template <ScaleType type>
class ScaleWriter {
  static constexpr int32_t kLines = type == ScaleType::packed ? 4 : 1;

 public:
  __aicore__ inline void init(TPipe& pipe, GM_ADDR data, int64_t bytes, const Scales& scales) {
    data_.SetGlobalBuffer((__gm__ uint8_t*)data, uint64_t(bytes));
    scales_ = &scales;
    if constexpr (type == ScaleType::packed) {
      pipe.InitBuffer(zero_buffer_, kBlockBytes);
      zeros_ = zero_buffer_.template Get<uint8_t>();
      Duplicate(zeros_.template ReinterpretCast<int32_t>(), 0, kBlockBytes / 4);
      hand_over<HardEvent::V_MTE3>(pipe);
    }
  }

  // Blocks [first, first + count): floats, or exponents as integers.
  __aicore__ inline void write(const LocalTensor<float>& from, int64_t first, int32_t count) const {
    const LocalTensor<uint8_t> bytes = from.template ReinterpretCast<uint8_t>();
    for_scales<type>(*scales_, first, count, [&](int32_t piece, int32_t n, int64_t address, uint32_t gap) {
      DataCopyExtParams params;
      params.blockCount = uint16_t(n);
      params.blockLen = is_exponent(type) ? 1 : sizeof(float);
      params.srcStride = kLines - 1;
      params.dstStride = gap;
      DataCopyPad(data_[uint64_t(address)], bytes[uint32_t(piece * kBlockBytes)], params);
      if constexpr (type == ScaleType::packed) fill_word(first + piece + (n - 1) * kLines, address, n, gap);
    });
  }

 private:
  // After the last block of a band, what is left of its word.
  __aicore__ inline void fill_word(int64_t last, int64_t address, int32_t n, uint32_t gap) const {
    const int64_t column = last % scales_->across;
    if (column + 1 < scales_->across || column % 4 == 3) return;
    DataCopyExtParams params;
    params.blockLen = uint32_t(3 - column % 4);
    DataCopyPad(data_[uint64_t(address + (n - 1) * (int64_t(gap) + 1) + 1)], zeros_, params);
  }

  GlobalTensor<uint8_t> data_;
  const Scales* scales_ = nullptr;
  TBuf<TPosition::VECCALC> zero_buffer_;
  LocalTensor<uint8_t> zeros_;
};

template <ScaleType type>
class ScaleReader {
  static constexpr int32_t kLines = type == ScaleType::packed ? 4 : 1;

 public:
  __aicore__ inline void init(GM_ADDR data, int64_t bytes, const Scales& scales) {
    data_.SetGlobalBuffer((__gm__ uint8_t*)data, uint64_t(bytes));
    scales_ = &scales;
  }

  // The bytes of the scales of blocks [first, first + count), each followed by zeros.
  __aicore__ inline void read(const LocalTensor<float>& to, int64_t first, int32_t count) const {
    const LocalTensor<uint8_t> bytes = to.template ReinterpretCast<uint8_t>();
    for_scales<type>(*scales_, first, count, [&](int32_t piece, int32_t n, int64_t address, uint32_t gap) {
      DataCopyExtParams params;
      params.blockCount = uint16_t(n);
      params.blockLen = is_exponent(type) ? 1 : sizeof(float);
      params.srcStride = gap;
      params.dstStride = kLines - 1;
      DataCopyPadExtParams<uint8_t> padding;
      padding.isPad = true;
      padding.rightPadding = uint8_t(kBlockBytes - params.blockLen);
      DataCopyPad(bytes[uint32_t(piece * kBlockBytes)], data_[uint64_t(address)], params, padding);
    });
  }

 private:
  GlobalTensor<uint8_t> data_;
  const Scales* scales_ = nullptr;
};

// Exponents to the powers of two that they stand for, 255 to NaN and 0 to 2^-127; in place. `work` is as large.
template <ScaleType type>
__aicore__ inline void to_floats(const LocalTensor<float>& scales, const LocalTensor<float>& work, int32_t n) {
  if constexpr (is_exponent(type)) {
    const LocalTensor<int32_t> bits = scales.template ReinterpretCast<int32_t>();
    ShiftLeft(bits, bits, 23, n);
    PipeBarrier<PIPE_V>();
    Maxs(bits, bits, 0x00400000, n);
    PipeBarrier<PIPE_V>();
    Muls(work, scales, 0.0f, n);  // NaN of the infinity that 255 gives
    PipeBarrier<PIPE_V>();
    Add(scales, scales, work, n);
    PipeBarrier<PIPE_V>();
  }
}

}  // namespace deepinfer::npu
