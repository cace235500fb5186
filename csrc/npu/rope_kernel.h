// Rotary embeddings of the rows of q or of k. The rows of a group (the heads of a token) share one row of the tables, which
// is prepared once: widened, brought to one column for each element, and the sine multiplied by the sign that its element
// has. Then every style is out = x[order] * cos + x[partner] * sin, where order and partner are fixed permutations of a
// row. Tiles of rows of one group are dealt to the cores. Bound by the vector pipe: two gathers a row, and gathers are slow.
//
// Config: `dtype`, `table` (DType), `style` (RopeStyle), `wide` (int): positions are int64.
#pragma once

#include "rope_tiling.h"
#include "rows.h"

namespace deepinfer::npu {

template <typename C>
class Rope {
  using T = Element<C::dtype>;
  using Table = Element<C::table>;
  using Position = Wide<C::wide != 0>;
  static constexpr bool kRounds = sizeof(T) < sizeof(float) && C::dtype == C::table;  // the products too
  static constexpr bool kOrders = C::style == RopeStyle::interleaved_to_half;

 public:
  __aicore__ inline Rope(GM_ADDR in, GM_ADDR out, GM_ADDR cos, GM_ADDR sin, GM_ADDR positions,
                         const RopeTiling& tiling)
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
    pipe_.InitBuffer(line_buffer_, 6 * line * sizeof(float));
    pipe_.InitBuffer(offset_buffer_, 3 * line * sizeof(uint32_t));
    pipe_.InitBuffer(rounded_buffer_, line * sizeof(T));
    values_ = value_buffer_.template Get<float>();
    cos_ = line_buffer_.template Get<float>();
    sin_ = cos_[line];
    sign_ = cos_[2 * line];
    turned_ = cos_[3 * line];
    partner_ = cos_[4 * line];
    column_ = cos_[5 * line];
    order_at_ = offset_buffer_.template Get<uint32_t>();
    partner_at_ = order_at_[line];
    column_at_ = order_at_[2 * line];
    rounded_ = rounded_buffer_.template Get<T>();
  }

  __aicore__ inline void run() {
    make_permutations();
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

  __aicore__ inline void round(const LocalTensor<float>& values) {
    if constexpr (kRounds) {
      narrow(rounded_, values, tiling_.rotary_dim);
      PipeBarrier<PIPE_V>();
      widen(values, rounded_, tiling_.rotary_dim);
      PipeBarrier<PIPE_V>();
    }
  }

  __aicore__ inline void rotate(int64_t group, int64_t row, int32_t count) {
    const int32_t dim = tiling_.rotary_dim, elements = count * pitch_;
    LocalTensor<T> x = in_queue_.template AllocTensor<T>();
    in_.read(x, row, count, row_offset(tiling_.in_groups, group), tiling_.head_size, pitch_);
    in_queue_.EnQue(x);
    x = in_queue_.template DeQue<T>();
    LocalTensor<T> out = out_queue_.template AllocTensor<T>();
    widen(values_, x, elements);
    if (dim < tiling_.head_size) {  // the rest of a row stays as it is, to the bit
      using Whole = SignedBits<sizeof(T)>;
      Adds(out.template ReinterpretCast<Whole>(), x.template ReinterpretCast<Whole>(), Whole(0), elements);
    }
    PipeBarrier<PIPE_V>();
    in_queue_.FreeTensor(x);
    for (int32_t i = 0; i < count; ++i) {
      const LocalTensor<float> values = values_[uint32_t(i * pitch_)];
      if constexpr (kOrders) Gather(turned_, values, order_at_, 0, uint32_t(dim));
      Gather(partner_, values, partner_at_, 0, uint32_t(dim));
      PipeBarrier<PIPE_V>();
      if constexpr (kOrders) Mul(turned_, turned_, cos_, dim);
      else Mul(turned_, values, cos_, dim);
      Mul(partner_, partner_, sin_, dim);
      PipeBarrier<PIPE_V>();
      round(turned_);
      round(partner_);
      Add(turned_, turned_, partner_, dim);
      PipeBarrier<PIPE_V>();
      narrow(out[uint32_t(i * pitch_)], turned_, dim);
      PipeBarrier<PIPE_V>();
    }
    out_queue_.EnQue(out);
    out = out_queue_.template DeQue<T>();
    out_.write(out, row, count, row_offset(tiling_.out_groups, group), tiling_.head_size, pitch_);
    out_queue_.FreeTensor(out);
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
  TBuf<TPosition::VECCALC> value_buffer_, line_buffer_, offset_buffer_, rounded_buffer_;
  LocalTensor<float> values_, cos_, sin_, sign_, turned_, partner_, column_;
  LocalTensor<uint32_t> order_at_, partner_at_, column_at_;
  LocalTensor<T> rounded_;
};

template <typename Config>
__aicore__ inline void rotary_embedding(GM_ADDR in, GM_ADDR out, GM_ADDR cos, GM_ADDR sin, GM_ADDR positions,
                                        const RopeTiling& tiling) {
  Rope<Config> kernel(in, out, cos, sin, positions, tiling);
  kernel.run();
}

}  // namespace deepinfer::npu
