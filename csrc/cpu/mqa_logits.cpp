// The index logits of sparse attention. Tokens take the lanes: 64 rows of k are widened and turned once for all heads
// of a query, so that nothing has to be summed across lanes. Bound by multiply-adds.

#include "mqa_logits.h"

#include <limits>

#include "fp8.h"

namespace deepinfer::cpu::DEEPINFER_ISA {

namespace {

constexpr int64_t kTokens = 64, kMostDepth = 128;
constexpr float kNone = -std::numeric_limits<float>::infinity();

struct TokenBlock {
  float k[kMostDepth][kTokens];
  float scale[kTokens];
};

// The first `count` tokens from `first` on; the others are zeros.
void load_tokens(const MqaLogitsArgs& args, int64_t row, int64_t first, int64_t count, TokenBlock& block) {
  for (int64_t i = 0; i < kTokens; ++i) {
    const uint8_t* page = args.k;
    int64_t at = first + i;
    const float* scale = args.k_scale + at;
    if (args.page_table && i < count) {
      page += args.page_table[row / args.table_rows * args.table_stride + at / args.page_size] * args.page_bytes;
      at %= args.page_size;
      scale = reinterpret_cast<const float*>(page + args.page_size * args.depth) + at;
    }
    block.scale[i] = i < count ? *scale : 0.f;
    const e4m3* k = reinterpret_cast<const e4m3*>(page) + at * args.depth;
    for (int64_t d = 0; d < args.depth; d += kLanes) {
      const F32 values = i < count ? load(k + d) : F32{};
      for (int lane = 0; lane < kLanes; ++lane) block.k[d + lane][i] = values[lane];
    }
  }
}

constexpr int kHeads = 4, kVectors = kTokens / kLanes;

// `heads` neighbouring heads at once, so that what is loaded of k is used that often.
template <int heads>
void add_heads(const MqaLogitsArgs& args, const float (*q)[kMostDepth], const float* weights,
               const TokenBlock& block, F32 (&logits)[kVectors]) {
  F32 products[heads][kVectors] = {};
  for (int64_t d = 0; d < args.depth; ++d)
    for (int j = 0; j < kVectors; ++j) {
      const F32 k = load(block.k[d] + j * kLanes);
      for (int h = 0; h < heads; ++h) products[h][j] = fma(splat(q[h][d]), k, products[h][j]);
    }
  for (int h = 0; h < heads; ++h)
    for (int j = 0; j < kVectors; ++j) {
      const F32 seen = products[h][j] < 0.f ? F32{} : products[h][j];
      logits[j] = fma(seen, splat(weights[h]), logits[j]);
    }
}

}  // namespace

void mqa_logits(const MqaLogitsArgs& args, int64_t begin, int64_t end) {
  const int64_t chunks = (args.tokens + args.chunk - 1) / args.chunk;
  TokenBlock block;
  float q[kHeads][kMostDepth];
  for (int64_t item = begin; item < end; ++item) {
    const int64_t row = item / chunks, from = item % chunks * args.chunk;
    const int64_t to = from + args.chunk < args.tokens ? from + args.chunk : args.tokens;
    const int64_t low = args.begins ? args.begins[row] : 0, high = args.ends[row];
    const int64_t first = low < from ? from : low, last = high < to ? high : to;
    float* out = args.out + row * args.tokens;
    for (int64_t t = from; t < to; ++t)
      if (t < first || t >= last) out[t] = kNone;
    for (int64_t t = first; t < last; t += kTokens) {
      const int64_t count = last - t < kTokens ? last - t : kTokens;
      load_tokens(args, row, t, count, block);
      F32 logits[kVectors] = {};
      for (int64_t h = 0; h < args.heads; h += kHeads) {
        const int64_t heads = args.heads - h < kHeads ? args.heads - h : kHeads, first_head = row * args.heads + h;
        for (int64_t i = 0; i < heads; ++i) {
          const e4m3* head = static_cast<const e4m3*>(args.q) + (first_head + i) * args.depth;
          for (int64_t d = 0; d < args.depth; d += kLanes) store(q[i] + d, load(head + d));
        }
        if (heads == kHeads) {
          add_heads<kHeads>(args, q, args.weights + first_head, block, logits);
          continue;
        }
        for (int64_t i = 0; i < heads; ++i) add_heads<1>(args, q + i, args.weights + first_head + i, block, logits);
      }
      for (int j = 0; j < kVectors; ++j) {
        const int64_t left = count - j * kLanes;
        if (left <= 0) break;
        const F32 scaled = logits[j] * load(block.scale + j * kLanes);
        store(out + t + j * kLanes, scaled, left < kLanes ? int(left) : kLanes);
      }
    }
  }
}

}  // namespace deepinfer::cpu::DEEPINFER_ISA
