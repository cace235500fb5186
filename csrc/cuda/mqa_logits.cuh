// The index logits of sparse attention on Hopper: for each query and token, the products of all heads with the one key,
// cut off below zero, weighted and summed over the heads.
//
// Keys take the rows of the matrix unit and the heads of one to four neighbouring queries its columns, at most 128.
// One thread drives the copy engine: it brings the heads of the queries of a work item once and then a ring of stages
// of 128 keys, page by page where they are paged. Each of two warpgroups multiplies 64 of the keys. A warpgroup has two
// sets of products: while the matrix unit makes one, the other is cut off, weighted and summed, over the columns of a
// thread and then over four lanes. That takes about half as long, so that the matrix unit is the bound.
#pragma once

#include "hopper.cuh"
#include "mqa_logits_config.h"
#include "wgmma.cuh"

namespace deepinfer {

constexpr int kLogitDepth = 128, kLogitKeys = 128, kLogitStages = 8, kLogitThreads = 384;

template <MqaLogitsConfig c>
struct LogitShared {
  static constexpr int columns = c.queries * c.heads;
  char q[2][columns * kLogitDepth];
  char k[kLogitStages][kLogitKeys * kLogitDepth];
  uint64_t q_full[2], q_empty[2], k_full[kLogitStages], k_empty[kLogitStages];
};

// A block of neighbouring queries and a chunk of the tokens, of which [first, last) are wanted by any of the queries.
// `first` is a multiple of the keys of a stage.
template <MqaLogitsConfig c>
struct LogitItem {
  int row, begin, end, first, last;

  DEVICE LogitItem(const MqaLogitsArgs& args, int chunks, int i) {
    const int tokens = int(args.tokens);
    row = i / chunks * c.queries;
    begin = i % chunks * int(args.chunk);
    end = begin + int(args.chunk) < tokens ? begin + int(args.chunk) : tokens;
    first = end;
    last = begin;
    int low[c.queries], high[c.queries];
#pragma unroll
    for (int n = 0; n < c.queries; ++n) range(args, n, low[n], high[n]);  // all on their way at once
#pragma unroll
    for (int n = 0; n < c.queries; ++n) {
      const bool any = low[n] < high[n];
      first = any && low[n] < first ? low[n] : first;
      last = any && high[n] > last ? high[n] : last;
    }
    if (first < begin) first = begin;
    if (last > end) last = end;
    first = first / kLogitKeys * kLogitKeys;
  }

  // The tokens that query n of the block wants.
  DEVICE void range(const MqaLogitsArgs& args, int n, int& low, int& high) const {
    const bool there = row + n < args.rows;
    low = there && args.begins ? args.begins[row + n] : 0;
    high = there ? args.ends[row + n] : 0;
    if (low < 0) low = 0;
  }
  DEVICE int stages() const { return first < last ? (last - first + kLogitKeys - 1) / kLogitKeys : 0; }
};

// The page of a token, or -1.
DEVICE int page_of(const MqaLogitsArgs& args, int row, int token) {
  const int page = args.page_table[row / args.table_rows * args.table_stride + token / args.page_size];
  return page < 0 || page >= args.pages ? -1 : page;
}

template <MqaLogitsConfig c>
DEVICE void load_keys(const MqaLogitsKernelArgs& args, const LogitItem<c>& item, int token, char* to, uint64_t* full) {
  const MqaLogitsArgs& problem = args.problem;
  for (int i = 0; i < kLogitKeys; i += c.box) {
    int page = 0, at = token + i;
    if constexpr (c.paged) {
      page = at < item.last ? page_of(problem, item.row, at) : -1;
      if (page < 0) page = int(problem.pages);  // outside: zeros
      at %= int(problem.page_size);
    }
    tensor_load(to + i * kLogitDepth, args.k, 0, at, page, full);
  }
}

template <int stages>
DEVICE void advance(int& stage, uint32_t& parity) {
  if (++stage == stages) {
    stage = 0;
    parity ^= 1;
  }
}

template <MqaLogitsConfig c>
DEVICE void load_items(const MqaLogitsKernelArgs& args, LogitShared<c>& shared, int chunks, int items) {
  int stage = 0, buffer = 0;
  uint32_t parity = 0, q_parity = 0;
  for (int i = blockIdx.x; i < items; i += gridDim.x) {
    const LogitItem<c> item(args.problem, chunks, i);
    const int stages = item.stages();
    if (stages == 0) continue;
    wait_barrier(&shared.q_empty[buffer], q_parity ^ 1);
    expect_bytes(&shared.q_full[buffer], sizeof(shared.q[0]));
    tensor_load(shared.q[buffer], args.q, 0, item.row * c.heads, &shared.q_full[buffer]);
    advance<2>(buffer, q_parity);
    for (int s = 0; s < stages; ++s) {
      wait_barrier(&shared.k_empty[stage], parity ^ 1);
      expect_bytes(&shared.k_full[stage], sizeof(shared.k[0]));
      load_keys<c>(args, item, item.first + s * kLogitKeys, shared.k[stage], &shared.k_full[stage]);
      advance<kLogitStages>(stage, parity);
    }
  }
}

// max(0, x) that keeps NaN.
DEVICE float cut_off(float x) {
  float y;
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
  return y;
}

DEVICE float no_logit() { return __uint_as_float(0xff800000u); }

// What a warpgroup does with the keys of one work item.
template <MqaLogitsConfig c>
class LogitRows {
 public:
  static constexpr int columns = LogitShared<c>::columns;
  using Products = float[columns / 2];

