// What the index logits of sparse attention hand to the kernels of any device.
#pragma once

#include "../cpu/types.h"

namespace deepinfer {

// out[s, t] = k_scale[t] * sum_h weights[s, h] * max(0, sum_d q[s, h, d] * k[t, d]) for begins[s] <= t < ends[s], -inf
// for other t below `tokens`.
struct MqaLogitsArgs {
  const void* q;         // e4m3 [rows, heads, depth], dense
  const float* weights;  // [rows, heads], dense
  const int32_t* begins;  // [rows]; null: 0
  const int32_t* ends;    // [rows]
  float* out;             // [rows, tokens], dense
  int64_t rows, heads, depth, tokens;
  // k of token t is row t % page_size of page page_table[row / table_rows, t / page_size]; a page is page_size rows of
  // e4m3 and then their scales. Without a table there is one page, with the scales in k_scale.
  const uint8_t* k;
  const float* k_scale;
  const int32_t* page_table;
  int64_t page_size, page_bytes, pages, table_stride, table_rows;
  int64_t chunk;  // tokens of a row that one work item takes
};

}  // namespace deepinfer
