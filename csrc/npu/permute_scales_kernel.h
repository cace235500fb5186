// The scales of tokens gathered in the order of experts, where one side is laid out by columns: each scale gets a block of
// 32 bytes on the core, and so a place of its own on either side. The rest is as permute_kernel.h, which does the job if
// both sides are dense rows. Bound by the number of pieces that copies move.
//
// Config: `bytes` (int): of a scale.
#pragma once

#include "slots.h"

namespace deepinfer::npu {

template <typename C>
class PermuteScales {
  using T = typename BitsOf<C::bytes>::type;

 public:
  __aicore__ inline PermuteScales(GM_ADDR scales, GM_ADDR map, GM_ADDR out, const PermuteScalesTiling& tiling)
      : tiling_(tiling) {
    scales_.SetGlobalBuffer((__gm__ T*)scales, uint64_t(tiling.scale_bytes) / sizeof(T));
    map_.SetGlobalBuffer((__gm__ int32_t*)map, uint64_t(tiling.rows));
    out_.SetGlobalBuffer((__gm__ T*)out, uint64_t(tiling.out_bytes) / sizeof(T));
    const uint32_t bytes = uint32_t(tiling.chunk) * kBlockBytes;
    pipe_.InitBuffer(queue_, 4, bytes);
    pipe_.InitBuffer(map_buffer_, kMapTile * sizeof(int32_t));
    pipe_.InitBuffer(fill_buffer_, 2 * bytes);
    slots_ = map_buffer_.template Get<int32_t>();
    zeros_ = fill_buffer_.template Get<T>();
    ones_ = zeros_[bytes / uint32_t(sizeof(T))];
  }

  __aicore__ inline void run() {
    const int32_t words = tiling_.chunk * kBlockBytes / 4;
    Duplicate(zeros_.template ReinterpretCast<int32_t>(), 0, words);
    Duplicate(ones_.template ReinterpretCast<int32_t>(), -1, words);
    hand_over<HardEvent::V_MTE3>(pipe_);
    for_slots(pipe_, map_, slots_, tiling_.rows, [&](int64_t row, int32_t slot) { write_row(row, slot); });
  }

 private:
  // Calls move(piece, pieces, gap) for `count` scales that lie `stride` apart: all of them, or one by one where the gap is
  // none that a copy takes.
  template <typename Move>
  __aicore__ inline static void for_pieces(int32_t count, int64_t stride, Move move) {
    const int64_t gap = (stride - 1) * int64_t(sizeof(T));
    if (gap >= 0 && gap <= kLongestGap) {
      move(0, count, uint32_t(gap));
    } else {
      for (int32_t i = 0; i < count; ++i) move(i, 1, 0u);
    }
  }
  static constexpr uint32_t kStep = kBlockBytes / sizeof(T);

  __aicore__ inline void write_row(int64_t row, int64_t slot) {
    const bool valid = slot >= 0 && slot < tiling_.tokens * tiling_.topk;
    for (int64_t begin = 0; begin < tiling_.columns; begin += tiling_.chunk) {
      const int64_t left = tiling_.columns - begin;
      const int32_t count = left < tiling_.chunk ? int32_t(left) : tiling_.chunk;
      if (!valid) {
        write(row, begin, count, slot == -1 ? zeros_ : ones_);
        continue;
      }
      LocalTensor<T> blocks = queue_.template AllocTensor<T>();
      read(blocks, slot / tiling_.topk, begin, count);
      queue_.EnQue(blocks);
      blocks = queue_.template DeQue<T>();
      write(row, begin, count, blocks);
      queue_.FreeTensor(blocks);
    }
  }

  __aicore__ inline void read(const LocalTensor<T>& to, int64_t token, int64_t begin, int32_t count) {
    for_pieces(count, tiling_.column_stride, [&](int32_t piece, int32_t pieces, uint32_t gap) {
      DataCopyExtParams params;
      params.blockCount = uint16_t(pieces);
      params.blockLen = sizeof(T);
      params.srcStride = gap;
      const int64_t at = token * tiling_.row_stride + (begin + piece) * tiling_.column_stride;
      DataCopyPad(to[uint32_t(piece) * kStep], scales_[uint64_t(at)], params, DataCopyPadExtParams<T>{});
    });
  }
  __aicore__ inline void write(int64_t row, int64_t begin, int32_t count, const LocalTensor<T>& from) {
    for_pieces(count, tiling_.out_column_stride, [&](int32_t piece, int32_t pieces, uint32_t gap) {
      DataCopyExtParams params;
      params.blockCount = uint16_t(pieces);
      params.blockLen = sizeof(T);
      params.dstStride = gap;
      const int64_t at = row * tiling_.out_row_stride + (begin + piece) * tiling_.out_column_stride;
      DataCopyPad(out_[uint64_t(at)], from[uint32_t(piece) * kStep], params);
    });
  }

  const PermuteScalesTiling& tiling_;
  TPipe pipe_;
  GlobalTensor<T> scales_, out_;
  GlobalTensor<int32_t> map_;
  TQueBind<TPosition::VECIN, TPosition::VECOUT, 4> queue_;
  TBuf<TPosition::VECCALC> map_buffer_, fill_buffer_;
  LocalTensor<int32_t> slots_;
  LocalTensor<T> zeros_, ones_;
};

template <typename Config>
__aicore__ inline void moe_permute_scales(GM_ADDR scales, GM_ADDR map, GM_ADDR out, const PermuteScalesTiling& tiling) {
  PermuteScales<Config> kernel(scales, map, out, tiling);
  kernel.run();
}

}  // namespace deepinfer::npu
