// Blocks of one column, down the rows: quantised, and back. Strips of columns are dealt to the cores. A lane of the vector
// unit is a column, so that magnitudes, scales and products are those of whole rows of the strip; only the scales go
// through the scalar unit, between their lanes and the blocks of 32 bytes that copies take. A strip that does not fit
// is read twice. Bound by the vector unit: about 12 instructions a row of the strip, 25 with codes of e2m1.
//
// Config: `dtype` (DType), `code` (Code), `scale` (ScaleType), `given` (int): quantisation reads the scales.
#pragma once

#include "quant_tiling.h"
#include "quantizer.h"

namespace deepinfer::npu {

// A strip of columns of a band, and its scales in lanes and in blocks.
template <ScaleType type>
class ColumnStrips {
 public:
  __aicore__ inline ColumnStrips(const QuantTiling& tiling)
      : tiling_(tiling), across_((tiling.columns + tiling.pieces - 1) / tiling.pieces) {}

  __aicore__ inline void init(TPipe& pipe) {
    pipe_ = &pipe;
    pipe.InitBuffer(buffer_, uint32_t(tiling_.pieces) * kBlockBytes);
    blocks_ = buffer_.template Get<float>();
  }
  __aicore__ inline int64_t count() const { return tiling_.matrices.count * tiling_.down * across_; }
  __aicore__ inline void select(int64_t strip) {
    band = strip / across_;
    begin = strip % across_ * tiling_.pieces;
    const int64_t columns = tiling_.columns - begin, first = band % tiling_.down * tiling_.block_rows;
    size = int32_t(columns < tiling_.pieces ? columns : tiling_.pieces);
    row = band / tiling_.down * tiling_.rows + first;
    rows = tiling_.rows - first < tiling_.block_rows ? tiling_.rows - first : tiling_.block_rows;
  }
  // Calls part(row, rows) for the rows of a band that are on the core at once, counted from its first one.
  template <typename Part>
  __aicore__ inline void for_parts(Part part) const {
    for (int64_t at = 0; at < rows; at += tiling_.chunk_rows) {
      const int64_t left = rows - at;
      part(at, int32_t(left < tiling_.chunk_rows ? left : tiling_.chunk_rows));
    }
  }

  // Lanes that the vector unit has written.
  __aicore__ inline void write_scales(const ScaleWriter<type>& writer, const LocalTensor<float>& lanes) const {
    const LocalTensor<int32_t> from = lanes.template ReinterpretCast<int32_t>(),
                               to = blocks_.template ReinterpretCast<int32_t>();
    hand_over<HardEvent::V_S>(*pipe_);
    hand_over<HardEvent::MTE3_S>(*pipe_);
    for (int32_t i = 0; i < size; ++i) to.SetValue(uint32_t(i * kScaleStep), from.GetValue(uint32_t(i)));
    hand_over<HardEvent::S_MTE3>(*pipe_);
    hand_over<HardEvent::S_V>(*pipe_);
    writer.write(blocks_, band * tiling_.across + begin, size);
  }
  __aicore__ inline void read_scales(const ScaleReader<type>& reader, const LocalTensor<float>& lanes,
                                     const LocalTensor<float>& work) const {
    const LocalTensor<int32_t> from = blocks_.template ReinterpretCast<int32_t>(),
                               to = lanes.template ReinterpretCast<int32_t>();
    Duplicate(to, 0, tiling_.pieces);
    hand_over<HardEvent::V_S>(*pipe_);
    hand_over<HardEvent::S_MTE2>(*pipe_);
    reader.read(blocks_, band * tiling_.across + begin, size);
    hand_over<HardEvent::MTE2_S>(*pipe_);
    for (int32_t i = 0; i < size; ++i) to.SetValue(uint32_t(i), from.GetValue(uint32_t(i * kScaleStep)));
    hand_over<HardEvent::S_V>(*pipe_);
    to_floats<type>(lanes, work, tiling_.pieces);
  }

  int64_t band = 0, begin = 0, row = 0, rows = 0;  // the first column; the first row, of all matrices
  int32_t size = 0;                                // columns

 private:
  const QuantTiling& tiling_;
  int64_t across_;
  TPipe* pipe_ = nullptr;
  TBuf<TPosition::VECCALC> buffer_;
  LocalTensor<float> blocks_;
};

template <typename C>
class QuantizeColumns {
  using T = Element<C::dtype>;
  static constexpr Code kCode = C::code;

