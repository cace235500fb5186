// RMSNorm with and without a residual. Rows are dealt to the cores in tiles. While a tile is worked on, the copies of the
// next one run, if the unified buffer has room for two. A row that does not fit at all is read twice, in chunks.
//
// Queues: rows in, residuals in, norms out, sums out. The vector pipe computes in float: square, fold each row to one
// sum, scale. Rows of up to 2040 share their instructions (row_norms.h); of longer ones, one scalar a row goes through the
// scalar unit, once for all rows of a tile. Bound by memory for long rows, by the vector pipe for short ones.
//
// Rows may be quantised before they leave the core: then `out` are codes of whole rows, and the norm, rounded to its type
// as if it had been written, goes through quantizer.h.
//
// Config: `x`, `weight`, `out` (DType), `form` (WeightForm), `add`, `quantized` (int), `code` (Code), `scale` (ScaleType).
#pragma once

#include "norm_tiling.h"
#include "quantizer.h"
#include "row_norms.h"

namespace deepinfer::npu {

template <typename C>
class RmsNorm {
  using X = Element<C::x>;
  using W = Element<C::weight>;
  using Out = Element<C::out>;
  static constexpr bool kWeighted = C::form != WeightForm::none;
  static constexpr bool kAdds = C::add != 0, kQuantizes = C::quantized != 0;
  static constexpr int32_t kLanes = 64;   // floats of a vector instruction's repeat
  static constexpr int32_t kSumStep = 8;  // the sum of a row has a block of its own

 public:
  __aicore__ inline RmsNorm(GM_ADDR x, GM_ADDR residual, GM_ADDR weight, GM_ADDR out, GM_ADDR sum, GM_ADDR scales,
                            const RmsNormTiling& tiling)
      : tiling_(tiling) {
    x_.init(x, tiling.x_bytes, tiling.x_rows);
    const uint32_t elements = uint32_t(tiling.rows * tiling.pitch);
    const uint8_t buffers = uint8_t(tiling.buffers);
    pipe_.InitBuffer(x_queue_, buffers, elements * sizeof(X));
    if constexpr (kQuantizes) {
      codes_.init(out, tiling.out_bytes, code_bytes<C::code>(tiling.hidden_size));
      const int32_t across = int32_t(tiling.scales.across);
      quantizer_.init(pipe_, scales, tiling.scale_bytes, tiling.scales, tiling.rows * across);
      pipe_.InitBuffer(out_queue_, buffers, uint32_t(code_bytes<C::code>(int32_t(elements))));
      pipe_.InitBuffer(rounded_buffer_, elements * sizeof(Out));
      rounded_ = rounded_buffer_.template Get<Out>();
      if constexpr (C::code == Code::e2m1) {
        pipe_.InitBuffer(more_buffer_, elements * sizeof(float));
        more_ = more_buffer_.template Get<float>();
      }
    } else {
      out_.init(out, tiling.out_bytes, tiling.hidden_size);
      pipe_.InitBuffer(out_queue_, buffers, elements * sizeof(Out));
    }
    if constexpr (kAdds) {
      residual_.init(residual, tiling.residual_bytes, tiling.residual_rows);
      sum_.init(sum, tiling.sum_bytes, tiling.hidden_size);
      again_.SetGlobalBuffer((__gm__ Bits<X>*)sum, uint64_t(tiling.sum_bytes) / sizeof(X));
      pipe_.InitBuffer(residual_queue_, buffers, elements * sizeof(X));
      pipe_.InitBuffer(sum_queue_, buffers, elements * sizeof(X));
    }
    pipe_.InitBuffer(values_buffer_, elements * sizeof(float));
    pipe_.InitBuffer(squares_buffer_, elements * sizeof(float));
    pipe_.InitBuffer(scales_buffer_, uint32_t(row_norm_bytes(tiling.rows)));
    pipe_.InitBuffer(total_buffer_, kLanes * sizeof(float));
    values_ = values_buffer_.template Get<float>();
    squares_ = squares_buffer_.template Get<float>();
    scales_ = scales_buffer_.template Get<float>();
    ones_ = scales_[uint32_t(tiling.rows * kSumStep)];
    total_ = total_buffer_.template Get<float>();
    if constexpr (kWeighted) {
      weights_.init(pipe_, weight, tiling.weight_bytes, tiling.pitch);
    }
  }

