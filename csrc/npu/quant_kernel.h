// Quantisation to int8 in groups of neighbours that share a scale. Groups are dealt to the cores in tiles; a group that
// does not fit is read twice, in chunks.
//
// Largest magnitude of a group: fold, then one reduction. What is infinite or NaN shows in the sum of x * 0, whatever the
// maximum makes of it. Scales and factors of a tile are computed together; the factors go through the scalar unit, once
// for all groups of a tile. Codes: float to int16 to half to int8, all exact after the first rounding. Every scale has a
// block of 32 bytes on the core and is written by itself, so that both layouts are one. Bound by the number of vector
// instructions: about 20 a group.
//
// Config: `dtype` (DType), `power` (int): scales are powers of two.
#pragma once

#include "quant_tiling.h"
#include "rows.h"

namespace deepinfer::npu {

template <typename C>
class Quantize {
  using T = Element<C::dtype>;
  static constexpr int32_t kLanes = 64;
  static constexpr int32_t kStep = 8;  // floats from scale to scale
  static constexpr float kMost = 127.0f, kFloor = 1e-10f;

 public:
  __aicore__ inline Quantize(GM_ADDR x, GM_ADDR codes, GM_ADDR scales, const QuantTiling& tiling) : tiling_(tiling) {
    x_.init(x, tiling.x_bytes, tiling.rows);
    codes_.init(codes, tiling.code_bytes, tiling.columns);
    scales_.SetGlobalBuffer((__gm__ float*)scales, uint64_t(tiling.scale_bytes) / sizeof(float));
    const uint32_t elements = uint32_t(tiling.pieces * tiling.pitch), small = uint32_t(tiling.pieces * kStep);
    pipe_.InitBuffer(x_queue_, 2, elements * sizeof(T));
    pipe_.InitBuffer(code_queue_, 2, elements);
    pipe_.InitBuffer(scale_queue_, 1, small * sizeof(float));
    pipe_.InitBuffer(values_buffer_, elements * sizeof(float));
    pipe_.InitBuffer(work_buffer_, elements * sizeof(float));
    pipe_.InitBuffer(small_buffer_, 3 * small * sizeof(float));
    pipe_.InitBuffer(total_buffer_, 2 * kLanes * sizeof(float));
    values_ = values_buffer_.template Get<float>();
    work_ = work_buffer_.template Get<float>();
    amax_ = small_buffer_.template Get<float>();
    bad_ = amax_[small];
    factors_ = amax_[2 * small];
    most_ = total_buffer_.template Get<float>();
    sum_ = most_[kLanes];
  }

  __aicore__ inline void run() {
    const int64_t groups = tiling_.rows.count * tiling_.across, stride = GetBlockNum() * tiling_.pieces;
    if (tiling_.chunk < tiling_.group) {
      for (int64_t first = GetBlockIdx(); first < groups; first += GetBlockNum()) long_group(first);
      return;
    }
    int64_t first = GetBlockIdx() * tiling_.pieces;
    if (first < groups) load(first, count_at(first));
    for (; first < groups; first += stride) {
      if (first + stride < groups) load(first + stride, count_at(first + stride));
      whole_groups(first, count_at(first));
    }
  }

 private:
  __aicore__ inline int32_t count_at(int64_t first) const {
    const int64_t left = tiling_.rows.count * tiling_.across - first;
    return left < tiling_.pieces ? int32_t(left) : tiling_.pieces;
  }
  __aicore__ inline int64_t size_of_group(int64_t group) const {
    const int64_t left = tiling_.columns - group % tiling_.across * tiling_.group;
    return left < tiling_.group ? left : tiling_.group;
  }
  // Groups lie on the core as they do in their row.
  __aicore__ inline bool dense() const { return tiling_.pitch == tiling_.group; }

  // Calls move(row, begin, piece, count, size) for runs of groups of one row and one size; dense ones are one piece.
  template <typename Move>
  __aicore__ inline void for_runs(int64_t first, int32_t count, Move move) const {
    for (int32_t piece = 0; piece < count;) {
      const int64_t group = first + piece, row = group / tiling_.across, column = group % tiling_.across;
      const int64_t left = tiling_.across - column, begin = column * tiling_.group;
      int32_t run = left < count - piece ? int32_t(left) : count - piece;
      const int32_t last = int32_t(size_of_group(group + run - 1));
      if (dense()) {
        move(row, begin, piece, 1, int32_t((run - 1) * tiling_.group) + last);
      } else {
        if (run > 1 && last < tiling_.group) --run;
        move(row, begin, piece, run, run > 1 ? int32_t(tiling_.group) : int32_t(size_of_group(group)));
      }
      piece += run;
    }
  }

