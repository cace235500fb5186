// The matrix product, on cube cores. Tiles of the result are dealt to the cores; neighbours share the columns of b, so
// that these come out of the L2 cache for all but one.
//
// A chunk of both operands comes from global memory into L1 (MTE2, which makes fractals of rows), a step of it goes on
// into L0A and L0B (MTE1, which transposes fractals whose depth is not dense), the matrix unit adds its product to the
// sums in L0C, and the finished sums are rounded on their way out (Fixpipe). Each of these memories holds two stages, L0C
// only where it has room: while one is filled the other is used, in the order of flags alone. Sums run along the depth in
// order, whatever the tiles. Bound by the matrix unit for large tiles, by memory for few rows.
//
// Config: `x`, `out` (DType), `a_dense`, `b_dense` (int: whether k is the dense dimension).
#pragma once

#include "gemm_tiling.h"
#include "rows.h"

namespace deepinfer::npu {

// Two pipes that hand the stages of a memory to each other.
template <HardEvent filled, HardEvent emptied>
class Stages {
 public:
  __aicore__ inline void init(TPipe& pipe, int32_t count) {
    count_ = count;
    for (int32_t i = 0; i < count_; ++i) {
      filled_[i] = pipe.AllocEventID<filled>();
      emptied_[i] = pipe.AllocEventID<emptied>();
      SetFlag<emptied>(emptied_[i]);
    }
  }
  __aicore__ inline void finish(TPipe& pipe) {
    for (int32_t i = 0; i < count_; ++i) {
      WaitFlag<emptied>(emptied_[i]);
      pipe.ReleaseEventID<emptied>(emptied_[i]);
      pipe.ReleaseEventID<filled>(filled_[i]);
    }
  }

  // The stage that is filled next, until it is full.
  __aicore__ inline int32_t fill() {
    WaitFlag<emptied>(emptied_[next_full_]);
    return next_full_;
  }
  __aicore__ inline void full() {
    SetFlag<filled>(filled_[next_full_]);
    next_full_ = (next_full_ + 1) % count_;
  }
  // The stage that is used next, until it is empty.
  __aicore__ inline int32_t use() {
    WaitFlag<filled>(filled_[next_empty_]);
    return next_empty_;
  }
  __aicore__ inline void empty() {
    SetFlag<emptied>(emptied_[next_empty_]);
    next_empty_ = (next_empty_ + 1) % count_;
  }

 private:
  int8_t filled_[2], emptied_[2];
  int32_t count_ = 0, next_full_ = 0, next_empty_ = 0;
};

template <typename C>
class Gemm {
  using T = Element<C::x>;
  using Out = Element<C::out>;
  static constexpr int32_t kEdge = 16;                           // rows of a fractal
  static constexpr int32_t kDepth = kBlockBytes / sizeof(T);     // columns of a fractal
  static constexpr int32_t kFractal = kEdge * kDepth;
  static constexpr bool kDenseA = C::a_dense != 0, kDenseB = C::b_dense != 0;

  // What is in L1 at once: a part of the depth for one tile.
  struct Chunk {
    int64_t tile, begin;
  };

