// Gated activations: act(gate) * up, with the roundings of the unfused code. Tiles of rows, or of a part of one row, are
// dealt to the cores; the copies of the next tile run beside the work on this one. Everything is computed in float.
//
// Queues: gate in, up in, result out, two buffers each. Bound by memory on paper for silu (about 12 vector instructions
// of 4 bytes an element against 6 bytes moved); by the vector pipe for the exact gelu, which takes about 45.
//
// With a map of rows to slots, a row has the weight of its slot, and one without a slot is 0. Rows may be quantised before
// they leave the core: then `out` are codes of whole rows, which went through quantizer.h, rounded to T before.
//
// Config: `dtype` (DType), `form` (Gated), `quantized` (int), `code` (Code), `scale` (ScaleType).
#pragma once

#include "activation_tiling.h"
#include "quantizer.h"

namespace deepinfer::npu {

template <typename C>
class GatedActivation {
  using T = Element<C::dtype>;
  static constexpr bool kClamps = C::form == Gated::silu || C::form == Gated::swish;
  static constexpr int kScratch = scratch_of(C::form);
  static constexpr bool kQuantizes = C::quantized != 0;

 public:
  __aicore__ inline GatedActivation(GM_ADDR gate, GM_ADDR up, GM_ADDR weights, GM_ADDR map, GM_ADDR out,
                                    GM_ADDR scales, const GatedTiling& tiling)
      : tiling_(tiling) {
    gate_.init(gate, tiling.gate_bytes, tiling.gate_rows);
    up_.init(up, tiling.up_bytes, tiling.up_rows);
    weights_.SetGlobalBuffer((__gm__ float*)weights, uint64_t(tiling.weight_bytes) / sizeof(float));
    map_.SetGlobalBuffer((__gm__ int32_t*)map, uint64_t(tiling.map_bytes) / sizeof(int32_t));
    const uint32_t elements = uint32_t(tiling.rows * tiling.pitch);
    pipe_.InitBuffer(gate_queue_, 2, elements * sizeof(T));
    pipe_.InitBuffer(up_queue_, 2, elements * sizeof(T));
    if constexpr (kQuantizes) {
      codes_.init(out, tiling.out_bytes, code_bytes<C::code>(tiling.size));
      const int32_t across = int32_t(tiling.scales.across);
      quantizer_.init(pipe_, scales, tiling.scale_bytes, tiling.scales, tiling.rows * across);
      pipe_.InitBuffer(out_queue_, 2, uint32_t(code_bytes<C::code>(int32_t(elements))));
      pipe_.InitBuffer(rounded_buffer_, elements * sizeof(T));
      rounded_ = rounded_buffer_.template Get<T>();
    } else {
      out_.init(out, tiling.out_bytes, tiling.size);
      pipe_.InitBuffer(out_queue_, 2, elements * sizeof(T));
    }
    pipe_.InitBuffer(floats_, (2 + kScratch) * elements * sizeof(float));
    const LocalTensor<float> all = floats_.template Get<float>();
    g_ = all;
    u_ = all[elements];
    for (int i = 0; i < kScratch; ++i) scratch_[i] = all[uint32_t(2 + i) * elements];
  }

  __aicore__ inline void run() {
    parts_ = (tiling_.size + tiling_.chunk - 1) / tiling_.chunk;
    const int64_t tiles = (tiling_.gate_rows.count + tiling_.rows - 1) / tiling_.rows * parts_;
    int64_t tile = GetBlockIdx();
    if (tile < tiles) load(tile_at(tile));
    for (; tile < tiles; tile += GetBlockNum()) {
      if (tile + GetBlockNum() < tiles) load(tile_at(tile + GetBlockNum()));
      work(tile_at(tile));
    }
  }

 private:
  struct Tile {
    int64_t row, begin;
    int32_t count, size;
  };

  __aicore__ inline Tile tile_at(int64_t index) const {
    Tile tile;
    tile.row = index / parts_ * tiling_.rows;
    tile.begin = index % parts_ * tiling_.chunk;
    const int64_t rows = tiling_.gate_rows.count - tile.row, columns = tiling_.size - tile.begin;
    tile.count = rows < tiling_.rows ? int32_t(rows) : tiling_.rows;
    tile.size = columns < tiling_.chunk ? int32_t(columns) : tiling_.chunk;
    return tile;
  }

