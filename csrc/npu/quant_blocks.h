// How blocks lie in their matrices and on the core. Include from kernel files only.
#pragma once

#include "quant_tiling.h"
#include "quantizer.h"

namespace deepinfer::npu {

// Rows of a block from element (row, begin) of a matrix on, or blocks side by side in one row. On the core they start at
// block `piece` of the tile.
struct Run {
  int64_t matrix, row, begin, rows, size;
  int32_t piece;
  bool side_by_side;
};

class BlockWalk {
 public:
  __aicore__ inline BlockWalk(const QuantTiling& tiling) : tiling_(tiling) {}

  __aicore__ inline int64_t count() const { return tiling_.matrices.count * tiling_.down * tiling_.across; }

  // Whether the blocks of a tile leave no gap: none is shorter than another, nor than its rows are on the core.
  __aicore__ inline bool fill_tiles() const {
    return tiling_.pitch == tiling_.block_columns && tiling_.columns % tiling_.block_columns == 0 &&
           tiling_.rows % tiling_.block_rows == 0;
  }

  // The tiles of a core: load(first, count) fetches a tile ahead of work(first, count), which does one. Blocks that do not
  // fit are done one by one, by large(block).
  template <typename Load, typename Work, typename Large>
  __aicore__ inline void for_tiles(Load load, Work work, Large large) const {
    const int64_t blocks = count(), stride = GetBlockNum() * tiling_.pieces;
    if (tiling_.chunk < tiling_.block_columns || tiling_.chunk_rows < tiling_.block_rows) {
      for (int64_t block = GetBlockIdx(); block < blocks; block += GetBlockNum()) large(block);
      return;
    }
    int64_t first = GetBlockIdx() * tiling_.pieces;
    if (first < blocks) load(first, pieces_at(first));
    for (; first < blocks; first += stride) {
      if (first + stride < blocks) load(first + stride, pieces_at(first + stride));
      work(first, pieces_at(first));
    }
  }

  // Calls move(run) for the blocks [first, first + count). Blocks of a single row that lie on the core as they do in it are
  // one piece, others of one row and one size are a run.
  template <typename Move>
  __aicore__ inline void for_runs(int64_t first, int32_t count, Move move) const {
    const bool dense = tiling_.pitch == tiling_.block_columns;
    for (int32_t piece = 0; piece < count;) {
      Run run = whole(first + piece);
      run.piece = piece;
      int32_t blocks = 1;
      if (tiling_.block_rows == 1) {
        const int64_t left = tiling_.across - run.begin / tiling_.block_columns;
        blocks = left < count - piece ? int32_t(left) : count - piece;
        const int64_t last = size_at(run.begin + (blocks - 1) * tiling_.block_columns);
        if (dense) {
          run.size = (blocks - 1) * tiling_.block_columns + last;
        } else {
          if (blocks > 1 && last < tiling_.block_columns) --blocks;
          run.rows = blocks;
          run.side_by_side = true;
        }
      }
      move(run);
      piece += blocks;
    }
  }

  // Calls move(part) for the chunks of a block, each of which starts at the first byte on the core.
  template <typename Move>
  __aicore__ inline void for_parts(int64_t block, Move move) const {
    const Run all = whole(block);
    for (int64_t row = 0; row < all.rows; row += tiling_.chunk_rows)
      for (int64_t begin = 0; begin < all.size; begin += tiling_.chunk) {
        Run part = all;
        part.row += row;
        part.begin += begin;
        part.rows = all.rows - row < tiling_.chunk_rows ? all.rows - row : tiling_.chunk_rows;
        part.size = all.size - begin < tiling_.chunk ? all.size - begin : tiling_.chunk;
        move(part);
      }
  }

 private:
  __aicore__ inline int32_t pieces_at(int64_t first) const {
    const int64_t left = count() - first;
    return left < tiling_.pieces ? int32_t(left) : tiling_.pieces;
  }
  __aicore__ inline int64_t size_at(int64_t column) const {
    const int64_t left = tiling_.columns - column;
    return left < tiling_.block_columns ? left : tiling_.block_columns;
  }
  __aicore__ inline Run whole(int64_t block) const {
    Run run;
    const int64_t band = block / tiling_.across;
    run.matrix = band / tiling_.down;
    run.row = band % tiling_.down * tiling_.block_rows;
    run.begin = block % tiling_.across * tiling_.block_columns;
    run.side_by_side = false;
    run.piece = 0;
    const int64_t rows = tiling_.rows - run.row;
    run.rows = rows < tiling_.block_rows ? rows : tiling_.block_rows;
    run.size = size_at(run.begin);
    return run;
  }

  const QuantTiling& tiling_;
};

// Rows of `size` elements to float, in one instruction if they leave no gap.
template <typename T>
__aicore__ inline void widen_rows(const LocalTensor<float>& to, const LocalTensor<T>& from, int64_t rows, int32_t size,
                                  int32_t pitch) {
  if (size == pitch) {
    widen(to, from, int32_t(rows) * pitch);
  } else {
    for (int32_t i = 0; i < rows; ++i)
      widen(to[uint32_t(i * pitch)], from[uint32_t(i * pitch)], whole_blocks<T>(size));
  }
}

// The scales of a tile, read: what turns values into codes, or codes into values.
template <ScaleType type, bool inverse>
class GivenScales {
 public:
  __aicore__ inline void init(TPipe& pipe, GM_ADDR scales, int64_t bytes, const Scales& layout, int32_t blocks) {
    pipe_ = &pipe;
    reader_.init(scales, bytes, layout);
    const uint32_t floats = uint32_t(blocks * kScaleStep);
    pipe.InitBuffer(buffer_, 2 * floats * sizeof(float));
    factors_ = buffer_.template Get<float>();
    work_ = factors_[floats];
  }

  __aicore__ inline void read(int64_t first, int32_t count) const {
    const int32_t n = count * kScaleStep;
    hand_over<HardEvent::V_MTE2>(*pipe_);
    reader_.read(factors_, first, count);
    hand_over<HardEvent::MTE2_V>(*pipe_);
    to_floats<type>(factors_, work_, n);
    if constexpr (inverse) {
      Duplicate(work_, 1.0f, n);
      PipeBarrier<PIPE_V>();
      Div(factors_, work_, factors_, n);
    }
    hand_over<HardEvent::V_S>(*pipe_);
    if constexpr (!inverse && !is_exponent(type)) hand_over<HardEvent::MTE2_S>(*pipe_);
  }
  __aicore__ inline float factor(int32_t block) const { return factors_.GetValue(uint32_t(block * kScaleStep)); }
  // The factors have been read by the scalar unit.
  __aicore__ inline void end() const { hand_over<HardEvent::S_V>(*pipe_); }

 private:
  TPipe* pipe_ = nullptr;
  ScaleReader<type> reader_;
  TBuf<TPosition::VECCALC> buffer_;
  LocalTensor<float> factors_, work_;
};

}  // namespace deepinfer::npu
