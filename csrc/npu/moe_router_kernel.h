// Router of a mixture of experts. Tiles of tokens are dealt to the cores; the logits of the next tile arrive while this
// one is worked on. Scores of a tile are computed together, in float. Then one expert is chosen for all tokens of the
// tile at a time: a reduction with index a token, whose result goes through the scalar unit, which takes the key out.
// The lower of two equal indices is what the instruction is documented to give. Bound by these rounds: topk reductions
// and a handful of scalar accesses a token.
//
// A row with a key that is infinite or NaN, which reductions do not order as the op does, is ranked by the scalar unit
// on integers that do: slow, right, and rare. So are groups that do not start at 32 bytes.
//
// Config: `dtype`, `weights` (DType), `score` (Score), `wide` (int): ids are int64.
#pragma once

#include "moe_router_tiling.h"
#include "rows.h"

namespace deepinfer::npu {

template <typename C>
class MoeRouter {
  using T = Element<C::dtype>;
  using W = Element<C::weights>;
  using Id = Wide<C::wide != 0>;
  static constexpr int32_t kLanes = 64;
  static constexpr int32_t kStep = 8;                 // floats from token to token, or group to group, of reductions
  static constexpr int32_t kInfinity = int32_t(0xff800000);  // the negative one: below all keys of a finite row
  static constexpr int32_t kTaken = int32_t(0x80000000), kNaN = 0x7fffffff;  // below and above all ranks
  static constexpr int kScratch = scratch_of(C::score);

 public:
  __aicore__ inline MoeRouter(GM_ADDR logits, GM_ADDR bias, GM_ADDR weights, GM_ADDR ids,
                              const MoeRouterTiling& tiling)
      : tiling_(tiling), group_(tiling.experts / tiling.groups) {
    const int64_t results = tiling.rows.count * tiling.topk;
    logits_.init(logits, tiling.logits_bytes, tiling.rows);
    weights_.init(weights, results * int64_t(sizeof(W)), tiling.topk);
    // An id of 64 bits is two numbers of 32 to a copy.
    ids_.init(ids, results * int64_t(sizeof(Id)), tiling.topk * int64_t(sizeof(Id) / sizeof(int32_t)));
    bias_.SetGlobalBuffer((__gm__ float*)bias, tiling.biased ? uint64_t(tiling.experts) : 0);
    const uint32_t elements = uint32_t(tiling.tokens * tiling.pitch), line = uint32_t(tiling.pitch);
    const uint32_t choices = uint32_t(tiling.tokens * tiling.choices), small = uint32_t(tiling.tokens * kStep);
    const bool aligned = group_ % kStep == 0;
    pipe_.InitBuffer(logit_queue_, uint8_t(tiling.buffers), elements * sizeof(T));
    pipe_.InitBuffer(weight_queue_, 1, choices * sizeof(W));
    pipe_.InitBuffer(id_buffer_, choices * sizeof(Id));
    pipe_.InitBuffer(float_buffer_, (2 + kScratch) * elements * sizeof(float));
    pipe_.InitBuffer(chosen_buffer_, choices * sizeof(float));
    pipe_.InitBuffer(best_buffer_, 2 * small * sizeof(float));
    pipe_.InitBuffer(work_buffer_, uint32_t(tiling.work) * sizeof(float));
    pipe_.InitBuffer(group_buffer_, uint32_t(tiling.group_keys > 0 && aligned ? tiling.groups : 1) * kBlockBytes);
    pipe_.InitBuffer(rank_buffer_, uint32_t(whole_blocks<int32_t>(tiling.groups)) * sizeof(int32_t));
    scores_ = float_buffer_.template Get<float>();
    keys_ = scores_[elements];
    for (int i = 0; i < kScratch; ++i) scratch_[i] = scores_[uint32_t(2 + i) * elements];
    chosen_ = chosen_buffer_.template Get<float>();
    best_ = best_buffer_.template Get<float>();
    bad_ = best_[small];
    work_ = work_buffer_.template Get<float>();
    of_group_ = group_buffer_.template Get<float>();
    group_rank_ = rank_buffer_.template Get<int32_t>();
    out_ids_ = id_buffer_.template Get<Id>();
    if (tiling.biased) {
      pipe_.InitBuffer(bias_buffer_, line * sizeof(float));
      bias_row_ = bias_buffer_.template Get<float>();
    }
  }

