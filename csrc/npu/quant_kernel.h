// Quantisation in blocks of neighbours that share a scale. Blocks are dealt to the cores in tiles; one that does not fit
// is read twice, in chunks. Blocks of one column are another kernel's (quant_columns_kernel.h).
//
// Every scale has a block of 32 bytes on the core and is copied by itself, so that all layouts are one. Bound by the
// number of vector instructions: see quantizer.h.
//
// Config: `dtype` (DType), `code` (Code), `scale` (ScaleType), `given` (int): the scales are read.
#pragma once

#include "quant_blocks.h"

namespace deepinfer::npu {

template <typename C>
class Quantize {
  using T = Element<C::dtype>;
  static constexpr Code kCode = C::code;
  static constexpr bool kGiven = C::given != 0, kMore = kGiven || kCode == Code::e2m1;
  static constexpr int32_t kAlignment = code_alignment(kCode);

 public:
  __aicore__ inline Quantize(GM_ADDR x, GM_ADDR codes, GM_ADDR scales, const QuantTiling& tiling)
      : tiling_(tiling), blocks_(tiling) {
    x_.init(x, tiling.strided_bytes, tiling.matrices);
    codes_.init(codes, tiling.dense_bytes, code_bytes<kCode>(tiling.columns));
    if constexpr (kGiven) given_.init(pipe_, scales, tiling.scale_bytes, tiling.scales, tiling.pieces);
    else quantizer_.init(pipe_, scales, tiling.scale_bytes, tiling.scales, tiling.pieces);
    piece_ = tiling.chunk_rows * tiling.pitch;
    const uint32_t elements = uint32_t(tiling.pieces * piece_);
    pipe_.InitBuffer(x_queue_, 2, elements * sizeof(T));
    pipe_.InitBuffer(code_queue_, 2, uint32_t(code_bytes<kCode>(int32_t(elements))));
    pipe_.InitBuffer(values_buffer_, elements * sizeof(float));
    pipe_.InitBuffer(work_buffer_, elements * sizeof(float));
    values_ = values_buffer_.template Get<float>();
    work_ = work_buffer_.template Get<float>();
    if constexpr (kMore) {
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
  __aicore__ inline void read(const LocalTensor<T>& to, const Run& run) const {
    x_.read_block(to, run.matrix, run.row * tiling_.row_stride + run.begin, run.rows,
                  run.side_by_side ? tiling_.block_columns : tiling_.row_stride, run.size,
                  run.rows > 1 ? tiling_.pitch : whole_blocks<T>(run.size));
  }

  __aicore__ inline void load(int64_t first, int32_t count) {
    const LocalTensor<T> x = x_queue_.template AllocTensor<T>();
    blocks_.for_runs(first, count, [&](const Run& run) {
      read(x[uint32_t(run.piece * piece_)], run);
    });
    x_queue_.EnQue(x);
  }

  __aicore__ inline void whole_blocks_of(int64_t first, int32_t count) {
    const int32_t elements = count * piece_;
    LocalTensor<T> x = x_queue_.template DeQue<T>();
    if (!blocks_.fill_tiles()) {
      Duplicate(values_, 0.0f, elements);
      PipeBarrier<PIPE_V>();
    }
    blocks_.for_runs(first, count, [&](const Run& run) {
      const uint32_t at = uint32_t(run.piece * piece_);
      widen_rows(values_[at], x[at], run.rows, run.size, tiling_.pitch);
    });
    x_queue_.FreeTensor(x);
    PipeBarrier<PIPE_V>();
    if constexpr (kGiven) {
      given_.read(first, count);
    } else {
      quantizer_.measure_all(values_, work_, count, piece_);
      quantizer_.make_scales(first, count);
    }
    if (!tiling_.coded) {
      if constexpr (!kGiven) quantizer_.end();
      return;
    }
    if constexpr (kGiven) {
      for (int32_t piece = 0; piece < count; ++piece) scale(values_[uint32_t(piece * piece_)], piece, piece_);
    } else {
      quantizer_.scale_all(values_, count, piece_);
    }
    LocalTensor<uint8_t> codes = code_queue_.template AllocTensor<uint8_t>();
    make_codes(codes, elements);
    if constexpr (!kGiven) quantizer_.spoil_all(codes, count, code_bytes<kCode>(piece_));
    end();
    code_queue_.EnQue(codes);
    codes = code_queue_.template DeQue<uint8_t>();
    blocks_.for_runs(first, count, [&](const Run& run) { store(codes, run, piece_); });
    code_queue_.FreeTensor(codes);
  }

  __aicore__ inline void store(const LocalTensor<uint8_t>& codes, const Run& run, int32_t piece) {
    const int32_t size = code_bytes<kCode>(int32_t(run.size)), pitch = code_bytes<kCode>(tiling_.pitch);
    const LocalTensor<uint8_t> from = codes[uint32_t(code_bytes<kCode>(run.piece * piece))];
    const int64_t stride = run.side_by_side ? tiling_.block_columns : tiling_.columns;
    codes_.write_block(from, run.matrix * tiling_.rows + run.row, code_bytes<kCode>(run.begin), run.rows,
                       code_bytes<kCode>(stride), size, run.rows > 1 ? pitch : whole_blocks<uint8_t>(size));
  }

  __aicore__ inline void scale(const LocalTensor<float>& values, int32_t piece, int32_t size) {
    if constexpr (kGiven) Muls(values, values, given_.factor(piece), size);
    else quantizer_.scale(values, piece, size);
  }
  __aicore__ inline void make_codes(const LocalTensor<uint8_t>& codes, int32_t elements) {
    PipeBarrier<PIPE_V>();
    if constexpr (kGiven) encode_any<kCode>(codes, values_, work_, more_, elements);
    else encode<kCode>(codes, values_, work_, more_, elements);
  }
  __aicore__ inline void end() {
    if constexpr (kGiven) given_.end();
    else quantizer_.end();
  }

  // ---- a block in chunks ----

  // A part into values_; what is left of the last whole blocks of codes is zero. Returns its elements on the core.
  __aicore__ inline int32_t take(const Run& part) {
    LocalTensor<T> x = x_queue_.template AllocTensor<T>();
    read(x, part);
    x_queue_.EnQue(x);
    x = x_queue_.template DeQue<T>();
    const int32_t whole = (int32_t(part.size) + kAlignment - 1) / kAlignment * kAlignment;
    const int32_t pitch = part.rows > 1 ? tiling_.pitch : whole;
    const int32_t elements = int32_t(part.rows) * pitch;
    Duplicate(values_, 0.0f, elements);
    PipeBarrier<PIPE_V>();
    widen_rows(values_, x, part.rows, part.size, tiling_.pitch);
    x_queue_.FreeTensor(x);
    PipeBarrier<PIPE_V>();
    return elements;
  }

  __aicore__ inline void large_block(int64_t block) {
    if constexpr (kGiven) {
      given_.read(block, 1);
    } else {
      quantizer_.begin();
      quantizer_.begin_group();
      blocks_.for_parts(block, [&](const Run& part) {
        const int32_t elements = take(part);
        quantizer_.add(values_, work_, elements);
      });
      quantizer_.end_group(work_, 0);
      quantizer_.make_scales(block, 1);
    }
    if (tiling_.coded) {
      blocks_.for_parts(block, [&](const Run& part) {
        const int32_t elements = take(part);
        scale(values_, 0, elements);
        LocalTensor<uint8_t> codes = code_queue_.template AllocTensor<uint8_t>();
        make_codes(codes, elements);
        if constexpr (!kGiven) quantizer_.spoil(codes, 0, code_bytes<kCode>(elements));
        code_queue_.EnQue(codes);
        codes = code_queue_.template DeQue<uint8_t>();
        store(codes, part, 0);
        code_queue_.FreeTensor(codes);
      });
    }
    end();
  }

  const QuantTiling& tiling_;
  BlockWalk blocks_;
  int32_t piece_;  // elements from block to block on the core
  TPipe pipe_;
  RowReader<T> x_;
  RowWriter<uint8_t> codes_;
  Quantizer<kCode, C::scale> quantizer_;
  GivenScales<C::scale, true> given_;
  TQue<TPosition::VECIN, 2> x_queue_;
  TQue<TPosition::VECOUT, 2> code_queue_;
  TBuf<TPosition::VECCALC> values_buffer_, work_buffer_, more_buffer_;
  LocalTensor<float> values_, work_, more_;
};

template <typename Config>
__aicore__ inline void quantize(GM_ADDR x, GM_ADDR codes, GM_ADDR scales, const QuantTiling& tiling) {
  Quantize<Config> kernel(x, codes, scales, tiling);
  kernel.run();
}

}  // namespace deepinfer::npu
