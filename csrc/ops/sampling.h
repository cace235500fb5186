// What the sampling ops hand to the kernels of any device.
#pragma once

#include "../cpu/types.h"

namespace deepinfer {

// Below that temperature a row takes its greatest element.
constexpr float kLeastTemperature = 1e-5f;

// The weight of the greatest element. Weights are integers, so that their sums are the same in any order.
constexpr float kWeightOne = 1099511627776.f;  // 2^40

struct Filters {
  float temperature = 1;
  float top_p = 1, min_p = 0;
  int64_t top_k = 0;
};

// Distributions: the softmax of each row of logits over a temperature, cut by the filters. Each of these has one entry
// a row, or is null: `all` holds for every row.
struct Distributions {
  const void* logits;  // rows of `size` elements of `dtype`
  Rows rows;
  int64_t size;
  const float* temperature;
  const int32_t* top_k;
  const float* top_p;
  const float* min_p;
  Filters all;
  DType dtype;
  int keep_ties;  // 1: what equals the last element that top_k keeps stays too
};

struct SampleArgs {
  Distributions from;
  const int64_t* seeds;    // [rows]
  const int64_t* offsets;  // [rows] or null
  int64_t* ids;            // [rows]
  float* log_probs;        // [rows] or null
};

struct SpecVerifyArgs {
  Distributions target;        // rows: [batch, drafted + 1]
  const int64_t* draft_ids;    // [batch, drafted]
  const float* draft_probs;    // [batch, drafted, size]; null: each draft was certain
  const int32_t* num_drafted;  // [batch] or null: how many of the drafts count
  const int64_t* seeds;        // [batch]
  const int64_t* offsets;      // [batch] or null
  int64_t* choices;            // scratch on CUDA, [batch, drafted + 1]: what each position would emit as the last
  int32_t* verdicts;           // scratch on CUDA, [batch, drafted + 1]: 1 where the draft is accepted
  int64_t* ids;                // [batch, drafted + 1]
  int32_t* accepted;           // [batch]
  int64_t drafted;
};

}  // namespace deepinfer