  __aicore__ inline void run() {
    if (tiling_.biased) load_bias();
    const int64_t tiles = (tiling_.rows.count + tiling_.tokens - 1) / tiling_.tokens;
    const bool ahead = tiling_.buffers > 1;
    int64_t tile = GetBlockIdx();
    if (ahead && tile < tiles) load(tile);
    for (; tile < tiles; tile += GetBlockNum()) {
      const int64_t next = ahead ? tile + GetBlockNum() : tile;
      if (next < tiles) load(next);
      route(tile * tiling_.tokens, tokens_of(tile));
    }
  }

 private:
  __aicore__ inline int32_t tokens_of(int64_t tile) const {
    const int64_t left = tiling_.rows.count - tile * tiling_.tokens;
    return left < tiling_.tokens ? int32_t(left) : tiling_.tokens;
  }
  __aicore__ inline uint32_t at(int32_t token, int32_t expert = 0) const {
    return uint32_t(token * tiling_.pitch + expert);
  }

  __aicore__ inline void load(int64_t tile) {
    const LocalTensor<T> logits = logit_queue_.template AllocTensor<T>();
    logits_.read(logits, tile * tiling_.tokens, tokens_of(tile), 0, tiling_.experts, tiling_.pitch);
    logit_queue_.EnQue(logits);
  }

  // No key is a negative zero: 0 is added here.
  __aicore__ inline void load_bias() {
    DataCopyExtParams params;
    params.blockLen = uint32_t(tiling_.experts) * uint32_t(sizeof(float));
    DataCopyPad(bias_row_, bias_, params, DataCopyPadExtParams<float>{});
    hand_over<HardEvent::MTE2_V>(pipe_);
    Adds(bias_row_, bias_row_, 0.0f, tiling_.experts);
    PipeBarrier<PIPE_V>();
  }

  __aicore__ inline void route(int64_t row, int32_t tokens) {
    LocalTensor<T> logits = logit_queue_.template DeQue<T>();
    for (int32_t i = 0; i < tokens; ++i) widen(scores_[at(i)], logits[at(i)], whole_blocks<T>(tiling_.experts));
    logit_queue_.FreeTensor(logits);
    PipeBarrier<PIPE_V>();
    if (!tiling_.after) {
      for (int32_t i = 0; i < tokens; ++i) score(scores_[at(i)], at(i), tiling_.experts);
    }
    make_keys(tokens);
    for (int32_t i = 0; tiling_.group_keys > 0 && i < tokens; ++i) drop_groups(i);
    choose(tokens);
    write(row, tokens);
  }

  // ---- scores, of n values in place; scratch from `offset` on ----

  __aicore__ inline void score(const LocalTensor<float>& x, uint32_t offset, int32_t n) {
    const LocalTensor<float> a = scratch_[0][offset];
    if constexpr (C::score == Score::softmax) {
      ReduceMax(best_, x, work_, n);
      hand_over<HardEvent::V_S>(pipe_);
      Adds(x, x, -best_.GetValue(0), n);
      PipeBarrier<PIPE_V>();
      Exp(x, x, n);
      PipeBarrier<PIPE_V>();
      Muls(a, x, 1.0f, n);
      PipeBarrier<PIPE_V>();
      const LocalTensor<float> sum = best_[kStep / 2];
      ReduceSum(sum, a, work_, fold<false>(a, n));
      hand_over<HardEvent::V_S>(pipe_);
      Duplicate(a, sum.GetValue(0), n);
      PipeBarrier<PIPE_V>();
      Div(x, x, a, n);
      hand_over<HardEvent::S_V>(pipe_);
    } else if constexpr (C::score == Score::sigmoid) {
      Muls(x, x, -1.0f, n);
      Duplicate(a, 1.0f, n);
      PipeBarrier<PIPE_V>();
      Exp(x, x, n);
      PipeBarrier<PIPE_V>();
      Adds(x, x, 1.0f, n);
      PipeBarrier<PIPE_V>();
      Div(x, a, x, n);
    } else {
      sqrt_softplus(x, a, scratch_[1][offset], keys_[offset], n);
    }
    PipeBarrier<PIPE_V>();
  }

