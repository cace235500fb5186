// Codes back to values: blocks are dealt to the cores in tiles, or in chunks if one does not fit. The scales go through
// the scalar unit. Blocks of one column are another kernel's (quant_columns_kernel.h). Bound by memory, or for small
// blocks by the number of vector instructions, about three a block.
//
// Config: `dtype` (DType), `code` (Code), `scale` (ScaleType).
#pragma once

#include "quant_blocks.h"

namespace deepinfer::npu {

template <typename C>
class Dequantize {
  using T = Element<C::dtype>;
  static constexpr Code kCode = C::code;

 public:
  __aicore__ inline Dequantize(GM_ADDR codes, GM_ADDR scales, GM_ADDR out, const QuantTiling& tiling)
      : tiling_(tiling), blocks_(tiling) {
    codes_.init(codes, tiling.strided_bytes, tiling.matrices);
    out_.init(out, tiling.dense_bytes, tiling.columns);
    scales_.init(pipe_, scales, tiling.scale_bytes, tiling.scales, tiling.pieces);
    piece_ = tiling.chunk_rows * tiling.pitch;
    const uint32_t elements = uint32_t(tiling.pieces * piece_);
    pipe_.InitBuffer(code_queue_, 2, uint32_t(code_bytes<kCode>(int32_t(elements))));
    pipe_.InitBuffer(out_queue_, 2, elements * sizeof(T));
    pipe_.InitBuffer(values_buffer_, elements * sizeof(float));
    pipe_.InitBuffer(work_buffer_, elements * sizeof(float));
    values_ = values_buffer_.template Get<float>();
    work_ = work_buffer_.template Get<float>();
    if constexpr (kCode == Code::e2m1) {
      pipe_.InitBuffer(more_buffer_, elements * sizeof(float));
      more_ = more_buffer_.template Get<float>();
    }
  }

  __aicore__ inline void run() {
    blocks_.for_tiles([&](int64_t first, int32_t count) { load(first, count); },
                      [&](int64_t first, int32_t count) { whole_blocks_of(first, count); },
                      [&](int64_t block) { large_block(block); });
  }

 private:
  // Strides of the codes are in bytes.
  __aicore__ inline void read(const LocalTensor<uint8_t>& to, const Run& run) const {
    const int32_t size = code_bytes<kCode>(int32_t(run.size));
    codes_.read_block(to, run.matrix, run.row * tiling_.row_stride + code_bytes<kCode>(run.begin), run.rows,
                      run.side_by_side ? code_bytes<kCode>(tiling_.block_columns) : tiling_.row_stride, size,
                      run.rows > 1 ? code_bytes<kCode>(tiling_.pitch) : whole_blocks<uint8_t>(size));
  }

  __aicore__ inline void load(int64_t first, int32_t count) {
    const LocalTensor<uint8_t> codes = code_queue_.template AllocTensor<uint8_t>();
    blocks_.for_runs(first, count, [&](const Run& run) {
      read(codes[uint32_t(code_bytes<kCode>(run.piece * piece_))], run);
    });
    code_queue_.EnQue(codes);
  }

  // In one instruction if the rows leave no gap.
  __aicore__ inline void decode_rows(const LocalTensor<uint8_t>& codes, const Run& run) {
    const int32_t at = run.piece * piece_, size = whole_blocks<uint8_t>(code_bytes<kCode>(int32_t(run.size)));
    const int32_t pitch = code_bytes<kCode>(tiling_.pitch), row = kCode == Code::e2m1 ? 2 * size : size;
    const bool together = run.rows == 1 || size == pitch;
    for (int32_t i = 0; i < (together ? 1 : run.rows); ++i) {
      const uint32_t from = uint32_t(at + i * tiling_.pitch);
      decode<kCode>(values_[from], codes[uint32_t(code_bytes<kCode>(int32_t(from)))], work_[from], more_at(from),
                    together ? int32_t(run.rows) * row : row);
    }
  }
  __aicore__ inline LocalTensor<float> more_at(uint32_t element) const {
    if constexpr (kCode == Code::e2m1) return more_[element];
    else return more_;
  }

  __aicore__ inline void write(const LocalTensor<T>& out, const Run& run) const {
    out_.write_block(out[uint32_t(run.piece * piece_)], run.matrix * tiling_.rows + run.row, run.begin, run.rows,
                     run.side_by_side ? tiling_.block_columns : tiling_.columns, run.size,
                     run.rows > 1 ? tiling_.pitch : whole_blocks<T>(run.size));
  }

  __aicore__ inline void whole_blocks_of(int64_t first, int32_t count) {
    const int32_t elements = count * piece_;
    LocalTensor<uint8_t> codes = code_queue_.template DeQue<uint8_t>();
    Duplicate(values_, 0.0f, elements);
    PipeBarrier<PIPE_V>();
    blocks_.for_runs(first, count, [&](const Run& run) { decode_rows(codes, run); });
    code_queue_.FreeTensor(codes);
    scales_.read(first, count);
    for (int32_t piece = 0; piece < count; ++piece) {
      const LocalTensor<float> values = values_[uint32_t(piece * piece_)];
      Muls(values, values, scales_.factor(piece), piece_);
    }
    scales_.end();
    PipeBarrier<PIPE_V>();
    LocalTensor<T> out = out_queue_.template AllocTensor<T>();
    narrow(out, values_, elements);
    PipeBarrier<PIPE_V>();
    out_queue_.EnQue(out);
    out = out_queue_.template DeQue<T>();
    blocks_.for_runs(first, count, [&](const Run& run) { write(out, run); });
    out_queue_.FreeTensor(out);
  }

  __aicore__ inline void large_block(int64_t block) {
    scales_.read(block, 1);
    blocks_.for_parts(block, [&](const Run& part) {
      LocalTensor<uint8_t> codes = code_queue_.template AllocTensor<uint8_t>();
      read(codes, part);
      code_queue_.EnQue(codes);
      codes = code_queue_.template DeQue<uint8_t>();
      const int32_t elements = part.rows > 1 ? int32_t(part.rows) * tiling_.pitch : whole_blocks<T>(part.size);
      Duplicate(values_, 0.0f, elements);
      PipeBarrier<PIPE_V>();
      decode_rows(codes, part);
      code_queue_.FreeTensor(codes);
      Muls(values_, values_, scales_.factor(0), elements);
      PipeBarrier<PIPE_V>();
      LocalTensor<T> out = out_queue_.template AllocTensor<T>();
      narrow(out, values_, elements);
      PipeBarrier<PIPE_V>();
      out_queue_.EnQue(out);
      out = out_queue_.template DeQue<T>();
      write(out, part);
      out_queue_.FreeTensor(out);
    });
    scales_.end();
  }

  const QuantTiling& tiling_;
  BlockWalk blocks_;
  int32_t piece_;  // elements from block to block on the core
  TPipe pipe_;
  RowReader<uint8_t> codes_;
  RowWriter<T> out_;
  GivenScales<C::scale, false> scales_;
  TQue<TPosition::VECIN, 2> code_queue_;
  TQue<TPosition::VECOUT, 2> out_queue_;
  TBuf<TPosition::VECCALC> values_buffer_, work_buffer_, more_buffer_;
  LocalTensor<float> values_, work_, more_;
};

template <typename Config>
__aicore__ inline void dequantize(GM_ADDR codes, GM_ADDR scales, GM_ADDR out, const QuantTiling& tiling) {
  Dequantize<Config> kernel(codes, scales, out, tiling);
  kernel.run();
}

}  // namespace deepinfer::npu
