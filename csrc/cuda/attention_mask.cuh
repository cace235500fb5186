// What the attention kernels know of masks and of the softmax.
#pragma once

#include "../ops/attention.h"
#include "device.cuh"

namespace deepinfer {

DEVICE float hidden_score() { return __uint_as_float(0xff800000u); }  // -inf
constexpr float kLog2E = 1.4426950408889634f;

struct Maximum {  // NaN does not count
  static DEVICE float of(float a, float b) { return fmaxf(a, b); }
};

// What is added to the score of a key, which lies in the mask at `offset`; -inf hides the key.
template <AttentionMask mask, DType type>
DEVICE float added_to_score(const AttentionArgs& args, int64_t offset, int query, int key) {
  if constexpr (mask == AttentionMask::none) return 0.f;
  else if constexpr (mask == AttentionMask::causal) return key <= query ? 0.f : hidden_score();
  else if constexpr (mask == AttentionMask::boolean)
    return load_access<uint8_t, 1>(static_cast<const uint8_t*>(args.mask) + offset).at[0] ? 0.f : hidden_score();
  else
    return to_float(load_access<Element<type>, 1>(static_cast<const Element<type>*>(args.mask) + offset).at[0]);
}

// A score less this is the exponent of its weight. 0 while every score is -inf, which makes all weights 0.
DEVICE float base_of(float greatest) { return greatest == hidden_score() ? 0.f : greatest; }

// The difference comes first: masks hold numbers whose product with anything overflows.
DEVICE float weight_of(float score, float base) { return exp2f((score - base) * kLog2E); }

}  // namespace deepinfer