  // softplus(x) = max(x, 0) + log(1 + y) with y = exp(-|x|), and log(1 + y) = log(u) + (y - (u - 1)) / u with the rounded
  // u = 1 + y: nothing overflows, and NaN stays one whatever the maximum makes of it.
  __aicore__ inline void sqrt_softplus(const LocalTensor<float>& x, const LocalTensor<float>& y,
                                       const LocalTensor<float>& u, const LocalTensor<float>& rest, int32_t n) {
    Abs(y, x, n);
    PipeBarrier<PIPE_V>();
    Muls(y, y, -1.0f, n);
    Maxs(x, x, 0.0f, n);
    PipeBarrier<PIPE_V>();
    Exp(y, y, n);
    PipeBarrier<PIPE_V>();
    Adds(u, y, 1.0f, n);
    PipeBarrier<PIPE_V>();
    Adds(rest, u, -1.0f, n);
    PipeBarrier<PIPE_V>();
    Sub(rest, y, rest, n);
    PipeBarrier<PIPE_V>();
    Div(rest, rest, u, n);
    Ln(u, u, n);
    PipeBarrier<PIPE_V>();
    Add(u, u, rest, n);
    PipeBarrier<PIPE_V>();
    Add(x, x, u, n);
    PipeBarrier<PIPE_V>();
    Sqrt(x, x, n);
  }

  // ---- keys ----

  // scores + bias; bad_ of a token is 0 if all its keys are finite.
  __aicore__ inline void make_keys(int32_t tokens) {
    const int32_t n = tiling_.experts;
    for (int32_t i = 0; i < tokens; ++i) {
      if (tiling_.biased) Add(keys_[at(i)], scores_[at(i)], bias_row_, n);
      else Adds(keys_[at(i)], scores_[at(i)], 0.0f, n);
    }
    PipeBarrier<PIPE_V>();
    for (int32_t i = 0; i < tokens; ++i) {
      const LocalTensor<float> zeros = scratch_[0][at(i)];
      Muls(zeros, keys_[at(i)], 0.0f, n);
      PipeBarrier<PIPE_V>();
      ReduceSum(bad_[uint32_t(i * kStep)], zeros, work_, fold<false>(zeros, n));
      PipeBarrier<PIPE_V>();
    }
    hand_over<HardEvent::V_S>(pipe_);
  }

  __aicore__ inline bool is_finite(int32_t token) const { return bad_.GetValue(uint32_t(token * kStep)) == 0.0f; }

  // In the order of the keys, NaN of any sign above all.
  static __aicore__ inline int32_t rank_of(int32_t bits) {
    if ((bits & kNaN) > 0x7f800000) return kNaN;
    return bits ^ ((bits >> 31) & kNaN);
  }

  // ---- groups ----

  __aicore__ inline void drop_groups(int32_t token) {
    const bool whole = group_ % kStep == 0 && is_finite(token);
    if (whole) rank_groups(token);
    else rank_groups_one_by_one(token);
    // What is taken is kept.
    for (int32_t round = 0; round < tiling_.kept_groups; ++round) take_first(group_rank_, tiling_.groups);
    const LocalTensor<int32_t> bits = keys_.template ReinterpretCast<int32_t>();
    hand_over<HardEvent::S_V>(pipe_);
    for (int32_t group = 0; group < tiling_.groups; ++group) {
      if (group_rank_.GetValue(uint32_t(group)) == kTaken) continue;
      const int32_t first = group * group_;
      if (whole) {
        Duplicate(bits[at(token, first)], kInfinity, group_);
      } else {
        for (int32_t i = 0; i < group_; ++i) bits.SetValue(at(token, first + i), dropped(token));
      }
    }
    hand_over<HardEvent::S_V>(pipe_);
    PipeBarrier<PIPE_V>();
    hand_over<HardEvent::V_S>(pipe_);
  }

  // Where ranks are made of the keys, a negative zero, which no key is, stands for one that is out of the race.
  __aicore__ inline int32_t dropped(int32_t token) const { return is_finite(token) ? kInfinity : kTaken; }