  __aicore__ inline void run() {
    const int64_t tiles = (tiling_.x_rows.count + tiling_.rows - 1) / tiling_.rows;
    if (tiling_.pitch > kLongestShortRow) Duplicate(ones_, 1.0f, tiling_.rows * kSumStep);
    if (tiling_.chunk < tiling_.hidden_size) {
      for (int64_t row = GetBlockIdx(); row < tiles; row += GetBlockNum()) long_row(row);
      return;
    }
    if constexpr (kWeighted) weights_.load(0, tiling_.chunk);
    const bool ahead = tiling_.buffers > 1;
    int64_t tile = GetBlockIdx();
    if (ahead && tile < tiles) load(tile * tiling_.rows, rows_of(tile), 0, tiling_.chunk);
    for (; tile < tiles; tile += GetBlockNum()) {
      const int64_t next = ahead ? tile + GetBlockNum() : tile;
      if (next < tiles) load(next * tiling_.rows, rows_of(next), 0, tiling_.chunk);
      whole_rows(tile * tiling_.rows, rows_of(tile));
    }
  }

 private:
  __aicore__ inline int32_t rows_of(int64_t tile) const {
    const int64_t left = tiling_.x_rows.count - tile * tiling_.rows;
    return left < tiling_.rows ? int32_t(left) : tiling_.rows;
  }

  __aicore__ inline void load(int64_t row, int32_t count, int64_t begin, int32_t size) {
    const LocalTensor<X> x = x_queue_.template AllocTensor<X>();
    x_.read(x, row, count, begin, size, tiling_.pitch);
    x_queue_.EnQue(x);
    if constexpr (kAdds) {
      const LocalTensor<X> residual = residual_queue_.template AllocTensor<X>();
      residual_.read(residual, row, count, begin, size, tiling_.pitch);
      residual_queue_.EnQue(residual);
    }
  }

  // The loaded rows as floats in values_; with a residual, their rounded sums, which are also written.
  __aicore__ inline void take(int64_t row, int32_t count, int64_t begin, int32_t size) {
    const int32_t elements = (count - 1) * tiling_.pitch + whole_blocks<X>(size);
    LocalTensor<X> x = x_queue_.template DeQue<X>();
    widen(values_, x, elements);
    x_queue_.FreeTensor(x);
    PipeBarrier<PIPE_V>();
    if constexpr (kAdds) {
      LocalTensor<X> residual = residual_queue_.template DeQue<X>();
      widen(squares_, residual, elements);
      residual_queue_.FreeTensor(residual);
      PipeBarrier<PIPE_V>();
      Add(values_, values_, squares_, elements);
      PipeBarrier<PIPE_V>();
      LocalTensor<X> sum = sum_queue_.template AllocTensor<X>();
      narrow(sum, values_, elements);
      PipeBarrier<PIPE_V>();
      widen(values_, sum, elements);
      PipeBarrier<PIPE_V>();
      sum_queue_.EnQue(sum);
      sum = sum_queue_.template DeQue<X>();
      sum_.write(sum, row, count, begin, size, tiling_.pitch);
      sum_queue_.FreeTensor(sum);
    }
  }

  // Adds the squares of `size` values to total_.
  __aicore__ inline void add_squares(const LocalTensor<float>& values, int32_t size) {
    Mul(squares_, values, values, size);
    PipeBarrier<PIPE_V>();
    for (int32_t begin = 0; begin < size; begin += RmsNormTiling::kPiece) {
      const int32_t left = size - begin < RmsNormTiling::kPiece ? size - begin : RmsNormTiling::kPiece;
      const LocalTensor<float> piece = squares_[uint32_t(begin)];
      Add(total_, total_, piece, fold<false>(piece, left));
      PipeBarrier<PIPE_V>();
    }
  }

