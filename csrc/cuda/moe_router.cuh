// Mixture-of-experts routers: scores, group limit, top-k and weights in one pass over the logits.
//
// moe_router, up to 512 experts: a warp a token, no barrier. Lane l holds the keys of a run of neighbouring experts, so
// the lowest lane and then the lowest position is the lowest expert, which settles ties. A pick is one warp-wide
// maximum (redux.sync) and a vote; only the lane that won touches its registers. With masked groups the surviving keys
// are first dealt anew over all lanes, through shared memory. At many tokens it is bound by its instructions, about 450
// a token with 256 experts, twice the time of reading the logits; below a thousand tokens by the latency of one token.
//
// moe_router_wide, any number of experts: a block a token, keys in shared memory, a block-wide maximum a pick.
#pragma once

#include "device.cuh"
#include "moe_router_config.h"

namespace deepinfer {

// ---- keys: unsigned integers in the order of the floats they stand for ----

// kTaken is below the key of -inf. x has to come out of an addition: that leaves one NaN, the greatest of all keys, and
// no -0 unless both terms were.
constexpr uint32_t kTaken = 0;

DEVICE uint32_t key_of(float x) {
  const uint32_t bits = __float_as_uint(x);
  return bits ^ (uint32_t(int32_t(bits) >> 31) | 0x80000000u);
}

DEVICE float value_of(uint32_t key) {
  return __uint_as_float(key ^ (int32_t(key) < 0 ? 0x80000000u : 0xffffffffu));
}

DEVICE uint32_t umax(uint32_t a, uint32_t b) { return a > b ? a : b; }
DEVICE uint32_t umin(uint32_t a, uint32_t b) { return a < b ? a : b; }

DEVICE uint32_t warp_max(uint32_t x) {
  uint32_t y;
  asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(y) : "r"(x));
  return y;
}

DEVICE float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffff, x, step);
  return x;
}

// Within one unit in the last place; 0 instead of a denormal result.
DEVICE float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// ---- scores ----

// Softmax is finished by its caller. Softplus is the identity above 20, as torch has it.
template <Score score>
DEVICE float score_of(float x) {
  if constexpr (score == Score::sigmoid) return reciprocal(1.f + expf(-x));
  if constexpr (score == Score::sqrt_softplus) return sqrtf(x > 20.f ? x : log1pf(expf(x)));
  return x;
}

// What renormalisation divides by; NaN stays.
DEVICE float divisor_of(const MoeRouterArgs& args, float sum) {
  sum += args.renorm_eps;
  return sum < args.renorm_min ? args.renorm_min : sum;
}

template <MoeRouterConfig c>
DEVICE void write_pick(const MoeRouterArgs& args, int64_t at, uint32_t expert, float weight) {
  using Weight = Element<c.weights>;
  static_cast<Weight*>(args.weights)[at] = from_float<Weight>(weight);
  if constexpr (c.wide_ids) static_cast<int64_t*>(args.ids)[at] = expert;
  else static_cast<int32_t*>(args.ids)[at] = int32_t(expert);
}

// ---- a warp a token ----

// A lane's keys in descending order, the lower index first among equals.
template <int n>
struct Run {
  uint32_t key[n];
  uint32_t index[n];

  // Exchanges of neighbours only: equals keep their order.
  DEVICE void sort() {
#pragma unroll
    for (int end = n - 1; end > 0; --end)
#pragma unroll
      for (int i = 0; i < end; ++i) {
        const bool swap = key[i] < key[i + 1];
        const uint32_t a = index[i], b = index[i + 1];
        const uint32_t high = umax(key[i], key[i + 1]), low = umin(key[i], key[i + 1]);
        key[i] = high;
        key[i + 1] = low;
        index[i] = swap ? b : a;
        index[i + 1] = swap ? a : b;
      }
  }

  DEVICE void pop() {
#pragma unroll
    for (int i = 0; i + 1 < n; ++i) {
      key[i] = key[i + 1];
      index[i] = index[i + 1];
    }
    key[n - 1] = kTaken;
  }
};

// Takes the greatest topk keys of the warp; lane j returns the index of pick j.
template <int topk, int n>
DEVICE uint32_t pick(Run<n>& run, int lane, uint32_t* picks) {
  run.sort();
#pragma unroll
  for (int j = 0; j < topk; ++j) {
    const uint32_t best = warp_max(run.key[0]);
    const uint32_t holders = __ballot_sync(0xffffffff, run.key[0] == best);
    if (lane == __ffs(holders) - 1) {
      picks[j] = run.index[0];
      run.pop();
    }
  }
  __syncwarp();
  return lane < topk ? picks[lane] : 0;
}