  __aicore__ inline void load(const Tile& tile) {
    const LocalTensor<T> gate = gate_queue_.template AllocTensor<T>(), up = up_queue_.template AllocTensor<T>();
    gate_.read(gate, tile.row, tile.count, tile.begin, tile.size, tiling_.pitch);
    up_.read(up, tile.row, tile.count, tile.begin, tile.size, tiling_.pitch);
    gate_queue_.EnQue(gate);
    up_queue_.EnQue(up);
  }

  __aicore__ inline void work(const Tile& tile) {
    n_ = (tile.count - 1) * tiling_.pitch + whole_blocks<T>(tile.size);
    LocalTensor<T> gate = gate_queue_.template DeQue<T>(), up = up_queue_.template DeQue<T>();
    widen(g_, gate, n_);
    widen(u_, up, n_);
    PipeBarrier<PIPE_V>();
    gate_queue_.FreeTensor(gate);
    up_queue_.FreeTensor(up);
    LocalTensor<T> out;
    if constexpr (kQuantizes) out = rounded_;
    else out = out_queue_.template AllocTensor<T>();
    if constexpr (kClamps) clamp();
    activate(out);
    Mul(g_, g_, u_, n_);
    PipeBarrier<PIPE_V>();
    if (tiling_.weight_bytes > 0) weigh(out, tile);
    if (tiling_.map_bytes > 0) clear_rows_without_slot(tile);
    if constexpr (kQuantizes) {
      round(g_, out);
      write_codes(tile);
      return;
    }
    narrow(out, g_, n_);
    PipeBarrier<PIPE_V>();
    out_queue_.EnQue(out);
    out = out_queue_.template DeQue<T>();
    out_.write(out, tile.row, tile.count, tile.begin, tile.size, tiling_.pitch);
    out_queue_.FreeTensor(out);
  }

  __aicore__ inline void write_codes(const Tile& tile) {
    LocalTensor<uint8_t> codes = out_queue_.template AllocTensor<uint8_t>();
    quantizer_.quantize_rows(codes, g_, u_, scratch_[0], tile.row, tile.count, tile.size, tiling_.pitch, tiling_.group);
    out_queue_.EnQue(codes);
    codes = out_queue_.template DeQue<uint8_t>();
    codes_.write(codes, tile.row, tile.count, 0, code_bytes<C::code>(tile.size), code_bytes<C::code>(tiling_.pitch));
    out_queue_.FreeTensor(codes);
  }

  // `values` as the storage type holds them. `out` is room for that.
  __aicore__ inline void round(const LocalTensor<float>& values, const LocalTensor<T>& out) {
    if constexpr (sizeof(T) < sizeof(float)) {
      narrow(out, values, n_);
      PipeBarrier<PIPE_V>();
      widen(values, out, n_);
      PipeBarrier<PIPE_V>();
    }
  }

  __aicore__ inline void clamp() {
    Mins(g_, g_, tiling_.limit, n_);
    Mins(u_, u_, tiling_.limit, n_);
    PipeBarrier<PIPE_V>();
    Maxs(u_, u_, -tiling_.limit, n_);
    PipeBarrier<PIPE_V>();
  }

  // numerator / (1 + exp(x)) into `to`; x is overwritten.
  __aicore__ inline void logistic(const LocalTensor<float>& to, const LocalTensor<float>& numerator,
                                  const LocalTensor<float>& x) {
    Exp(x, x, n_);
    PipeBarrier<PIPE_V>();
    Adds(x, x, 1.0f, n_);
    PipeBarrier<PIPE_V>();
    Div(to, numerator, x, n_);
    PipeBarrier<PIPE_V>();
  }