  __aicore__ inline void begin_sum() {
    Duplicate(total_, 0.0f, kLanes);
    PipeBarrier<PIPE_V>();
  }
  __aicore__ inline void end_sum(int32_t row) {
    ReduceSum(scales_[uint32_t(row * kSumStep)], total_, squares_, kLanes);
    PipeBarrier<PIPE_V>();
  }

  // From sums of squares to factors, 1 / sqrt(sum / hidden_size + eps), for the scalar unit to read.
  __aicore__ inline void make_scales(int32_t count) {
    const int32_t elements = count * kSumStep;
    Duplicate(squares_, float(tiling_.hidden_size), elements);
    PipeBarrier<PIPE_V>();
    Div(scales_, scales_, squares_, elements);
    PipeBarrier<PIPE_V>();
    Adds(scales_, scales_, tiling_.eps, elements);
    PipeBarrier<PIPE_V>();
    Sqrt(scales_, scales_, elements);
    PipeBarrier<PIPE_V>();
    Div(scales_, ones_, scales_, elements);
    hand_over<HardEvent::V_S>(pipe_);
  }

  // Scales values_ row by row. The scales go through the scalar unit.
  __aicore__ inline void scale_rows(int32_t count, int32_t width) {
    for (int32_t i = 0; i < count; ++i) {
      const LocalTensor<float> values = values_[uint32_t(i * tiling_.pitch)];
      Muls(values, values, scales_.GetValue(uint32_t(i * kSumStep)), width);
    }
    PipeBarrier<PIPE_V>();
  }

  // Applies the weight to the scaled values_ and writes the norm, with the roundings of the model's own code.
  __aicore__ inline void finish(int64_t row, int32_t count, int64_t begin, int32_t size) {
    const int32_t pitch = tiling_.pitch, width = whole_blocks<X>(size);
    const int32_t elements = (count - 1) * pitch + width;
    LocalTensor<Out> out;
    if constexpr (kQuantizes) out = rounded_;
    else out = out_queue_.template AllocTensor<Out>();
    weigh_rows<C::form, X>(out, values_, weights_.values(), count, width, pitch);
    if constexpr (kQuantizes) {
      PipeBarrier<PIPE_V>();
      widen(values_, out, elements);
      PipeBarrier<PIPE_V>();
      write_codes(row, count);
    } else {
      out_queue_.EnQue(out);
      out = out_queue_.template DeQue<Out>();
      out_.write(out, row, count, begin, size, pitch);
      out_queue_.FreeTensor(out);
    }
    PipeBarrier<PIPE_V>();
  }

  __aicore__ inline void write_codes(int64_t row, int32_t count) {
    const int32_t size = int32_t(tiling_.hidden_size), pitch = tiling_.pitch;
    LocalTensor<uint8_t> codes = out_queue_.template AllocTensor<uint8_t>();
    quantizer_.quantize_rows(codes, values_, squares_, more_, row, count, size, pitch, tiling_.group);
    out_queue_.EnQue(codes);
    codes = out_queue_.template DeQue<uint8_t>();
    codes_.write(codes, row, count, 0, code_bytes<C::code>(size), code_bytes<C::code>(pitch));
    out_queue_.FreeTensor(codes);
  }

  __aicore__ inline void whole_rows(int64_t row, int32_t count) {
    const int32_t size = tiling_.chunk;
    take(row, count, 0, size);
    if (tiling_.pitch <= kLongestShortRow) {
      normalize_rows(values_, squares_, scales_, count, tiling_.pitch, size, tiling_.eps);
      finish(row, count, 0, size);
      return;
    }
    const int32_t width = whole_blocks<X>(size);
    Duplicate(scales_, 0.0f, tiling_.rows * kSumStep);
    for (int32_t i = 0; i < count; ++i) {
      begin_sum();
      add_squares(values_[uint32_t(i * tiling_.pitch)], width);
      end_sum(i);
    }
    make_scales(count);
    scale_rows(count, width);
    finish(row, count, 0, size);
    hand_over<HardEvent::S_V>(pipe_);  // the scales have been read
  }