// Bit g is set when group g is kept. A group is the keys of 32 / groups neighbouring lanes.
template <MoeRouterConfig c, int n>
DEVICE uint32_t keep_groups(const uint32_t (&key)[n], int lane) {
  constexpr int lanes = 32 / c.groups;
  uint32_t first = key[0], second = kTaken;
#pragma unroll
  for (int i = 1; i < n; ++i) {
    second = umax(second, umin(first, key[i]));
    first = umax(first, key[i]);
  }
#pragma unroll
  for (int step = lanes / 2; step > 0; step /= 2) {
    const uint32_t other_first = __shfl_xor_sync(0xffffffff, first, step);
    const uint32_t other_second = __shfl_xor_sync(0xffffffff, second, step);
    second = umax(umin(first, other_first), umax(second, other_second));
    first = umax(first, other_first);
  }
  uint32_t group = c.group_score == GroupScore::max ? first : key_of(value_of(first) + value_of(second));
  uint32_t kept = 0;
#pragma unroll
  for (int j = 0; j < c.kept_groups; ++j) {
    const uint32_t best = warp_max(group);
    const int winner = (__ffs(__ballot_sync(0xffffffff, group == best)) - 1) / lanes;
    kept |= 1u << winner;
    if (lane / lanes == winner) group = kTaken;
  }
  return kept;
}

// The keys of the kept groups, in order, dealt evenly over the lanes.
template <MoeRouterConfig c, int n>
DEVICE auto deal(const uint32_t (&key)[n], uint32_t kept, int lane, uint32_t* shared) {
  constexpr int group_size = c.experts / c.groups;
  constexpr int candidates = c.kept_groups * group_size;
  constexpr int m = (candidates + 31) / 32;
#pragma unroll
  for (int i = 0; i < n; ++i) shared[lane * n + i] = key[i];
  __syncwarp();
  // Where the j-th kept group starts among all experts.
  auto start_of_group = [&](int j) {
    uint32_t rest = kept;
#pragma unroll
    for (int i = 0; i + 1 < c.kept_groups; ++i)
      if (i < j) rest &= rest - 1;
    return (__ffs(rest) - 1) * group_size;
  };
  Run<m> run;
  int start = 0;
#pragma unroll
  for (int i = 0; i < m; ++i) {
    const int candidate = lane * m + i;
    const bool inside = candidates % 32 == 0 || candidate < candidates;
    if (i == 0 || group_size % m != 0) start = inside ? start_of_group(candidate / group_size) : 0;
    run.index[i] = start + candidate % group_size;
    run.key[i] = inside ? shared[run.index[i]] : kTaken;
  }
  return run;
}

// Of the picked experts: lane j < topk has the score, or the logit, of pick j.
template <MoeRouterConfig c>
DEVICE void write_picks(const MoeRouterArgs& args, int64_t token, int lane, uint32_t expert, float w) {
  const bool picked = lane < c.topk;
  if constexpr (c.score_after_topk && c.score == Score::softmax) {
    const float top = value_of(warp_max(picked && w == w ? key_of(w + 0.f) : kTaken));
    const float e = picked ? expf(w - top) : 0.f;
    w = e * reciprocal(warp_sum(e));
  } else if constexpr (c.score_after_topk) {
    w = score_of<c.score>(w);
  }
  if constexpr (c.renormalize) w *= reciprocal(divisor_of(args, warp_sum(picked ? w : 0.f)));
  if (picked) write_pick<c>(args, token * c.topk + lane, expert, w * args.scale);
}

// The n elements at p that the lane holds; `access` divides n.
template <int access, int n, typename T, typename Holds>
DEVICE Vec<T, n> load_run(const T* p, Holds holds) {
  constexpr int widest = kVectorBytes / sizeof(T), step = access < widest ? access : widest;
  Vec<T, n> v{};
#pragma unroll
  for (int i = 0; i < n; i += step) {
    if (!holds(i)) continue;
    const auto part = load_access<T, step>(p + i);
#pragma unroll
    for (int j = 0; j < step; ++j) v.at[i + j] = part.at[j];
  }
  return v;
}