  __aicore__ inline void load(int64_t first, int32_t count) {
    const LocalTensor<T> x = x_queue_.template AllocTensor<T>();
    for_runs(first, count, [&](int64_t row, int64_t begin, int32_t piece, int32_t pieces, int32_t size) {
      const int32_t pitch = pieces > 1 ? tiling_.pitch : whole_blocks<T>(size);
      x_.read_pieces(x[uint32_t(piece * tiling_.pitch)], row, begin, pieces, size, pitch);
    });
    x_queue_.EnQue(x);
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
  __aicore__ inline void end_group(int32_t piece) {
    ReduceMax(amax_[uint32_t(piece * kStep)], most_, work_, kLanes);
    ReduceSum(bad_[uint32_t(piece * kStep)], sum_, work_[kStep], kLanes);
    PipeBarrier<PIPE_V>();
  }

  // From amax_ and bad_ to factors_ and `scales`.
  __aicore__ inline void make_scales(const LocalTensor<float>& scales, int32_t count) {
    const int32_t n = count * kStep;
    Maxs(amax_, amax_, kFloor, n);
    Duplicate(factors_, kMost, n);
    PipeBarrier<PIPE_V>();
    Div(scales, amax_, factors_, n);
    Div(factors_, factors_, amax_, n);
    PipeBarrier<PIPE_V>();
    if constexpr (C::power != 0) {
      // The next power of two, by the bits: any mantissa carries into the exponent. Its inverse has exponent 254 - e.
      const LocalTensor<int32_t> bits = scales.template ReinterpretCast<int32_t>(),
                                 inverse = factors_.template ReinterpretCast<int32_t>();
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
    Add(scales, scales, bad_, n);
    PipeBarrier<PIPE_V>();
    Muls(amax_, scales, 0.0f, n);  // NaN where there is no scale, for the scalar unit
    hand_over<HardEvent::V_S>(pipe_);
  }

  __aicore__ inline void clear_small() {
    Duplicate(amax_, 0.0f, 3 * tiling_.pieces * kStep);
    PipeBarrier<PIPE_V>();
  }

  __aicore__ inline void scale(const LocalTensor<float>& values, int32_t piece, int32_t size) {
    const float nan_or_zero = amax_.GetValue(uint32_t(piece * kStep));
    if (nan_or_zero == 0.0f) Muls(values, values, factors_.GetValue(uint32_t(piece * kStep)), size);
    else Duplicate(values, 0.0f, size);
  }

  // values_ to codes. The buffer of work_ holds the steps between.
  __aicore__ inline void encode(const LocalTensor<int8_t>& codes, int32_t elements) {
    const LocalTensor<int16_t> whole = work_.template ReinterpretCast<int16_t>();
    const LocalTensor<half> halves = values_.template ReinterpretCast<half>();
    PipeBarrier<PIPE_V>();
    Cast(whole, values_, RoundMode::CAST_RINT, uint32_t(elements));
    PipeBarrier<PIPE_V>();
    Cast(halves, whole, RoundMode::CAST_RINT, uint32_t(elements));
    PipeBarrier<PIPE_V>();
    Cast(codes, halves, RoundMode::CAST_RINT, uint32_t(elements));
    PipeBarrier<PIPE_V>();
  }

  __aicore__ inline void write_scales(int64_t first, int32_t count, const LocalTensor<float>& scales) {
    const Scales& to = tiling_.scales;
    for (int32_t piece = 0; piece < count;) {
      const int64_t group = first + piece, row = group / tiling_.across, column = group % tiling_.across;
      const int64_t left = tiling_.across - column;
      const int32_t run = left < count - piece ? int32_t(left) : count - piece;
      const int64_t at = row / to.rows * to.matrix + row % to.rows * int64_t(to.row) + column * int64_t(to.column);
      DataCopyExtParams params;
      params.blockCount = uint16_t(run);
      params.blockLen = sizeof(float);
      params.dstStride = (to.column - 1) * uint32_t(sizeof(float));
      DataCopyPad(scales_[uint64_t(at)], scales[uint32_t(piece * kStep)], params);
      piece += run;
    }
  }

  __aicore__ inline void whole_groups(int64_t first, int32_t count) {
    const int32_t elements = count * tiling_.pitch;
    const LocalTensor<T> x = x_queue_.template DeQue<T>();
    Duplicate(values_, 0.0f, elements);
    PipeBarrier<PIPE_V>();
    for_runs(first, count, [&](int64_t, int64_t, int32_t piece, int32_t pieces, int32_t size) {
      for (int32_t i = 0; i < pieces; ++i) {
        const uint32_t at = uint32_t((piece + i) * tiling_.pitch);
        widen(values_[at], x[at], whole_blocks<T>(size));
      }
    });
    x_queue_.FreeTensor(x);
    clear_small();
    for (int32_t piece = 0; piece < count; ++piece) {
      const uint32_t at = uint32_t(piece * tiling_.pitch);
      begin_group();
      add(values_[at], work_[at], tiling_.pitch);
      end_group(piece);
    }
    LocalTensor<float> scales = scale_queue_.template AllocTensor<float>();
    make_scales(scales, count);
    scale_queue_.EnQue(scales);
    scales = scale_queue_.template DeQue<float>();
    write_scales(first, count, scales);
    scale_queue_.FreeTensor(scales);
    for (int32_t piece = 0; piece < count; ++piece)
      scale(values_[uint32_t(piece * tiling_.pitch)], piece, tiling_.pitch);
    hand_over<HardEvent::S_V>(pipe_);
    LocalTensor<int8_t> codes = code_queue_.template AllocTensor<int8_t>();
    encode(codes, elements);
    code_queue_.EnQue(codes);
    codes = code_queue_.template DeQue<int8_t>();
    for_runs(first, count, [&](int64_t row, int64_t begin, int32_t piece, int32_t pieces, int32_t size) {
      const int32_t pitch = pieces > 1 ? tiling_.pitch : whole_blocks<int8_t>(size);
      codes_.write_pieces(codes[uint32_t(piece * tiling_.pitch)], row, begin, pieces, size, pitch);
    });
    code_queue_.FreeTensor(codes);
  }

  // A part of a group into values_; what is left of the last 32 elements is zero.
  __aicore__ inline void take(int64_t row, int64_t begin, int32_t size) {
    LocalTensor<T> x = x_queue_.template AllocTensor<T>();
    x_.read_pieces(x, row, begin, 1, size, whole_blocks<T>(size));
    x_queue_.EnQue(x);
    x = x_queue_.template DeQue<T>();
    Duplicate(values_, 0.0f, whole_blocks<int8_t>(size));
    PipeBarrier<PIPE_V>();
    widen(values_, x, whole_blocks<T>(size));
    x_queue_.FreeTensor(x);
    PipeBarrier<PIPE_V>();
  }

  __aicore__ inline void long_group(int64_t group) {
    const int64_t row = group / tiling_.across, begin = group % tiling_.across * tiling_.group;
    const int64_t size = size_of_group(group);
    const auto part_at = [&](int64_t at) { return size - at < tiling_.chunk ? int32_t(size - at) : tiling_.chunk; };
    clear_small();
    begin_group();
    for (int64_t at = 0; at < size; at += tiling_.chunk) {
      take(row, begin + at, part_at(at));
      add(values_, work_, whole_blocks<int8_t>(part_at(at)));
    }
    end_group(0);
    LocalTensor<float> scales = scale_queue_.template AllocTensor<float>();
    make_scales(scales, 1);
    scale_queue_.EnQue(scales);
    scales = scale_queue_.template DeQue<float>();
    write_scales(group, 1, scales);
    scale_queue_.FreeTensor(scales);
    for (int64_t at = 0; at < size; at += tiling_.chunk) {
      const int32_t part = part_at(at);
      take(row, begin + at, part);
      scale(values_, 0, whole_blocks<int8_t>(part));
      LocalTensor<int8_t> codes = code_queue_.template AllocTensor<int8_t>();
      encode(codes, whole_blocks<int8_t>(part));
      code_queue_.EnQue(codes);
      codes = code_queue_.template DeQue<int8_t>();
      codes_.write_pieces(codes, row, begin + at, 1, part, whole_blocks<int8_t>(part));
      code_queue_.FreeTensor(codes);
    }
    hand_over<HardEvent::S_V>(pipe_);
  }

  const QuantTiling& tiling_;
  TPipe pipe_;
  RowReader<T> x_;
  RowWriter<int8_t> codes_;
  GlobalTensor<float> scales_;
  TQue<TPosition::VECIN, 2> x_queue_;
  TQue<TPosition::VECOUT, 2> code_queue_;
  TQue<TPosition::VECOUT, 1> scale_queue_;
  TBuf<TPosition::VECCALC> values_buffer_, work_buffer_, small_buffer_, total_buffer_;
  LocalTensor<float> values_, work_, amax_, bad_, factors_, most_, sum_;
};

template <typename Config>
__aicore__ inline void quantize(GM_ADDR x, GM_ADDR codes, GM_ADDR scales, const QuantTiling& tiling) {
  Quantize<Config> kernel(x, codes, scales, tiling);
  kernel.run();
}

}  // namespace deepinfer::npu
