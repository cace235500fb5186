// What is left of a matrix product after its sums: scale, bias and addend, rounded once. Vector cores take tiles of the
// result in turn; while one is worked on, the copies of the next run. Bound by memory: the sums are read and were written.
//
// Config: `out` (DType, also of bias and addend), `sums`, `bias`, `addend` (int: whether there are any).
#pragma once

#include "gemm_tiling.h"
#include "rows.h"

namespace deepinfer::npu {

template <typename C>
class GemmFinish {
  using Out = Element<C::out>;
  static constexpr bool kSums = C::sums != 0, kBias = C::bias != 0, kAdds = C::addend != 0;

 public:
  __aicore__ inline GemmFinish(GM_ADDR sums, GM_ADDR bias, GM_ADDR addend, GM_ADDR out, const GemmFinishTiling& tiling)
      : tiling_(tiling) {
    row_tiles_ = (tiling.rows + tiling.tile_rows - 1) / tiling.tile_rows;
    tiles_ = row_tiles_ * ((tiling.columns + tiling.chunk - 1) / tiling.chunk);
    const uint32_t elements = uint32_t(tiling.tile_rows * tiling.pitch), row = uint32_t(tiling.pitch);
    out_.init(out, tiling.out_bytes, tiling.out_stride);
    pipe_.InitBuffer(out_queue_, 2, elements * sizeof(Out));
    pipe_.InitBuffer(values_buffer_, elements * sizeof(float));
    values_ = values_buffer_.template Get<float>();
    if constexpr (kSums) {
      sum_rows_ = rows(tiling.columns);
      sums_.init(sums, tiling.sum_bytes, sum_rows_);
      pipe_.InitBuffer(sum_queue_, 2, elements * sizeof(float));
    }
    if constexpr (kBias) {
      bias_row_ = rows(tiling.columns);
      bias_.init(bias, tiling.bias_bytes, bias_row_);
      pipe_.InitBuffer(bias_queue_, 1, row * sizeof(Out));
      pipe_.InitBuffer(bias_buffer_, row * sizeof(float));
      bias_values_ = bias_buffer_.template Get<float>();
    }
    if constexpr (kAdds) {
      addend_rows_ = rows(tiling.addend_stride);
      addend_.init(addend, tiling.addend_bytes, addend_rows_);
      pipe_.InitBuffer(addend_queue_, 2, elements * sizeof(Out));
      pipe_.InitBuffer(terms_buffer_, elements * sizeof(float));
      terms_ = terms_buffer_.template Get<float>();
    }
  }

  __aicore__ inline void run() {
    int64_t tile = GetBlockIdx();
    if (tile < tiles_) load(tile);
    for (; tile < tiles_; tile += GetBlockNum()) {
      if (tile + GetBlockNum() < tiles_) load(tile + GetBlockNum());
      finish(tile);
    }
  }

 private:
  static __aicore__ inline Rows rows(int64_t stride) {
    Rows rows;
    rows.dims = 1;
    rows.sizes[0] = int64_t(1) << 40;  // the reader asks no more than the strides of it
    rows.strides[0] = stride;
    return rows;
  }

  // Columns change last: the tiles of neighbours share the bias.
  __aicore__ inline int64_t row_of(int64_t tile) const { return tile % row_tiles_ * tiling_.tile_rows; }
  __aicore__ inline int64_t column_of(int64_t tile) const { return tile / row_tiles_ * tiling_.chunk; }
  __aicore__ inline int32_t rows_of(int64_t tile) const {
    const int64_t left = tiling_.rows - row_of(tile);
    return left < tiling_.tile_rows ? int32_t(left) : tiling_.tile_rows;
  }
  __aicore__ inline int32_t columns_of(int64_t tile) const {
    const int64_t left = tiling_.columns - column_of(tile);
    return left < tiling_.chunk ? int32_t(left) : tiling_.chunk;
  }