template <MoeRouterConfig c>
DEVICE void moe_router(const MoeRouterArgs& args) {
  using T = Element<c.logits>;
  constexpr int n = (c.experts + 31) / 32;  // keys of a lane
  constexpr int warps = c.threads / 32;
  constexpr bool masked = c.kept_groups < c.groups;
  __shared__ alignas(16) float shared_scores[warps][32 * n];
  __shared__ alignas(16) uint32_t shared_keys[warps][masked ? 32 * n : 1];
  __shared__ uint32_t shared_picks[warps][32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t token = int64_t(blockIdx.x) * warps + warp;
  const int first = lane * n;
  float* scores = shared_scores[warp];

  wait_for_previous_kernel();
  if (token >= args.tokens) return;
  const T* logits = static_cast<const T*>(args.logits) + token * args.row_stride;
  // Whether position i of the lane holds an expert; known at compile time where they fill the warp.
  auto holds = [&](int i) { return c.experts == 32 * n || first + i < c.experts; };
  float x[n], bias[n];
  {
    const auto loaded = load_run<c.access, n>(logits + first, holds);
#pragma unroll
    for (int i = 0; i < n; ++i) x[i] = holds(i) ? to_float(loaded.at[i]) : __uint_as_float(0xff800000);
  }
  if constexpr (c.has_bias) {
    const auto* biases = static_cast<const Element<c.bias>*>(args.bias);
    const auto loaded = load_run<c.access, n>(biases + first, holds);
#pragma unroll
    for (int i = 0; i < n; ++i) bias[i] = to_float(loaded.at[i]);
  } else {
#pragma unroll
    for (int i = 0; i < n; ++i) bias[i] = 0;
  }
  let_next_kernel_start();

  if constexpr (!c.score_after_topk && c.score == Score::softmax) {
    float top = x[0];
#pragma unroll
    for (int i = 1; i < n; ++i) top = fmaxf(top, x[i]);
    top = value_of(warp_max(top == top ? key_of(top + 0.f) : kTaken));
    float sum = 0;
#pragma unroll
    for (int i = 0; i < n; ++i) {
      x[i] = expf(x[i] - top);
      sum += x[i];
    }
    const float scale = reciprocal(warp_sum(sum));
#pragma unroll
    for (int i = 0; i < n; ++i) x[i] = x[i] * scale;
  } else if constexpr (!c.score_after_topk) {
#pragma unroll
    for (int i = 0; i < n; ++i) x[i] = score_of<c.score>(x[i]);
  }
  uint32_t key[n];
#pragma unroll
  for (int i = 0; i < n; ++i) {
    scores[first + i] = x[i];
    key[i] = holds(i) ? key_of(x[i] + bias[i]) : kTaken;
  }

  uint32_t expert;
  if constexpr (masked) {
    auto run = deal<c>(key, keep_groups<c>(key, lane), lane, shared_keys[warp]);
    expert = pick<c.topk>(run, lane, shared_picks[warp]);
  } else {
    Run<n> run;
#pragma unroll
    for (int i = 0; i < n; ++i) {
      run.key[i] = key[i];
      run.index[i] = first + i;
    }
    expert = pick<c.topk>(run, lane, shared_picks[warp]);
  }
  write_picks<c>(args, token, lane, expert, scores[expert]);
}

// ---- a block a token ----

// The greatest of x over the block, in every thread.
DEVICE uint64_t block_max(uint64_t x, uint64_t* scratch) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    const uint64_t other = __shfl_xor_sync(0xffffffff, x, step);
    x = other > x ? other : x;
  }
  __syncthreads();  // the last result has been read
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
  __syncthreads();
  for (int i = 0; i < int(blockDim.x / 32); ++i) x = scratch[i] > x ? scratch[i] : x;
  return x;
}

// In the order of picks: by key, then the lower index first.
DEVICE uint64_t ranked(uint32_t key, uint32_t index) { return uint64_t(key) << 32 | uint32_t(~index); }

// Takes the greatest `count` of n keys out, in order.
DEVICE void pick_by_block(uint32_t* keys, int n, int count, uint32_t* picks, uint64_t* scratch) {
  for (int j = 0; j < count; ++j) {
    uint64_t best = 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
      const uint64_t candidate = ranked(keys[i], i);
      best = candidate > best ? candidate : best;
    }
    const uint32_t index = ~uint32_t(block_max(best, scratch));
    if (threadIdx.x == index % blockDim.x) keys[index] = kTaken;  // the thread that reads it
    if (threadIdx.x == 0) picks[j] = index;
  }
  __syncthreads();
}