 public:
  __aicore__ inline Gemm(GM_ADDR a, GM_ADDR b, GM_ADDR out, const GemmTiling& tiling) : tiling_(tiling) {
    a_.SetGlobalBuffer((__gm__ T*)a, uint64_t(tiling.a_bytes) / sizeof(T));
    b_.SetGlobalBuffer((__gm__ T*)b, uint64_t(tiling.b_bytes) / sizeof(T));
    out_.SetGlobalBuffer((__gm__ Out*)out, uint64_t(tiling.out_bytes) / sizeof(Out));
    row_tiles_ = (tiling.rows + tiling.tile_rows - 1) / tiling.tile_rows;
    tiles_ = row_tiles_ * ((tiling.columns + tiling.tile_columns - 1) / tiling.tile_columns);
    const uint32_t m = uint32_t(tiling.tile_rows), n = uint32_t(tiling.tile_columns);
    a_chunk_ = m * uint32_t(tiling.chunk);
    b_chunk_ = n * uint32_t(tiling.chunk);
    a_step_ = m * uint32_t(tiling.step);
    b_step_ = n * uint32_t(tiling.step);
    sum_ = m * n;
    pipe_.InitBuffer(a1_buffer_, 2 * a_chunk_ * sizeof(T));
    pipe_.InitBuffer(b1_buffer_, 2 * b_chunk_ * sizeof(T));
    pipe_.InitBuffer(a2_buffer_, 2 * a_step_ * sizeof(T));
    pipe_.InitBuffer(b2_buffer_, 2 * b_step_ * sizeof(T));
    pipe_.InitBuffer(sum_buffer_, uint32_t(tiling.sums) * sum_ * sizeof(float));
    a1_ = a1_buffer_.template Get<T>();
    b1_ = b1_buffer_.template Get<T>();
    a2_ = a2_buffer_.template Get<T>();
    b2_ = b2_buffer_.template Get<T>();
    sums_ = sum_buffer_.template Get<float>();
    chunks_in_l1_.init(pipe_, 2);
    steps_in_l0_.init(pipe_, 2);
    sums_in_l0c_.init(pipe_, tiling.sums);
  }

  __aicore__ inline void run() {
    Chunk now{GetBlockIdx(), 0}, ahead = now;
    if (ahead.tile < tiles_) load(ahead);
    while (now.tile < tiles_) {
      ahead = after(now);
      if (ahead.tile < tiles_) load(ahead);
      multiply(now);
      now = ahead;
    }
    chunks_in_l1_.finish(pipe_);
    steps_in_l0_.finish(pipe_);
    sums_in_l0c_.finish(pipe_);
  }

 private:
  static __aicore__ inline int32_t ceil_div(int32_t a, int32_t b) { return (a + b - 1) / b; }
  static __aicore__ inline int32_t least(int64_t left, int32_t size) { return left < size ? int32_t(left) : size; }

  __aicore__ inline Chunk after(const Chunk& chunk) const {
    if (chunk.begin + tiling_.chunk < tiling_.depth) return {chunk.tile, chunk.begin + tiling_.chunk};
    return {chunk.tile + GetBlockNum(), 0};
  }
  __aicore__ inline int64_t row_of(int64_t tile) const { return tile % row_tiles_ * tiling_.tile_rows; }
  __aicore__ inline int64_t column_of(int64_t tile) const { return tile / row_tiles_ * tiling_.tile_columns; }
  __aicore__ inline int32_t rows_of(int64_t tile) const {
    return least(tiling_.rows - row_of(tile), tiling_.tile_rows);
  }
  __aicore__ inline int32_t columns_of(int64_t tile) const {
    return least(tiling_.columns - column_of(tile), tiling_.tile_columns);
  }
  __aicore__ inline int32_t depth_of(const Chunk& chunk) const {
    return least(tiling_.depth - chunk.begin, tiling_.chunk);
  }

  __aicore__ inline void load(const Chunk& chunk) {
    const uint32_t stage = uint32_t(chunks_in_l1_.fill());
    const int32_t depth = depth_of(chunk), rows = rows_of(chunk.tile);
    const LocalTensor<T> a = a1_[stage * a_chunk_];
    copy_in<kDenseA>(a, a_, tiling_.a_stride, row_of(chunk.tile), rows, chunk.begin, depth);
    // A single row would be taken for a vector, which lies in another way. It becomes two.
    if (kDenseA && rows == 1)
      copy_in<kDenseA>(a[kDepth], a_, tiling_.a_stride, row_of(chunk.tile), rows, chunk.begin, depth);
    copy_in<kDenseB>(b1_[stage * b_chunk_], b_, tiling_.b_stride, column_of(chunk.tile), columns_of(chunk.tile),
                     chunk.begin, depth);
    chunks_in_l1_.full();
  }

