// Attention, one query of one head at a time: scores of a block of keys, then their share of the values, rescaled
// whenever a greater score turns up. Bound by reading keys and values.

#include "attention.h"

#include <limits>

#include "vec.h"

namespace deepinfer::cpu::DEEPINFER_ISA {

namespace {

constexpr int64_t kKeys = 64, kMostDepth = 256;
constexpr float kHidden = -std::numeric_limits<float>::infinity();

// What is added to the score of key `at` of a row of the mask.
float added(const AttentionArgs& args, int64_t row, int64_t query, int64_t at) {
  const int64_t offset = row + at * args.mask_key;
  switch (args.mask_kind) {
    case AttentionMask::none: return 0.f;
    case AttentionMask::causal: return at <= query ? 0.f : kHidden;
    case AttentionMask::boolean: return static_cast<const uint8_t*>(args.mask)[offset] ? 0.f : kHidden;
    case AttentionMask::added: break;
  }
  switch (args.mask_type) {
    case DType::bf16: return load1(static_cast<const bf16*>(args.mask) + offset);
    case DType::f16: return load1(static_cast<const f16*>(args.mask) + offset);
    default: return static_cast<const float*>(args.mask)[offset];
  }
}

template <typename T>
void attend(const AttentionArgs& args, int64_t batch, int64_t head, int64_t query) {
  const auto at = [&](const void* data, const HeadStrides& s, int64_t h) {
    return static_cast<const T*>(data) + batch * s.batch + h * s.head;
  };
  const int64_t shared = head / (args.heads / args.key_heads);
  const T* keys = at(args.key, args.key_strides, shared);
  const T* values = at(args.value, args.value_strides, shared);
  const T* asked = at(args.query, args.query_strides, head) + query * args.query_strides.token;
  const int64_t mask_row = batch * args.mask_batch + head * args.mask_head + query * args.mask_query;

  float q[kMostDepth], sums[kMostDepth] = {}, scores[kKeys];
  for_lanes(args.depth, [&](int64_t d, int n) { store(q + d, load(asked + d, n), n); });
  float greatest = kHidden, total = 0.f;
  for (int64_t first = 0; first < args.keys; first += kKeys) {
    float most = greatest;
    bool any = false;
    for (int64_t i = 0; i < kKeys; ++i) {
      const float bias = first + i < args.keys ? added(args, mask_row, query, first + i) : kHidden;
      scores[i] = kHidden;
      if (bias == kHidden) continue;
      const T* key = keys + (first + i) * args.key_strides.token;
      F32 products{};
      for_lanes(args.depth, [&](int64_t d, int n) { products = fma(load(q + d, n), load(key + d, n), products); });
      scores[i] = reduce_add(products) * args.scale + bias;
      if (scores[i] > most) most = scores[i];
      any = any || scores[i] != kHidden;
    }
    if (!any) continue;
    const float base = most == kHidden ? 0.f : most, kept = exp(splat(greatest - base))[0];
    F32 added_up{};
    float weights[kKeys];
    for (int64_t i = 0; i < kKeys; i += kLanes) {
      const F32 weight = exp(load(scores + i) - base);
      store(weights + i, weight);
      added_up += weight;
    }
    greatest = most;
    total = total * kept + reduce_add(added_up);
    for_lanes(args.value_depth, [&](int64_t d, int n) {
      F32 sum = load(sums + d, n) * kept;
      for (int64_t i = 0; i < kKeys; ++i) {
        if (scores[i] == kHidden) continue;
        sum = fma(splat(weights[i]), load(values + (first + i) * args.value_strides.token + d, n), sum);
      }
      store(sums + d, sum, n);
    });
  }
  const float factor = total == 0.f ? 0.f : 1.f / total;
  const HeadStrides& s = args.out_strides;
  T* out = static_cast<T*>(args.out) + batch * s.batch + head * s.head + query * s.token;
  for_lanes(args.value_depth, [&](int64_t d, int n) { store(out + d, load(sums + d, n) * factor, n); });
}

}  // namespace

void attention(const AttentionArgs& args, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const int64_t query = row % args.queries, head = row / args.queries % args.heads;
    const int64_t batch = row / args.queries / args.heads;
    switch (args.type) {
      case DType::f32: attend<float>(args, batch, head, query); break;
      case DType::bf16: attend<bf16>(args, batch, head, query); break;
      case DType::f16: attend<f16>(args, batch, head, query); break;
    }
  }
}

}  // namespace deepinfer::cpu::DEEPINFER_ISA