 public:
  __aicore__ inline QuantizeColumns(GM_ADDR x, GM_ADDR codes, GM_ADDR scales, const QuantTiling& tiling)
      : tiling_(tiling), strips_(tiling) {
    x_.init(x, tiling.strided_bytes, tiling.matrices);
    codes_.init(codes, tiling.dense_bytes, code_bytes<kCode>(tiling.columns));
    if constexpr (C::given) reader_.init(scales, tiling.scale_bytes, tiling.scales);
    else writer_.init(pipe_, scales, tiling.scale_bytes, tiling.scales);
    strips_.init(pipe_);
    const uint32_t elements = uint32_t(tiling.chunk_rows * tiling.pitch), width = uint32_t(tiling.pitch);
    pipe_.InitBuffer(x_queue_, 2, elements * sizeof(T));
    pipe_.InitBuffer(code_queue_, 2, uint32_t(code_bytes<kCode>(int32_t(elements))));
    pipe_.InitBuffer(floats_, (3 * elements + 4 * width) * sizeof(float));
    values_ = floats_.template Get<float>();
    work_ = values_[elements];
    more_ = values_[2 * elements];
    amax_ = values_[3 * elements];
    bad_ = amax_[width];
    factors_ = amax_[2 * width];
    lanes_ = amax_[3 * width];
  }

  __aicore__ inline void run() {
    for (int64_t strip = GetBlockIdx(); strip < strips_.count(); strip += GetBlockNum()) {
      strips_.select(strip);
      if constexpr (C::given) read_factors();
      else make_factors();
      if (tiling_.coded) strips_.for_parts([&](int64_t at, int32_t rows) { write_codes(at, rows); });
    }
  }

 private:
  __aicore__ inline void take(int64_t at, int32_t rows) {
    LocalTensor<T> x = x_queue_.template AllocTensor<T>();
    const int64_t matrix = strips_.row / tiling_.rows, row = strips_.row % tiling_.rows + at;
    x_.read_block(x, matrix, row * tiling_.row_stride + strips_.begin, rows, tiling_.row_stride, strips_.size,
                  rows > 1 ? tiling_.pitch : whole_blocks<T>(strips_.size));
    x_queue_.EnQue(x);
    x = x_queue_.template DeQue<T>();
    Duplicate(values_, 0.0f, rows * tiling_.pitch);
    PipeBarrier<PIPE_V>();
    for (int32_t i = 0; i < rows; ++i) {
      const uint32_t begin = uint32_t(i * tiling_.pitch);
      widen(values_[begin], x[begin], whole_blocks<T>(strips_.size));
    }
    x_queue_.FreeTensor(x);
    PipeBarrier<PIPE_V>();
  }

  __aicore__ inline void make_factors() {
    const int32_t width = tiling_.pitch;
    Duplicate(amax_, 0.0f, 2 * width);
    PipeBarrier<PIPE_V>();
    strips_.for_parts([&](int64_t at, int32_t rows) {
      take(at, rows);
      Abs(work_, values_, rows * width);
      Muls(more_, values_, 0.0f, rows * width);
      PipeBarrier<PIPE_V>();
      for (int32_t i = 0; i < rows; ++i) {
        Max(amax_, amax_, work_[uint32_t(i * width)], width);
        Add(bad_, bad_, more_[uint32_t(i * width)], width);
        PipeBarrier<PIPE_V>();
      }
    });
    scales_of<kCode, C::scale>(amax_, bad_, factors_, lanes_, width);
    Add(factors_, factors_, bad_, width);  // NaN for a column without a scale
    PipeBarrier<PIPE_V>();
    strips_.write_scales(writer_, lanes_);
  }

  __aicore__ inline void read_factors() {
    strips_.read_scales(reader_, lanes_, bad_);
    Duplicate(amax_, 1.0f, tiling_.pitch);
    PipeBarrier<PIPE_V>();
    Div(factors_, amax_, lanes_, tiling_.pitch);
    PipeBarrier<PIPE_V>();
  }

  __aicore__ inline void write_codes(int64_t at, int32_t rows) {
    take(at, rows);
    for (int32_t i = 0; i < rows; ++i) {
      const LocalTensor<float> values = values_[uint32_t(i * tiling_.pitch)];
      Mul(values, values, factors_, tiling_.pitch);
    }
    PipeBarrier<PIPE_V>();
    LocalTensor<uint8_t> codes = code_queue_.template AllocTensor<uint8_t>();
    encode_any<kCode>(codes, values_, work_, more_, rows * tiling_.pitch);
    code_queue_.EnQue(codes);
    codes = code_queue_.template DeQue<uint8_t>();
    const int32_t size = code_bytes<kCode>(strips_.size);
    codes_.write_block(codes, strips_.row + at, code_bytes<kCode>(strips_.begin), rows,
                       code_bytes<kCode>(tiling_.columns), size,
                       rows > 1 ? code_bytes<kCode>(tiling_.pitch) : whole_blocks<uint8_t>(size));
    code_queue_.FreeTensor(codes);
  }