  __aicore__ inline int32_t chunk_at(int64_t begin) const {
    const int64_t left = tiling_.hidden_size - begin;
    return left < tiling_.chunk ? int32_t(left) : tiling_.chunk;
  }

  __aicore__ inline void long_row(int64_t row) {
    Duplicate(scales_, 0.0f, kSumStep);
    begin_sum();
    for (int64_t begin = 0; begin < tiling_.hidden_size; begin += tiling_.chunk) {
      const int32_t size = chunk_at(begin);
      load(row, 1, begin, size);
      take(row, 1, begin, size);
      add_squares(values_, whole_blocks<X>(size));
    }
    end_sum(0);
    make_scales(1);
    if constexpr (kAdds) hand_over<HardEvent::MTE3_MTE2>(pipe_);  // what was written is read again
    for (int64_t begin = 0; begin < tiling_.hidden_size; begin += tiling_.chunk) {
      const int32_t size = chunk_at(begin);
      reload(row, begin, size);
      if constexpr (kWeighted) weights_.load(begin, size);
      scale_rows(1, whole_blocks<X>(size));
      finish(row, 1, begin, size);
    }
    hand_over<HardEvent::S_V>(pipe_);
    if constexpr (kAdds) hand_over<HardEvent::MTE2_MTE3>(pipe_);
  }

  // A chunk of x, or of the sum, into values_.
  __aicore__ inline void reload(int64_t row, int64_t begin, int32_t size) {
    LocalTensor<X> x = x_queue_.template AllocTensor<X>();
    if constexpr (kAdds) {
      DataCopyExtParams params;
      params.blockLen = uint32_t(size) * uint32_t(sizeof(X));
      DataCopyPadExtParams<Bits<X>> padding;
      padding.isPad = true;
      padding.rightPadding = uint8_t(whole_blocks<X>(size) - size);
      padding.paddingValue = 0;
      DataCopyPad(x.template ReinterpretCast<Bits<X>>(), again_[uint64_t(row * tiling_.hidden_size + begin)], params,
                  padding);
    } else {
      x_.read(x, row, 1, begin, size, tiling_.pitch);
    }
    x_queue_.EnQue(x);
    x = x_queue_.template DeQue<X>();
    widen(values_, x, whole_blocks<X>(size));
    x_queue_.FreeTensor(x);
    PipeBarrier<PIPE_V>();
  }

  const RmsNormTiling& tiling_;
  TPipe pipe_;
  RowReader<X> x_, residual_;
  RowWriter<Out> out_;
  RowWriter<uint8_t> codes_;
  Quantizer<C::code, C::scale> quantizer_;
  RowWriter<X> sum_;
  GlobalTensor<Bits<X>> again_;
  RowWeights<W, C::form> weights_;
  TQue<TPosition::VECIN, 2> x_queue_, residual_queue_;
  TQue<TPosition::VECOUT, 2> out_queue_, sum_queue_;
  TBuf<TPosition::VECCALC> values_buffer_, squares_buffer_, scales_buffer_, total_buffer_;
  TBuf<TPosition::VECCALC> rounded_buffer_, more_buffer_;
  LocalTensor<float> values_, squares_, scales_, ones_, total_, more_;
  LocalTensor<Out> rounded_;
};

template <typename Config>
__aicore__ inline void rms_norm(GM_ADDR x, GM_ADDR residual, GM_ADDR weight, GM_ADDR out, GM_ADDR sum, GM_ADDR scales,
                                const RmsNormTiling& tiling) {
  RmsNorm<Config> kernel(x, residual, weight, out, sum, scales, tiling);
  kernel.run();
}

}  // namespace deepinfer::npu