  DEVICE LogitRows(const MqaLogitsArgs& args, LogitShared<c>& shared, int& stage, uint32_t& parity)
      : args_(args), shared_(shared), stage_(stage), parity_(parity) {}

  DEVICE void run(const LogitItem<c>& item, const char* q) {
    const int lane = threadIdx.x % 32, query = lane % 4;
    item_ = &item;
    q_ = q;
#pragma unroll
    for (int j = 0; j < columns / 8; ++j)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int column = j * 8 + lane % 4 * 2 + i;
        const bool there = item.row + column / c.heads < args_.rows;
        weights_[j * 2 + i] = there ? args_.weights[int64_t(item.row) * c.heads + column] : 0.f;
      }
    low_ = high_ = 0;
    if (query < c.queries) item.range(args_, query, low_, high_);
    key_ = item.first + threadIdx.x / 32 * 16 + lane / 4;
    Products products[2];
    const int stages = item.stages();
    issue(products[0]);
    int s = 0;
    for (; s + 2 < stages; s += 2) {
      finish(products[0], &products[1]);
      finish(products[1], &products[0]);
    }
    if (s + 1 < stages) {
      finish(products[0], &products[1]);
      finish(products[1], nullptr);
    } else {
      finish(products[0], nullptr);
    }
  }

 private:
  DEVICE void issue(Products& products) {
    wait_barrier(&shared_.k_full[stage_], parity_);
    const uint64_t keys = matrix_descriptor<true>(shared_.k[stage_] + threadIdx.x / 128 * 64 * kLogitDepth, 0);
    const uint64_t heads = matrix_descriptor<true>(q_, 0);
    begin_products();
    multiply<Operand::e4m3, columns, true, true, false>(products, keys, heads);
#pragma unroll
    for (int k = 32; k < kLogitDepth; k += 32)
      multiply<Operand::e4m3, columns, true, true>(products, keys + (k >> 4), heads + (k >> 4));
    commit_products();
  }

  DEVICE float scale_of(int token) const {
    if (token >= item_->last) return 0.f;
    if constexpr (!c.paged) return args_.k_scale[token];
    const int page = page_of(args_, item_->row, token);
    if (page < 0) return __uint_as_float(0x7fffffffu);
    const uint8_t* scales = args_.k + page * args_.page_bytes + args_.page_size * kLogitDepth;
    return reinterpret_cast<const float*>(scales)[token % args_.page_size];
  }