  // g_ becomes the activation, rounded to T; for swish u_ gets its offset.
  __aicore__ inline void activate(const LocalTensor<T>& out) {
    const LocalTensor<float> x = scratch_[0];
    if constexpr (C::form == Gated::silu) {
      Muls(x, g_, -1.0f, n_);
      PipeBarrier<PIPE_V>();
      logistic(g_, g_, x);
      round(g_, out);
    } else if constexpr (C::form == Gated::swish) {
      swish(out);
    } else if constexpr (C::form == Gated::gelu_tanh) {  // x / (1 + exp(-2 sqrt(2 / pi) x (1 + 0.044715 x^2)))
      Mul(x, g_, g_, n_);
      PipeBarrier<PIPE_V>();
      Muls(x, x, 0.044715f, n_);
      PipeBarrier<PIPE_V>();
      Adds(x, x, 1.0f, n_);
      PipeBarrier<PIPE_V>();
      Mul(x, x, g_, n_);
      PipeBarrier<PIPE_V>();
      Muls(x, x, -1.59576912160573071f, n_);
      PipeBarrier<PIPE_V>();
      logistic(g_, g_, x);
      round(g_, out);
    } else {
      gelu();
      round(g_, out);
    }
  }

  __aicore__ inline void swish(const LocalTensor<T>& out) {
    const LocalTensor<float> x = scratch_[0], one = scratch_[1];
    Muls(x, g_, tiling_.alpha, n_);
    Duplicate(one, 1.0f, n_);
    PipeBarrier<PIPE_V>();
    round(x, out);
    Muls(x, x, -1.0f, n_);
    PipeBarrier<PIPE_V>();
    logistic(x, one, x);
    round(x, out);
    Mul(g_, g_, x, n_);
    PipeBarrier<PIPE_V>();
    round(g_, out);
    Adds(u_, u_, tiling_.up_offset, n_);
    PipeBarrier<PIPE_V>();
    round(u_, out);
  }

  __aicore__ inline void horner(const LocalTensor<float>& p, const LocalTensor<float>& s, float coefficient) {
    Mul(p, p, s, n_);
    PipeBarrier<PIPE_V>();
    Adds(p, p, coefficient, n_);
    PipeBarrier<PIPE_V>();
  }

  // x Phi(x). With a = |x| and s = (a - 4) / (a + 4), Phi(-a) = exp(-a^2 / 2) P(s) / (a + 4): no 1 + erf(x), which
  // cancels for negative x. The rounding error of a^2 is put back into the exponential: with the first 8 bits of a
  // apart, all products that it is made of are exact but the smallest.
  __aicore__ inline void gelu() {
    const LocalTensor<float> a = scratch_[0], p = scratch_[1], s = scratch_[2], e = scratch_[3];
    Abs(a, g_, n_);
    PipeBarrier<PIPE_V>();
    Mins(a, a, 14.5f, n_);  // Phi(-14.5) rounds to 0
    PipeBarrier<PIPE_V>();
    Adds(e, a, 4.0f, n_);
    Adds(s, a, -4.0f, n_);
    PipeBarrier<PIPE_V>();
    Div(s, s, e, n_);
    Duplicate(p, -1.31974454e-4f, n_);
    PipeBarrier<PIPE_V>();
    horner(p, s, 1.79349300e-4f);
    horner(p, s, 1.56992301e-3f);
    horner(p, s, -3.51251052e-3f);
    horner(p, s, -7.52527034e-3f);
    horner(p, s, 6.04038313e-2f);
    horner(p, s, -1.86523438e-1f);
    horner(p, s, 3.87136906e-1f);
    horner(p, s, -6.07896566e-1f);
    horner(p, s, 7.55285144e-1f);
    Div(p, p, e, n_);
    PipeBarrier<PIPE_V>();
    exp_of_square(e, a, s);
    Mul(p, p, e, n_);  // Phi(-a)
    PipeBarrier<PIPE_V>();
    // Phi(x) = |step(x) - Phi(-|x|)|; the step is 1 for all positive numbers, the denormal ones too.
    Maxs(a, g_, 0.0f, n_);
    PipeBarrier<PIPE_V>();
    Muls(a, a, 3e38f, n_);
    PipeBarrier<PIPE_V>();
    Muls(a, a, 3e38f, n_);
    PipeBarrier<PIPE_V>();
    Mins(a, a, 1.0f, n_);
    PipeBarrier<PIPE_V>();
    Sub(a, a, p, n_);
    PipeBarrier<PIPE_V>();
    Abs(a, a, n_);
    PipeBarrier<PIPE_V>();
    Mul(g_, g_, a, n_);
    PipeBarrier<PIPE_V>();
  }

