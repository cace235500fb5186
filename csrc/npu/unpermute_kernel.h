// The rows of a token's experts summed up again, each times its weight: in float, in the order of the choices, without
// fused multiply-add. Tokens are dealt to the cores; the rows of a token come in one after the other, two under way.
// Choices without a row are left out, one out of range makes the token NaN. Bound by memory: every row is read once.
//
// Rows may be codes of e4m3 with a scale each, which multiplies the weight.
//
// Config: `dtype`, `weights` (DType), `coded` (int): rows are codes of `code` (Code).
#pragma once

#include "moe_dispatch_tiling.h"
#include "codes.h"

namespace deepinfer::npu {

template <bool coded, typename T>
struct RowOf {
  using type = T;
};
template <typename T>
struct RowOf<true, T> {
  using type = uint8_t;
};

template <typename C>
class Unpermute {
  using T = Element<C::dtype>;
  using W = Element<C::weights>;
  using Row = typename RowOf<C::coded != 0, T>::type;

 public:
  __aicore__ inline Unpermute(GM_ADDR y, GM_ADDR map, GM_ADDR weights, GM_ADDR row_scales, GM_ADDR out,
                               const UnpermuteTiling& tiling)
      : tiling_(tiling) {
    const uint64_t slots = uint64_t(tiling.tokens * tiling.topk);
    y_.SetGlobalBuffer((__gm__ Bits<Row>*)y, uint64_t(tiling.y_bytes) / sizeof(Row));
    row_scales_.SetGlobalBuffer((__gm__ float*)row_scales, C::coded ? uint64_t(tiling.rows) : 0);
    map_.SetGlobalBuffer((__gm__ int32_t*)map, slots);
    weights_.SetGlobalBuffer((__gm__ Bits<W>*)weights, tiling.has_weights ? slots : 0);
    out_.init(out, tiling.tokens * tiling.hidden_size * int64_t(sizeof(T)), tiling.hidden_size);
    const uint32_t chunk = uint32_t(tiling.chunk);
    const uint32_t entries = uint32_t(tiling.tokens_at_once * (tiling.topk > 0 ? tiling.topk : 1));
    pipe_.InitBuffer(y_queue_, 2, chunk * sizeof(Row));
    pipe_.InitBuffer(out_queue_, 2, chunk * sizeof(T));
    pipe_.InitBuffer(floats_, 2 * chunk * sizeof(float));
    pipe_.InitBuffer(map_buffer_, entries * sizeof(int32_t));
    pipe_.InitBuffer(raw_buffer_, entries * sizeof(W));
    pipe_.InitBuffer(factor_buffer_, entries * sizeof(float));
    sum_ = floats_.template Get<float>();
    term_ = sum_[chunk];
    rows_ = map_buffer_.template Get<int32_t>();
    raw_ = raw_buffer_.template Get<Bits<W>>();
    factors_ = factor_buffer_.template Get<float>();
  }

  __aicore__ inline void run() {
    const int64_t at_once = tiling_.tokens_at_once, tiles = (tiling_.tokens + at_once - 1) / at_once;
    for (int64_t tile = GetBlockIdx(); tile < tiles; tile += GetBlockNum()) {
      const int64_t first = tile * at_once, left = tiling_.tokens - first;
      const int32_t count = int32_t(left < at_once ? left : at_once);
      load_map(first, count);
      for (int32_t i = 0; i < count; ++i)
        for (int64_t begin = 0; begin < tiling_.hidden_size; begin += tiling_.chunk) sum_rows(first + i, i, begin);
      hand_over<HardEvent::S_MTE2>(pipe_);  // the map has been read
      hand_over<HardEvent::S_V>(pipe_);
    }
  }

 private:
  __aicore__ inline void load_map(int64_t first, int32_t count) {
    const int32_t entries = count * int32_t(tiling_.topk);
    if (entries == 0) return;
    DataCopyExtParams params;
    params.blockLen = uint32_t(entries) * uint32_t(sizeof(int32_t));
    DataCopyPad(rows_, map_[uint64_t(first * tiling_.topk)], params, DataCopyPadExtParams<int32_t>{});
    if (tiling_.has_weights) {
      hand_over<HardEvent::V_MTE2>(pipe_);
      params.blockLen = uint32_t(entries) * uint32_t(sizeof(W));
      DataCopyPad(raw_, weights_[uint64_t(first * tiling_.topk)], params, DataCopyPadExtParams<Bits<W>>{});
      hand_over<HardEvent::MTE2_V>(pipe_);
      widen(factors_, raw_.template ReinterpretCast<W>(), entries);
      hand_over<HardEvent::V_S>(pipe_);
    }
    hand_over<HardEvent::MTE2_S>(pipe_);
  }