  // The products of the oldest stage, while those of the next are made.
  DEVICE void finish(Products& products, Products* next) {
    const int stage = stage_;
    advance<kLogitStages>(stage_, parity_);
    if (next) issue(*next);
    const float scale[2] = {scale_of(key_), scale_of(key_ + 8)};
    if (next) wait_products<1>();
    else wait_products<0>();
#pragma unroll
    for (int i = 0; i < columns / 2; ++i) asm volatile("" : "+f"(products[i]) :: "memory");  // read no earlier
    if (threadIdx.x % 32 == 0) arrive(&shared_.k_empty[stage]);
    float mine[2] = {};
#pragma unroll
    for (int n = 0; n < c.queries; ++n) {
      float sums[2] = {};
#pragma unroll
      for (int j = 0; j < c.heads / 8; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = n * (c.heads / 8) + j;
          sums[i / 2] = fmaf(cut_off(products[at * 4 + i]), weights_[at * 2 + i % 2], sums[i / 2]);
        }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        sums[i] += __shfl_xor_sync(0xffffffff, sums[i], 1);
        sums[i] += __shfl_xor_sync(0xffffffff, sums[i], 2);
        if (threadIdx.x % 4 == n) mine[i] = sums[i];
      }
    }
    const int query = threadIdx.x % 4;
    if (query < c.queries && item_->row + query < args_.rows) {
      float* out = args_.out + (item_->row + query) * args_.tokens;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int token = key_ + i * 8;
        if (token < item_->end) out[token] = token >= low_ && token < high_ ? mine[i] * scale[i] : no_logit();
      }
    }
    key_ += kLogitKeys;
  }

  const MqaLogitsArgs& args_;
  LogitShared<c>& shared_;
  int& stage_;
  uint32_t& parity_;
  const LogitItem<c>* item_;
  const char* q_;
  float weights_[columns / 4];
  int low_, high_, key_;
};

// The tokens of a chunk that no query of the block wants.
template <MqaLogitsConfig c>
DEVICE void fill_rest(const MqaLogitsArgs& args, const LogitItem<c>& item) {
  const int stages = item.stages(), first = stages ? item.first : item.end;
  const int last = stages ? item.first + stages * kLogitKeys : item.end;
  for (int n = 0; n < c.queries && item.row + n < args.rows; ++n) {
    float* out = args.out + (item.row + n) * args.tokens;
    for (int t = item.begin + threadIdx.x; t < first; t += 256) out[t] = no_logit();
    for (int t = last + threadIdx.x; t < item.end; t += 256) out[t] = no_logit();
  }
}

template <MqaLogitsConfig c>
DEVICE void mqa_logits(const MqaLogitsKernelArgs& args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ char dynamic_shared[];
  LogitShared<c>& shared =
      *reinterpret_cast<LogitShared<c>*>(dynamic_shared + (0u - shared_address(dynamic_shared)) % 1024);
  const MqaLogitsArgs& problem = args.problem;
  const int warps = 8;
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) {
      init_barrier(&shared.q_full[i], 1);
      init_barrier(&shared.q_empty[i], warps);
    }
    for (int i = 0; i < kLogitStages; ++i) {
      init_barrier(&shared.k_full[i], 1);
      init_barrier(&shared.k_empty[i], warps);
    }
  }
  __syncthreads();
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int chunks = int((problem.tokens + problem.chunk - 1) / problem.chunk);
  const int items = int((problem.rows + c.queries - 1) / c.queries) * chunks;
  if (threadIdx.x >= 256) {
    give_registers_back<56>();
    if (threadIdx.x == 256) load_items<c>(args, shared, chunks, items);
    return;
  }
  take_registers<224>();
  int stage = 0, buffer = 0;
  uint32_t parity = 0, q_parity = 0;
  LogitRows<c> rows(problem, shared, stage, parity);
  for (int i = blockIdx.x; i < items; i += gridDim.x) {
    const LogitItem<c> item(problem, chunks, i);
    fill_rest<c>(problem, item);
    if (item.stages() == 0) continue;
    wait_barrier(&shared.q_full[buffer], q_parity);
    rows.run(item, shared.q[buffer]);
    if (threadIdx.x % 32 == 0) arrive(&shared.q_empty[buffer]);
    advance<2>(buffer, q_parity);
  }
#endif
}

}  // namespace deepinfer
