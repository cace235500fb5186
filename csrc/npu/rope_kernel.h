// Rotary embeddings of the rows of q or of k. The rows of a group (the heads of a token) share one row of the tables, which
// is prepared once: widened, brought to one column for each element, and the sine multiplied by the sign that its element
// has. Then every style is out = x[order] * cos + x[partner] * sin, where order and partner are fixed permutations of a
// row. Tiles of rows of one group are dealt to the cores.
//
// Halves of whole blocks change places by the strides of the instructions, which all rows of a tile then share: bound by
// memory. Otherwise by the vector pipe: one or two gathers a row, and gathers are slow.
//
// Rows may be normed before, all of a tile together (row_norms.h), and rounded as if the norm had been written.
//
// Config: `dtype`, `table` (DType), `style` (RopeStyle), `wide` (int): positions are int64; `normed` (int), `weight` (DType),
// `form` (WeightForm).
#pragma once

#include "rope_tiling.h"
#include "row_norms.h"

namespace deepinfer::npu {

template <typename C>
class Rope {
  using T = Element<C::dtype>;
  using Table = Element<C::table>;
  using Position = Wide<C::wide != 0>;
  static constexpr bool kRounds = sizeof(T) < sizeof(float) && C::dtype == C::table;  // the products too
  static constexpr bool kNorms = C::normed != 0, kWeighted = kNorms && C::form != WeightForm::none;
  static constexpr bool kOrders = C::style == RopeStyle::interleaved_to_half;

 public:
  __aicore__ inline Rope(GM_ADDR in, GM_ADDR out, GM_ADDR cos, GM_ADDR sin, GM_ADDR positions,
                         GM_ADDR weight, const RopeTiling& tiling)
      : tiling_(tiling), pitch_(whole_blocks<T>(tiling.head_size)) {
    in_.init(in, tiling.in_bytes, tiling.in_rows);
    out_.init(out, tiling.out_bytes, tiling.out_rows);
    cos_table_.SetGlobalBuffer((__gm__ Bits<Table>*)cos, uint64_t(tiling.cos_bytes) / sizeof(Table));
    sin_table_.SetGlobalBuffer((__gm__ Bits<Table>*)sin, uint64_t(tiling.sin_bytes) / sizeof(Table));
    positions_.SetGlobalBuffer((__gm__ Position*)positions, uint64_t(tiling.position_bytes) / sizeof(Position));
    const uint32_t elements = uint32_t(tiling.rows * pitch_), line = uint32_t(whole_blocks<half>(tiling.rotary_dim));
    pipe_.InitBuffer(in_queue_, 2, elements * sizeof(T));
    pipe_.InitBuffer(out_queue_, 2, elements * sizeof(T));
    pipe_.InitBuffer(table_queue_, 2, line * sizeof(Table));
    pipe_.InitBuffer(value_buffer_, elements * sizeof(float));
    pipe_.InitBuffer(line_buffer_, 4 * line * sizeof(float));
    pipe_.InitBuffer(offset_buffer_, 3 * line * sizeof(uint32_t));
    values_ = value_buffer_.template Get<float>();
    cos_ = line_buffer_.template Get<float>();
    sin_ = cos_[line];
    sign_ = cos_[2 * line];
    column_ = cos_[3 * line];
    const uint32_t turned = tiling.together ? uint32_t(tiling.rows) * line : line;
    pipe_.InitBuffer(turned_buffer_, 2 * turned * sizeof(float));
    pipe_.InitBuffer(rounded_buffer_, turned * sizeof(T));
    turned_ = turned_buffer_.template Get<float>();
    partner_ = turned_[turned];
    if constexpr (kNorms) {
      pipe_.InitBuffer(square_buffer_, elements * sizeof(float));
      pipe_.InitBuffer(small_buffer_, uint32_t(row_norm_bytes(tiling.rows)));
    }
    if constexpr (kWeighted) weights_.init(pipe_, weight, tiling.weight_bytes, pitch_);
    order_at_ = offset_buffer_.template Get<uint32_t>();
    partner_at_ = order_at_[line];
    column_at_ = order_at_[2 * line];
    rounded_ = rounded_buffer_.template Get<T>();
  }