  const QuantTiling& tiling_;
  TPipe pipe_;
  ColumnStrips<C::scale> strips_;
  RowReader<T> x_;
  RowWriter<uint8_t> codes_;
  ScaleReader<C::scale> reader_;
  ScaleWriter<C::scale> writer_;
  TQue<TPosition::VECIN, 2> x_queue_;
  TQue<TPosition::VECOUT, 2> code_queue_;
  TBuf<TPosition::VECCALC> floats_;
  LocalTensor<float> values_, work_, more_, amax_, bad_, factors_, lanes_;
};

template <typename C>
class DequantizeColumns {
  using T = Element<C::dtype>;
  static constexpr Code kCode = C::code;

 public:
  __aicore__ inline DequantizeColumns(GM_ADDR codes, GM_ADDR scales, GM_ADDR out, const QuantTiling& tiling)
      : tiling_(tiling), strips_(tiling) {
    codes_.init(codes, tiling.strided_bytes, tiling.matrices);
    out_.init(out, tiling.dense_bytes, tiling.columns);
    reader_.init(scales, tiling.scale_bytes, tiling.scales);
    strips_.init(pipe_);
    const uint32_t elements = uint32_t(tiling.chunk_rows * tiling.pitch), width = uint32_t(tiling.pitch);
    pipe_.InitBuffer(code_queue_, 2, uint32_t(code_bytes<kCode>(int32_t(elements))));
    pipe_.InitBuffer(out_queue_, 2, elements * sizeof(T));
    pipe_.InitBuffer(floats_, (3 * elements + 2 * width) * sizeof(float));
    values_ = floats_.template Get<float>();
    work_ = values_[elements];
    more_ = values_[2 * elements];
    factors_ = values_[3 * elements];
    spare_ = factors_[width];
  }

  __aicore__ inline void run() {
    for (int64_t strip = GetBlockIdx(); strip < strips_.count(); strip += GetBlockNum()) {
      strips_.select(strip);
      strips_.read_scales(reader_, factors_, spare_);
      strips_.for_parts([&](int64_t at, int32_t rows) { turn_back(at, rows); });
    }
  }

 private:
  __aicore__ inline void turn_back(int64_t at, int32_t rows) {
    const int32_t pitch = tiling_.pitch, bytes = code_bytes<kCode>(pitch), size = code_bytes<kCode>(strips_.size);
    const int32_t row_bytes = whole_blocks<uint8_t>(size), row_codes = kCode == Code::e2m1 ? 2 * row_bytes : row_bytes;
    LocalTensor<uint8_t> codes = code_queue_.template AllocTensor<uint8_t>();
    const int64_t matrix = strips_.row / tiling_.rows, row = strips_.row % tiling_.rows + at;
    codes_.read_block(codes, matrix, row * tiling_.row_stride + code_bytes<kCode>(strips_.begin), rows,
                      tiling_.row_stride, size, rows > 1 ? bytes : row_bytes);
    code_queue_.EnQue(codes);
    codes = code_queue_.template DeQue<uint8_t>();
    Duplicate(values_, 0.0f, rows * pitch);
    PipeBarrier<PIPE_V>();
    for (int32_t i = 0; i < rows; ++i) {
      const uint32_t begin = uint32_t(i * pitch);
      decode<kCode>(values_[begin], codes[uint32_t(i * bytes)], work_[begin], more_[begin], row_codes);
    }
    code_queue_.FreeTensor(codes);
    for (int32_t i = 0; i < rows; ++i) {
      const LocalTensor<float> values = values_[uint32_t(i * pitch)];
      Mul(values, values, factors_, pitch);
    }
    PipeBarrier<PIPE_V>();
    LocalTensor<T> out = out_queue_.template AllocTensor<T>();
    narrow(out, values_, rows * pitch);
    PipeBarrier<PIPE_V>();
    out_queue_.EnQue(out);
    out = out_queue_.template DeQue<T>();
    out_.write_block(out, strips_.row + at, strips_.begin, rows, tiling_.columns, strips_.size,
                     rows > 1 ? pitch : whole_blocks<T>(strips_.size));
    out_queue_.FreeTensor(out);
  }

  const QuantTiling& tiling_;
  TPipe pipe_;
  ColumnStrips<C::scale> strips_;
  RowReader<uint8_t> codes_;
  RowWriter<T> out_;
  ScaleReader<C::scale> reader_;
  TQue<TPosition::VECIN, 2> code_queue_;
  TQue<TPosition::VECOUT, 2> out_queue_;
  TBuf<TPosition::VECCALC> floats_;
  LocalTensor<float> values_, work_, more_, factors_, spare_;
};

template <typename Config>
__aicore__ inline void quantize_columns(GM_ADDR x, GM_ADDR codes, GM_ADDR scales, const QuantTiling& tiling) {
  QuantizeColumns<Config> kernel(x, codes, scales, tiling);
  kernel.run();
}

template <typename Config>
__aicore__ inline void dequantize_columns(GM_ADDR codes, GM_ADDR scales, GM_ADDR out, const QuantTiling& tiling) {
  DequantizeColumns<Config> kernel(codes, scales, out, tiling);
  kernel.run();
}

}  // namespace deepinfer::npu
