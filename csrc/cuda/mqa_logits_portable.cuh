// The index logits of sparse attention without the matrix unit: any size, one thread for one logit. Bound by
// multiply-adds.
#pragma once

#include "../ops/mqa_logits.h"
#include "gemm_portable.cuh"

namespace deepinfer {

struct MqaLogitsPortableConfig {
  int threads;
};

template <MqaLogitsPortableConfig c>
DEVICE void mqa_logits_portable(const MqaLogitsArgs& args) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  for (int64_t row = blockIdx.x; row < args.rows; row += gridDim.x) {
    const int64_t low = args.begins ? args.begins[row] : 0, high = args.ends[row];
    for (int64_t token = threadIdx.x; token < args.tokens; token += c.threads) {
      float& out = args.out[row * args.tokens + token];
      if (token < low || token >= high) {
        out = __uint_as_float(0xff800000u);
        continue;
      }
      const uint8_t* page = args.k;
      int64_t at = token;
      const float* scale = args.k_scale + token;
      if (args.page_table) {
        const int p = args.page_table[row / args.table_rows * args.table_stride + token / args.page_size];
        if (p < 0 || p >= args.pages) {
          out = __uint_as_float(0x7fffffffu);
          continue;
        }
        page += p * args.page_bytes;
        at %= args.page_size;
        scale = reinterpret_cast<const float*>(page + args.page_size * args.depth) + at;
      }
      const e4m3* k = reinterpret_cast<const e4m3*>(page) + at * args.depth;
      float sum = 0.f;
      for (int64_t h = 0; h < args.heads; ++h) {
        const e4m3* q = static_cast<const e4m3*>(args.q) + (row * args.heads + h) * args.depth;
        float product = 0.f;
        for (int64_t d = 0; d < args.depth; ++d) product = fmaf(to_float(q[d]), to_float(k[d]), product);
        sum = fmaf(product < 0.f ? 0.f : product, args.weights[row * args.heads + h], sum);
      }
      out = sum * *scale;
    }
  }
}

}  // namespace deepinfer