  // exp(-a^2 / 2) into e; a and s are overwritten.
  __aicore__ inline void exp_of_square(const LocalTensor<float>& e, const LocalTensor<float>& a,
                                       const LocalTensor<float>& s) {
    const LocalTensor<bfloat16_t> head = e.template ReinterpretCast<bfloat16_t>();
    Cast(head, a, RoundMode::CAST_RINT, uint32_t(n_));
    PipeBarrier<PIPE_V>();
    Cast(s, head, RoundMode::CAST_NONE, uint32_t(n_));
    PipeBarrier<PIPE_V>();
    Sub(e, a, s, n_);  // the tail
    Add(a, a, s, n_);  // a + head: a^2 = head^2 + tail (a + head)
    PipeBarrier<PIPE_V>();
    Mul(a, a, e, n_);
    Mul(s, s, s, n_);
    PipeBarrier<PIPE_V>();
    Muls(s, s, -0.5f, n_);
    Muls(a, a, -0.5f, n_);
    PipeBarrier<PIPE_V>();
    Exp(e, s, n_);
    Exp(a, a, n_);
    PipeBarrier<PIPE_V>();
    Mul(e, e, a, n_);
    PipeBarrier<PIPE_V>();
  }

  __aicore__ inline void weigh(const LocalTensor<T>& out, const Tile& tile) {
    round(g_, out);
    for (int32_t i = 0; i < tile.count; ++i) {
      const int64_t slot = slot_of(tile.row + i);
      if (slot < 0 || slot >= tiling_.slots) continue;
      const LocalTensor<float> row = g_[uint32_t(i * tiling_.pitch)];
      Muls(row, row, weights_.GetValue(uint64_t(slot)), whole_blocks<T>(tile.size));
    }
    PipeBarrier<PIPE_V>();
  }

  __aicore__ inline int64_t slot_of(int64_t row) const {
    return tiling_.map_bytes > 0 ? int64_t(map_.GetValue(uint64_t(row))) : row;
  }

  // Whatever they held; NaN if the slot is no slot.
  __aicore__ inline void clear_rows_without_slot(const Tile& tile) {
    for (int32_t i = 0; i < tile.count; ++i) {
      const int64_t slot = slot_of(tile.row + i);
      if (slot >= 0 && slot < tiling_.slots) continue;
      const LocalTensor<float> row = g_[uint32_t(i * tiling_.pitch)];
      Duplicate(row.template ReinterpretCast<int32_t>(), slot == -1 ? 0 : int32_t(0x7fc00000),
                whole_blocks<T>(tile.size));
    }
    PipeBarrier<PIPE_V>();
  }

  const GatedTiling& tiling_;
  int64_t parts_ = 1;
  int32_t n_ = 0;  // elements of the tile at hand, padding included
  TPipe pipe_;
  RowReader<T> gate_, up_;
  RowWriter<T> out_;
  RowWriter<uint8_t> codes_;
  Quantizer<C::code, C::scale> quantizer_;
  GlobalTensor<float> weights_;
  GlobalTensor<int32_t> map_;
  TQue<TPosition::VECIN, 2> gate_queue_, up_queue_;
  TQue<TPosition::VECOUT, 2> out_queue_;
  TBuf<TPosition::VECCALC> floats_, rounded_buffer_;
  LocalTensor<float> g_, u_, scratch_[kScratch];
  LocalTensor<T> rounded_;
};

template <typename Config>
__aicore__ inline void gated_activation(GM_ADDR gate, GM_ADDR up, GM_ADDR weights, GM_ADDR map, GM_ADDR out,
                                        GM_ADDR scales, const GatedTiling& tiling) {
  GatedActivation<Config> kernel(gate, up, weights, map, out, scales, tiling);
  kernel.run();
}

}  // namespace deepinfer::npu