  // `rows` x `depth` elements as columns of fractals; if the depth is not dense, as their transpose. What is left of a
  // dense run's last block becomes zero, what is left of a fractal's rows stays undefined: the matrix unit takes neither.
  template <bool dense>
  __aicore__ inline void copy_in(const LocalTensor<T>& to, const GlobalTensor<T>& from, int64_t stride, int64_t row,
                                 int32_t rows, int64_t begin, int32_t depth) const {
    constexpr int64_t kLongestStride = 65535;
    const int64_t first = dense ? row * stride + begin : begin * stride + row;
    const int32_t runs = dense ? rows : depth, length = dense ? depth : rows;
    const bool together = runs > 1 && stride <= kLongestStride;
    const int32_t at_once = together ? runs : 1;
    Nd2NzParams params;
    params.ndNum = 1;
    params.nValue = uint16_t(at_once);
    params.dValue = uint16_t(length);
    params.srcDValue = uint16_t(together ? stride : length);
    params.dstNzC0Stride = uint16_t(ceil_div(runs, kEdge) * kEdge);
    params.dstNzNStride = 1;
    for (int32_t run = 0; run < runs; run += at_once)
      DataCopy(to[uint32_t(run * kDepth)], from[uint64_t(first + run * stride)], params);
  }

  // Adds the product of a chunk to the sums of its tile, and writes these out after the last one.
  __aicore__ inline void multiply(const Chunk& chunk) {
    const uint32_t stage = uint32_t(chunks_in_l1_.use());
    const int32_t depth = depth_of(chunk), rows = rows_of(chunk.tile), columns = columns_of(chunk.tile);
    if (chunk.begin == 0) sum_stage_ = uint32_t(sums_in_l0c_.fill());
    const LocalTensor<float> sums = sums_[sum_stage_ * sum_];
    for (int32_t begin = 0; begin < depth; begin += tiling_.step) {
      const int32_t step = least(depth - begin, tiling_.step);
      const uint32_t filled = uint32_t(steps_in_l0_.fill());
      to_l0<kDenseA, kRowsOfFractals>(a2_[filled * a_step_], a1_[stage * a_chunk_], rows, depth, begin, step);
      to_l0<kDenseB, false>(b2_[filled * b_step_], b1_[stage * b_chunk_], columns, depth, begin, step);
      steps_in_l0_.full();
      const uint32_t used = uint32_t(steps_in_l0_.use());
      MmadParams params;
      params.m = uint16_t(rows == 1 ? 2 : rows);
      params.n = uint16_t(columns);
      params.k = uint16_t(step);
      params.cmatrixInitVal = chunk.begin == 0 && begin == 0;
      Mmad(sums, a2_[used * a_step_], b2_[used * b_step_], params);
      if (params.m / kEdge * (params.n / kEdge) < kFractalsInOrder) PipeBarrier<PIPE_M>();
      steps_in_l0_.empty();
    }
    chunks_in_l1_.empty();
    if (chunk.begin + depth < tiling_.depth) return;
    sums_in_l0c_.full();
    sums_in_l0c_.use();
    write(sums, chunk.tile);
    sums_in_l0c_.empty();
  }

  // Sums of fewer fractals need a barrier between the products that they consist of.
  static constexpr int32_t kFractalsInOrder = 10;

#if __NPU_ARCH__ == 3510
  static constexpr bool kRowsOfFractals = false;  // of the left operand in L0A; the right one never has them

  // Of the `rows` x `depth` elements of a chunk, those of a step.
  template <bool dense, bool by_rows>
  __aicore__ inline void to_l0(const LocalTensor<T>& to, const LocalTensor<T>& from, int32_t rows, int32_t depth,
                               int32_t begin, int32_t step) const {
    const int32_t edges = ceil_div(rows, kEdge), steps = ceil_div(step, kDepth), first = begin / kDepth;
    LoadData2DParamsV2 params;
    params.mStartPosition = uint32_t(dense ? 0 : first);
    params.kStartPosition = uint32_t(dense ? first : 0);
    params.mStep = uint16_t(dense ? edges : steps);
    params.kStep = uint16_t(dense ? steps : edges);
    params.srcStride = dense ? edges : ceil_div(depth, kEdge);
    params.dstStride = uint16_t(edges);
    params.ifTranspose = !dense;
    LoadData(to, from, params);
  }
#else
  static constexpr bool kRowsOfFractals = true;