  __aicore__ inline void load(int64_t tile) {
    if constexpr (kSums) {
      const LocalTensor<float> sums = sum_queue_.template AllocTensor<float>();
      sums_.read(sums, row_of(tile), rows_of(tile), column_of(tile), columns_of(tile), tiling_.pitch);
      sum_queue_.EnQue(sums);
    }
    if constexpr (kAdds) {
      const LocalTensor<Out> addend = addend_queue_.template AllocTensor<Out>();
      addend_.read(addend, row_of(tile), rows_of(tile), column_of(tile), columns_of(tile), tiling_.pitch);
      addend_queue_.EnQue(addend);
    }
  }

  __aicore__ inline LocalTensor<float> row(const LocalTensor<float>& values, int32_t i) const {
    return values[uint32_t(i * tiling_.pitch)];
  }

  __aicore__ inline void load_bias(int64_t tile) {
    const int32_t size = columns_of(tile);
    LocalTensor<Out> raw = bias_queue_.template AllocTensor<Out>();
    bias_.read(raw, 0, 1, column_of(tile), size, tiling_.pitch);
    bias_queue_.EnQue(raw);
    raw = bias_queue_.template DeQue<Out>();
    widen(bias_values_, raw, size);
    bias_queue_.FreeTensor(raw);
    PipeBarrier<PIPE_V>();
  }

  __aicore__ inline void finish(int64_t tile) {
    const int32_t count = rows_of(tile), size = columns_of(tile);
    if constexpr (kSums) {
      LocalTensor<float> sums = sum_queue_.template DeQue<float>();
      for (int32_t i = 0; i < count; ++i) Muls(row(values_, i), row(sums, i), tiling_.scale, size);
      sum_queue_.FreeTensor(sums);
    } else {
      Duplicate(values_, 0.0f, count * tiling_.pitch);
    }
    PipeBarrier<PIPE_V>();
    if constexpr (kBias) {
      load_bias(tile);
      for (int32_t i = 0; i < count; ++i) Add(row(values_, i), row(values_, i), bias_values_, size);
      PipeBarrier<PIPE_V>();
    }
    if constexpr (kAdds) {
      LocalTensor<Out> addend = addend_queue_.template DeQue<Out>();
      for (int32_t i = 0; i < count; ++i) widen(row(terms_, i), addend[uint32_t(i * tiling_.pitch)], size);
      addend_queue_.FreeTensor(addend);
      PipeBarrier<PIPE_V>();
      for (int32_t i = 0; i < count; ++i) Add(row(values_, i), row(values_, i), row(terms_, i), size);
      PipeBarrier<PIPE_V>();
    }
    LocalTensor<Out> out = out_queue_.template AllocTensor<Out>();
    for (int32_t i = 0; i < count; ++i) narrow(out[uint32_t(i * tiling_.pitch)], row(values_, i), size);
    out_queue_.EnQue(out);
    out = out_queue_.template DeQue<Out>();
    out_.write(out, row_of(tile), count, column_of(tile), size, tiling_.pitch);
    out_queue_.FreeTensor(out);
    PipeBarrier<PIPE_V>();
  }

  const GemmFinishTiling& tiling_;
  TPipe pipe_;
  Rows sum_rows_, bias_row_, addend_rows_;
  RowReader<float> sums_;
  RowReader<Out> bias_, addend_;
  RowWriter<Out> out_;
  TQue<TPosition::VECIN, 2> sum_queue_, addend_queue_;
  TQue<TPosition::VECIN, 1> bias_queue_;
  TQue<TPosition::VECOUT, 2> out_queue_;
  TBuf<TPosition::VECCALC> values_buffer_, terms_buffer_, bias_buffer_;
  LocalTensor<float> values_, terms_, bias_values_;
  int64_t row_tiles_, tiles_;
};

template <typename Config>
__aicore__ inline void gemm_finish(GM_ADDR sums, GM_ADDR bias, GM_ADDR addend, GM_ADDR out,
                                   const GemmFinishTiling& tiling) {
  GemmFinish<Config> kernel(sums, bias, addend, out, tiling);
  kernel.run();
}

}  // namespace deepinfer::npu