  // Elements from `begin` on of a token, the `index`th of those whose map is on the core.
  __aicore__ inline void sum_rows(int64_t token, int32_t index, int64_t begin) {
    const int64_t left = tiling_.hidden_size - begin;
    const int32_t size = left < tiling_.chunk ? int32_t(left) : tiling_.chunk, n = whole_blocks<Row>(size);
    Duplicate(sum_, 0.0f, n);
    PipeBarrier<PIPE_V>();
    for (int32_t j = 0; j < tiling_.topk; ++j) {
      const uint32_t entry = uint32_t(index * tiling_.topk + j);
      const int64_t row = rows_.GetValue(entry);
      if (row == -1) continue;
      if (row < 0 || row >= tiling_.rows) {
        Duplicate(sum_.template ReinterpretCast<int32_t>(), int32_t(0x7fc00000), n);  // NaN
        PipeBarrier<PIPE_V>();
        break;
      }
      float factor = tiling_.has_weights ? factors_.GetValue(entry) : 1.0f;
      if constexpr (C::coded) factor = factor * row_scales_.GetValue(uint64_t(row));
      add_row(row, begin, size, factor);
    }
    LocalTensor<T> out = out_queue_.template AllocTensor<T>();
    narrow(out, sum_, n);
    PipeBarrier<PIPE_V>();
    out_queue_.EnQue(out);
    out = out_queue_.template DeQue<T>();
    out_.write(out, token, 1, begin, size, n);
    out_queue_.FreeTensor(out);
  }

  __aicore__ inline void add_row(int64_t row, int64_t begin, int32_t size, float factor) {
    const int32_t n = whole_blocks<Row>(size);
    LocalTensor<Row> y = y_queue_.template AllocTensor<Row>();
    DataCopyExtParams params;
    params.blockLen = uint32_t(size) * uint32_t(sizeof(Row));
    DataCopyPadExtParams<Bits<Row>> padding;
    padding.isPad = true;
    padding.rightPadding = uint8_t(n - size);
    DataCopyPad(y.template ReinterpretCast<Bits<Row>>(), y_[uint64_t(row * tiling_.row_stride + begin)], params, padding);
    y_queue_.EnQue(y);
    y = y_queue_.template DeQue<Row>();
    if constexpr (C::coded) decode<C::code>(term_, y, term_, term_, n);
    else widen(term_, y, n);
    y_queue_.FreeTensor(y);
    PipeBarrier<PIPE_V>();
    if (C::coded || tiling_.has_weights) {
      Muls(term_, term_, factor, n);
      PipeBarrier<PIPE_V>();
    }
    Add(sum_, sum_, term_, n);
    PipeBarrier<PIPE_V>();
  }

  const UnpermuteTiling& tiling_;
  TPipe pipe_;
  GlobalTensor<Bits<Row>> y_;
  GlobalTensor<float> row_scales_;
  GlobalTensor<int32_t> map_;
  GlobalTensor<Bits<W>> weights_;
  RowWriter<T> out_;
  TQue<TPosition::VECIN, 2> y_queue_;
  TQue<TPosition::VECOUT, 2> out_queue_;
  TBuf<TPosition::VECCALC> floats_, map_buffer_, raw_buffer_, factor_buffer_;
  LocalTensor<float> sum_, term_, factors_;
  LocalTensor<int32_t> rows_;
  LocalTensor<Bits<W>> raw_;
};

template <typename Config>
__aicore__ inline void moe_unpermute(GM_ADDR y, GM_ADDR map, GM_ADDR weights, GM_ADDR row_scales, GM_ADDR out,
                                     const UnpermuteTiling& tiling) {
  Unpermute<Config> kernel(y, map, weights, row_scales, out, tiling);
  kernel.run();
}

}  // namespace deepinfer::npu