  __aicore__ inline void run() {
    make_permutations();
    if constexpr (kWeighted) weights_.load(0, tiling_.head_size);
    const int64_t in_group = tiling_.in_rows.count, per_group = (in_group + tiling_.rows - 1) / tiling_.rows;
    const int64_t tiles = tiling_.in_groups.count * per_group;
    // Neighbouring tiles to one core: they share the tables.
    const int64_t first = tiles * GetBlockIdx() / GetBlockNum(), end = tiles * (GetBlockIdx() + 1) / GetBlockNum();
    int64_t prepared = -1;
    for (int64_t tile = first; tile < end; ++tile) {
      const int64_t group = tile / per_group, row = tile % per_group * tiling_.rows, left = in_group - row;
      if (group != prepared) load_tables(prepared = group);
      rotate(group, row, left < tiling_.rows ? int32_t(left) : tiling_.rows);
    }
  }

 private:
  // Byte offsets into a row of floats, and the sign of the sine.
  __aicore__ inline void make_permutations() {
    const int32_t dim = tiling_.rotary_dim, middle = dim / 2;
    for (int32_t i = 0; i < dim; ++i) {
      const bool second = C::style == RopeStyle::interleaved ? i % 2 != 0 : i >= middle;
      const int32_t pair = C::style == RopeStyle::interleaved ? i / 2 : i % middle;
      const int32_t a = C::style == RopeStyle::half ? pair : 2 * pair;
      const int32_t b = C::style == RopeStyle::half ? pair + middle : 2 * pair + 1;
      order_at_.SetValue(uint32_t(i), uint32_t(second ? b : a) * uint32_t(sizeof(float)));
      partner_at_.SetValue(uint32_t(i), uint32_t(second ? a : b) * uint32_t(sizeof(float)));
      column_at_.SetValue(uint32_t(i), uint32_t(tiling_.columns == dim ? i : pair) * uint32_t(sizeof(float)));
      sign_.SetValue(uint32_t(i), second ? tiling_.sin_sign : -tiling_.sin_sign);
    }
    hand_over<HardEvent::S_V>(pipe_);
  }

  // A row of a table in `to`, one column for each element. NaN if there is no such row.
  __aicore__ inline void load_table(const LocalTensor<float>& to, const GlobalTensor<Bits<Table>>& table, int64_t at) {
    if (at < 0) {
      Duplicate(to.template ReinterpretCast<int32_t>(), int32_t(0x7fc00000), tiling_.rotary_dim);
      PipeBarrier<PIPE_V>();
      return;
    }
    LocalTensor<Bits<Table>> raw = table_queue_.template AllocTensor<Bits<Table>>();
    DataCopyExtParams params;
    params.blockLen = uint32_t(tiling_.columns) * uint32_t(sizeof(Table));
    DataCopyPad(raw, table[uint64_t(at)], params, DataCopyPadExtParams<Bits<Table>>{});
    table_queue_.EnQue(raw);
    raw = table_queue_.template DeQue<Bits<Table>>();
    widen(column_, raw.template ReinterpretCast<Table>(), tiling_.columns);
    table_queue_.FreeTensor(raw);
    PipeBarrier<PIPE_V>();
    Gather(to, column_, column_at_, 0, uint32_t(tiling_.rotary_dim));
    PipeBarrier<PIPE_V>();
  }

  __aicore__ inline void load_tables(int64_t group) {
    int64_t cos_at = 0, sin_at = 0;
    if (tiling_.positioned) {
      const int64_t position = positions_.GetValue(uint64_t(row_offset(tiling_.position_groups, group)));
      const bool valid = position >= 0 && position < tiling_.cache_rows;
      cos_at = valid ? position * tiling_.cos_row_stride : -1;
      sin_at = valid ? position * tiling_.sin_row_stride : -1;
    } else {
      cos_at = row_offset(tiling_.cos_groups, group);
      sin_at = row_offset(tiling_.sin_groups, group);
    }
    load_table(cos_, cos_table_, cos_at);
    load_table(sin_, sin_table_, sin_at);
    Mul(sin_, sin_, sign_, tiling_.rotary_dim);
    PipeBarrier<PIPE_V>();
  }

  __aicore__ inline void round(const LocalTensor<float>& values, int32_t count) {
    if constexpr (kRounds) {
      narrow(rounded_, values, count);
      PipeBarrier<PIPE_V>();
      widen(values, rounded_, count);
      PipeBarrier<PIPE_V>();
    }
  }