  template <bool dense, bool by_rows>
  __aicore__ inline void to_l0(const LocalTensor<T>& to, const LocalTensor<T>& from, int32_t rows, int32_t depth,
                               int32_t begin, int32_t step) const {
    const int32_t edges = ceil_div(rows, kEdge), steps = ceil_div(step, kDepth);
    // From a fractal to the next one in L1, along the rows and along the depth.
    const int32_t along_rows = dense ? 1 : ceil_div(depth, kEdge), along_depth = dense ? edges : 1;
    const int32_t inner = by_rows ? steps : edges, outer = by_rows ? edges : steps;
    LoadData2DParams params;
    params.repeatTimes = uint8_t(inner);
    params.srcStride = uint16_t(by_rows ? along_depth : along_rows);
    params.ifTranspose = !dense;
    for (int32_t i = 0; i < outer; ++i) {
      params.startIndex = uint16_t(begin / kDepth * along_depth + i * (by_rows ? along_rows : along_depth));
      LoadData(to[uint32_t(i * inner * kFractal)], from, params);
    }
  }
#endif

  __aicore__ inline void write(const LocalTensor<float>& sums, int64_t tile) {
    constexpr int64_t kLongestStride = 0xffffffff;
    const int32_t rows = rows_of(tile);
    const int32_t at_once = tiling_.out_stride <= kLongestStride ? rows : 1;
#if __NPU_ARCH__ == 3510
    FixpipeParamsArch3510<CO2Layout::ROW_MAJOR> params;
#else
    FixpipeParamsV220 params;
#endif
    params.nSize = uint16_t(columns_of(tile));
    params.mSize = uint16_t(at_once);
    params.srcStride = uint16_t(ceil_div(rows, kEdge) * kEdge);
    params.dstStride = uint32_t(tiling_.out_stride);
    params.quantPre = C::out == DType::f32   ? QuantMode_t::NoQuant
                      : C::out == DType::f16 ? QuantMode_t::F322F16
                                             : QuantMode_t::F322BF16;
    for (int32_t i = 0; i < rows; i += at_once)
      Fixpipe<Out, float, CFG_ROW_MAJOR>(
          out_[uint64_t((row_of(tile) + i) * tiling_.out_stride + column_of(tile))], sums[uint32_t(i * kEdge)], params);
  }

  const GemmTiling& tiling_;
  TPipe pipe_;
  GlobalTensor<T> a_, b_;
  GlobalTensor<Out> out_;
  TBuf<TPosition::A1> a1_buffer_;
  TBuf<TPosition::B1> b1_buffer_;
  TBuf<TPosition::A2> a2_buffer_;
  TBuf<TPosition::B2> b2_buffer_;
  TBuf<TPosition::CO1> sum_buffer_;
  LocalTensor<T> a1_, b1_, a2_, b2_;
  LocalTensor<float> sums_;
  Stages<HardEvent::MTE2_MTE1, HardEvent::MTE1_MTE2> chunks_in_l1_;
  Stages<HardEvent::MTE1_M, HardEvent::M_MTE1> steps_in_l0_;
  Stages<HardEvent::M_FIX, HardEvent::FIX_M> sums_in_l0c_;
  int64_t row_tiles_, tiles_;
  uint32_t a_chunk_, b_chunk_, a_step_, b_step_, sum_, sum_stage_ = 0;  // elements of a stage of each memory
};

template <typename Config>
__aicore__ inline void gemm(GM_ADDR a, GM_ADDR b, GM_ADDR out, const GemmTiling& tiling) {
  Gemm<Config> kernel(a, b, out, tiling);
  kernel.run();
}

}  // namespace deepinfer::npu