  // Two reductions a group, for the second without the greatest.
  __aicore__ inline void rank_groups(int32_t token) {
    const LocalTensor<uint32_t> places = of_group_.template ReinterpretCast<uint32_t>();
    const LocalTensor<int32_t> bits = keys_.template ReinterpretCast<int32_t>();
    const LocalTensor<float> sums = group_rank_.template ReinterpretCast<float>();
    for (int32_t g = 0; g < tiling_.groups; ++g) {
      ReduceMax(of_group_[uint32_t(g * kStep)], keys_[at(token, g * group_)], work_, group_, true);
      PipeBarrier<PIPE_V>();
    }
    hand_over<HardEvent::V_S>(pipe_);
    if (tiling_.group_keys > 1) {
      for (int32_t g = 0; g < tiling_.groups; ++g)
        bits.SetValue(at(token, g * group_) + places.GetValue(uint32_t(g * kStep + 1)), kInfinity);
      hand_over<HardEvent::S_V>(pipe_);
      for (int32_t g = 0; g < tiling_.groups; ++g) {
        ReduceMax(of_group_[uint32_t(g * kStep + kStep / 2)], keys_[at(token, g * group_)], work_, group_);
        PipeBarrier<PIPE_V>();
      }
      hand_over<HardEvent::V_S>(pipe_);
    }
    for (int32_t g = 0; g < tiling_.groups; ++g) {
      float sum = of_group_.GetValue(uint32_t(g * kStep));
      if (tiling_.group_keys > 1) {
        keys_.SetValue(at(token, g * group_) + places.GetValue(uint32_t(g * kStep + 1)), sum);
        sum += of_group_.GetValue(uint32_t(g * kStep + kStep / 2));
      }
      sums.SetValue(uint32_t(g), sum);
      group_rank_.SetValue(uint32_t(g), rank_of(group_rank_.GetValue(uint32_t(g))));
    }
  }

  __aicore__ inline void rank_groups_one_by_one(int32_t token) {
    const LocalTensor<int32_t> bits = keys_.template ReinterpretCast<int32_t>();
    const LocalTensor<float> sums = group_rank_.template ReinterpretCast<float>();
    for (int32_t g = 0; g < tiling_.groups; ++g) {
      int32_t best = kTaken, next = kTaken, best_at = 0, next_at = 0;
      for (int32_t i = g * group_; i < (g + 1) * group_; ++i) {
        const int32_t rank = rank_of(bits.GetValue(at(token, i)));
        if (rank > best) {
          next = best, next_at = best_at;
          best = rank, best_at = i;
        } else if (rank > next) {
          next = rank, next_at = i;
        }
      }
      float sum = keys_.GetValue(at(token, best_at));
      if (tiling_.group_keys > 1) sum += keys_.GetValue(at(token, next_at));
      sums.SetValue(uint32_t(g), sum);
      group_rank_.SetValue(uint32_t(g), rank_of(group_rank_.GetValue(uint32_t(g))));
    }
  }

  // Takes out the first of the greatest ranks and returns where it was.
  __aicore__ inline int32_t take_first(const LocalTensor<int32_t>& ranks, int32_t n) const {
    int32_t best = kTaken, found = 0;
    for (int32_t i = 0; i < n; ++i) {
      const int32_t rank = ranks.GetValue(uint32_t(i));
      if (rank > best) best = rank, found = i;
    }
    ranks.SetValue(uint32_t(found), kTaken);
    return found;
  }

  // ---- experts ----

  __aicore__ inline void pick(int32_t token, int32_t choice, int32_t expert) {
    const uint32_t to = uint32_t(token * tiling_.choices + choice);
    chosen_.SetValue(to, scores_.GetValue(at(token, expert)));
    out_ids_.SetValue(to, Id(expert));
  }

  __aicore__ inline void choose(int32_t tokens) {
    const LocalTensor<int32_t> bits = keys_.template ReinterpretCast<int32_t>();
    const LocalTensor<uint32_t> places = best_.template ReinterpretCast<uint32_t>();
    Duplicate(chosen_, 0.0f, tokens * tiling_.choices);
    hand_over<HardEvent::V_S>(pipe_);
    hand_over<HardEvent::MTE3_S>(pipe_);  // the ids of the last tile are out
    for (int32_t choice = 0; choice < tiling_.topk; ++choice) {
      for (int32_t i = 0; i < tokens; ++i) {
        if (!is_finite(i)) continue;
        ReduceMax(best_[uint32_t(i * kStep)], keys_[at(i)], work_, tiling_.experts, true);
        PipeBarrier<PIPE_V>();
      }
      hand_over<HardEvent::V_S>(pipe_);
      for (int32_t i = 0; i < tokens; ++i) {
        if (!is_finite(i)) continue;
        const int32_t expert = int32_t(places.GetValue(uint32_t(i * kStep + 1)));
        bits.SetValue(at(i, expert), kInfinity);
        pick(i, choice, expert);
      }
      hand_over<HardEvent::S_V>(pipe_);
    }
    for (int32_t i = 0; i < tokens; ++i)
      if (!is_finite(i)) choose_one_by_one(i);
    hand_over<HardEvent::S_V>(pipe_);  // and to the copies of ids, which follow those of weights
  }