// Dynamic shared memory: scores, keys, the keys of the groups if some are masked, picks.
template <MoeRouterConfig c>
DEVICE void moe_router_wide(const MoeRouterArgs& args) {
  extern __shared__ uint32_t shared[];
  __shared__ uint64_t scratch[c.threads / 32];
  const int experts = c.experts, group_size = c.experts / c.groups;
  float* scores = reinterpret_cast<float*>(shared);
  uint32_t* keys = shared + experts;
  uint32_t* groups = keys + experts;
  uint32_t* picks = groups + (c.kept_groups < c.groups ? c.groups : 0);
  const int64_t token = blockIdx.x;
  const auto* logits = static_cast<const Element<c.logits>*>(args.logits) + token * args.row_stride;

  wait_for_previous_kernel();
  float total = 1, top = 0;
  if constexpr (c.score == Score::softmax && !c.score_after_topk) {
    uint32_t best = kTaken;
    for (int i = threadIdx.x; i < experts; i += c.threads) {
      const float x = to_float(logits[i]);
      if (x == x) best = umax(best, key_of(x + 0.f));
    }
    top = value_of(uint32_t(block_max(best, scratch)));
    float sum = 0;
    for (int i = threadIdx.x; i < experts; i += c.threads) sum += expf(to_float(logits[i]) - top);
    __shared__ float partial[32];
    total = sum_over<c.threads>(sum, partial);
  }
  for (int i = threadIdx.x; i < experts; i += c.threads) {
    float x = to_float(logits[i]);
    if constexpr (!c.score_after_topk) x = c.score == Score::softmax ? expf(x - top) / total : score_of<c.score>(x);
    scores[i] = x;
    float bias = 0;
    if constexpr (c.has_bias) bias = to_float(static_cast<const Element<c.bias>*>(args.bias)[i]);
    keys[i] = key_of(x + bias);
  }
  __syncthreads();

  if constexpr (c.kept_groups < c.groups) {
    for (int g = threadIdx.x; g < c.groups; g += c.threads) {
      uint32_t first = kTaken, second = kTaken;
      for (int i = g * group_size; i < (g + 1) * group_size; ++i) {
        second = umax(second, umin(first, keys[i]));
        first = umax(first, keys[i]);
      }
      groups[g] = c.group_score == GroupScore::max ? first : key_of(value_of(first) + value_of(second));
    }
    __syncthreads();
    pick_by_block(groups, c.groups, c.kept_groups, picks, scratch);
    for (int i = threadIdx.x; i < experts; i += c.threads)
      if (groups[i / group_size] != kTaken) keys[i] = kTaken;
    __syncthreads();
  }
  pick_by_block(keys, experts, c.topk, picks, scratch);

  // One warp finishes the weights; the sum runs over its lanes.
  if (threadIdx.x >= 32) return;
  const int lane = threadIdx.x;
  if constexpr (c.score_after_topk && c.score == Score::softmax) {
    top = scores[picks[0]];  // the greatest but for the bias: take the true one
    for (int j = lane; j < c.topk; j += 32) top = fmaxf(top, scores[picks[j]]);
    top = value_of(warp_max(top == top ? key_of(top + 0.f) : kTaken));
    float sum = 0;
    for (int j = lane; j < c.topk; j += 32) sum += expf(scores[picks[j]] - top);
    total = warp_sum(sum);
  }
  auto weight_of = [&](int j) {
    const float x = scores[picks[j]];
    if constexpr (!c.score_after_topk) return x;
    return c.score == Score::softmax ? expf(x - top) / total : score_of<c.score>(x);
  };
  float divisor = 1;
  if constexpr (c.renormalize) {
    float sum = 0;
    for (int j = lane; j < c.topk; j += 32) sum += weight_of(j);
    divisor = divisor_of(args, warp_sum(sum));
  }
  for (int j = lane; j < c.topk; j += 32) {
    float w = weight_of(j);
    if constexpr (c.renormalize) w = w / divisor;
    write_pick<c>(args, token * c.topk + j, picks[j], w * args.scale);
  }
}

}  // namespace deepinfer