  __aicore__ inline void rotate(int64_t group, int64_t row, int32_t count) {
    const int32_t elements = count * pitch_;
    LocalTensor<T> x = in_queue_.template AllocTensor<T>();
    in_.read(x, row, count, row_offset(tiling_.in_groups, group), tiling_.head_size, pitch_);
    in_queue_.EnQue(x);
    x = in_queue_.template DeQue<T>();
    LocalTensor<T> out = out_queue_.template AllocTensor<T>();
    widen(values_, x, elements);
    if constexpr (kNorms) {
      PipeBarrier<PIPE_V>();
      normalize_rows(values_, square_buffer_.template Get<float>(), small_buffer_.template Get<float>(), count, pitch_,
                     tiling_.head_size, tiling_.eps);
      weigh_rows<C::form, T>(out, values_, weights_.values(), count, pitch_, pitch_);
      PipeBarrier<PIPE_V>();
      widen(values_, out, elements);
    } else if (tiling_.rotary_dim < tiling_.head_size) {  // the rest of a row stays as it is, to the bit
      using Whole = SignedBits<sizeof(T)>;
      Adds(out.template ReinterpretCast<Whole>(), x.template ReinterpretCast<Whole>(), Whole(0), elements);
    }
    PipeBarrier<PIPE_V>();
    in_queue_.FreeTensor(x);
    if (tiling_.together) turn_halves(out, count);
    else turn_rows(out, count);
    out_queue_.EnQue(out);
    out = out_queue_.template DeQue<T>();
    out_.write(out, row, count, row_offset(tiling_.out_groups, group), tiling_.head_size, pitch_);
    out_queue_.FreeTensor(out);
  }

  // All rows together; turned_ and partner_ are dense.
  __aicore__ inline void turn_halves(const LocalTensor<T>& out, int32_t count) {
    const int32_t dim = tiling_.rotary_dim, middle = dim / 2, all = count * dim;
    times_row(turned_, dim, values_, pitch_, cos_, count, dim);
    times_row(partner_, dim, values_[uint32_t(middle)], pitch_, sin_, count, middle);
    times_row(partner_[uint32_t(middle)], dim, values_, pitch_, sin_[uint32_t(middle)], count, middle);
    PipeBarrier<PIPE_V>();
    round(turned_, all);
    round(partner_, all);
    Add(turned_, turned_, partner_, all);
    PipeBarrier<PIPE_V>();
    if (dim == pitch_) {
      narrow(out, turned_, all);
    } else {
      for (int32_t i = 0; i < count; ++i) narrow(out[uint32_t(i * pitch_)], turned_[uint32_t(i * dim)], dim);
    }
    PipeBarrier<PIPE_V>();
  }

  __aicore__ inline void turn_rows(const LocalTensor<T>& out, int32_t count) {
    const int32_t dim = tiling_.rotary_dim;
    for (int32_t i = 0; i < count; ++i) {
      const LocalTensor<float> values = values_[uint32_t(i * pitch_)];
      if constexpr (kOrders) Gather(turned_, values, order_at_, 0, uint32_t(dim));
      Gather(partner_, values, partner_at_, 0, uint32_t(dim));
      PipeBarrier<PIPE_V>();
      if constexpr (kOrders) Mul(turned_, turned_, cos_, dim);
      else Mul(turned_, values, cos_, dim);
      Mul(partner_, partner_, sin_, dim);
      PipeBarrier<PIPE_V>();
      round(turned_, dim);
      round(partner_, dim);
      Add(turned_, turned_, partner_, dim);
      PipeBarrier<PIPE_V>();
      narrow(out[uint32_t(i * pitch_)], turned_, dim);
      PipeBarrier<PIPE_V>();
    }
  }

  const RopeTiling& tiling_;
  int32_t pitch_;
  TPipe pipe_;
  RowReader<T> in_;
  StridedWriter<T> out_;
  GlobalTensor<Bits<Table>> cos_table_, sin_table_;
  GlobalTensor<Position> positions_;
  TQue<TPosition::VECIN, 2> in_queue_, table_queue_;
  TQue<TPosition::VECOUT, 2> out_queue_;
  TBuf<TPosition::VECCALC> value_buffer_, line_buffer_, offset_buffer_, turned_buffer_, rounded_buffer_;
  TBuf<TPosition::VECCALC> square_buffer_, small_buffer_;  // of norms
  RowWeights<Element<C::weight>, C::form> weights_;
  LocalTensor<float> values_, cos_, sin_, sign_, turned_, partner_, column_;
  LocalTensor<uint32_t> order_at_, partner_at_, column_at_;
  LocalTensor<T> rounded_;
};

template <typename Config>
__aicore__ inline void rotary_embedding(GM_ADDR in, GM_ADDR out, GM_ADDR cos, GM_ADDR sin, GM_ADDR positions,
                                        GM_ADDR weight, const RopeTiling& tiling) {
  Rope<Config> kernel(in, out, cos, sin, positions, weight, tiling);
  kernel.run();
}

}  // namespace deepinfer::npu