  __aicore__ inline void choose_one_by_one(int32_t token) {
    const LocalTensor<int32_t> ranks = keys_.template ReinterpretCast<int32_t>()[at(token)];
    for (int32_t i = 0; i < tiling_.experts; ++i) {
      const int32_t bits = ranks.GetValue(uint32_t(i));
      ranks.SetValue(uint32_t(i), bits == kTaken ? kTaken : rank_of(bits));
    }
    for (int32_t choice = 0; choice < tiling_.topk; ++choice)
      pick(token, choice, take_first(ranks, tiling_.experts));
  }

  // ---- weights ----

  __aicore__ inline void write(int64_t row, int32_t tokens) {
    const int32_t pitch = tiling_.choices, elements = tokens * pitch;
    if (tiling_.after) {
      for (int32_t i = 0; i < tokens; ++i) score(chosen_[uint32_t(i * pitch)], at(i), tiling_.topk);
    }
    if (tiling_.renormalize) renormalize(tokens);
    Muls(chosen_, chosen_, tiling_.scale, elements);
    PipeBarrier<PIPE_V>();
    LocalTensor<W> weights = weight_queue_.template AllocTensor<W>();
    narrow(weights, chosen_, elements);
    PipeBarrier<PIPE_V>();
    weight_queue_.EnQue(weights);
    weights = weight_queue_.template DeQue<W>();
    weights_.write(weights, row, tokens, 0, tiling_.topk, pitch);
    weight_queue_.FreeTensor(weights);
    constexpr int32_t kWords = sizeof(Id) / sizeof(int32_t);
    ids_.write(out_ids_.template ReinterpretCast<int32_t>(), row, tokens, 0, tiling_.topk * kWords, pitch * kWords);
  }

  // Over max(sum + eps, least), of which NaN stays one.
  __aicore__ inline void renormalize(int32_t tokens) {
    const int32_t pitch = tiling_.choices, n = tiling_.topk;
    const LocalTensor<float> sums = scratch_[0];
    for (int32_t i = 0; i < tokens; ++i) {
      const LocalTensor<float> terms = sums[at(i)];
      Muls(terms, chosen_[uint32_t(i * pitch)], 1.0f, n);
      PipeBarrier<PIPE_V>();
      ReduceSum(best_[uint32_t(i * kStep)], terms, work_, fold<false>(terms, n));
      PipeBarrier<PIPE_V>();
    }
    hand_over<HardEvent::V_S>(pipe_);
    for (int32_t i = 0; i < tokens; ++i) {
      float sum = best_.GetValue(uint32_t(i * kStep)) + tiling_.renorm_eps;
      if (sum < tiling_.renorm_min) sum = tiling_.renorm_min;
      Duplicate(sums[at(i)], sum, n);
    }
    PipeBarrier<PIPE_V>();
    for (int32_t i = 0; i < tokens; ++i) {
      const LocalTensor<float> weights = chosen_[uint32_t(i * pitch)];
      Div(weights, weights, sums[at(i)], n);
    }
    hand_over<HardEvent::S_V>(pipe_);
    PipeBarrier<PIPE_V>();
  }

  const MoeRouterTiling& tiling_;
  int32_t group_;  // experts of a group
  TPipe pipe_;
  RowReader<T> logits_;
  RowWriter<W> weights_;
  RowWriter<int32_t> ids_;
  GlobalTensor<float> bias_;
  TQue<TPosition::VECIN, 2> logit_queue_;
  TQue<TPosition::VECOUT, 1> weight_queue_;
  TBuf<TPosition::VECCALC> float_buffer_, chosen_buffer_, best_buffer_, work_buffer_, group_buffer_, rank_buffer_;
  TBuf<TPosition::VECCALC> bias_buffer_, id_buffer_;
  LocalTensor<float> scores_, keys_, scratch_[kScratch], chosen_, best_, bad_, work_, of_group_, bias_row_;
  LocalTensor<int32_t> group_rank_;
  LocalTensor<Id> out_ids_;
};

template <typename Config>
__aicore__ inline void moe_router(GM_ADDR logits, GM_ADDR bias, GM_ADDR weights, GM_ADDR ids,
                                  const MoeRouterTiling& tiling) {
  MoeRouter<Config> kernel(logits, bias, weights, ids, tiling);
  kernel.run();
}

}  // namespace deepinfer::npu
