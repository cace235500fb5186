#include "attention.h"

#include <algorithm>

#include "../jit/cuda_launch.h"
#include "attention_config.h"
#include "attention_decode.h"
#include "attention_names.h"
#include "attention_prefill.h"
#include "launch.h"

namespace deepinfer::cuda {

namespace {

constexpr int kPortableThreads = 128;
constexpr int64_t kFewRows = 64;  // of queries that share keys, for which reading these is what takes time

jit::KernelSource describe_portable(const AttentionPortableConfig& c) {
  jit::KernelSource source;
  source.name = "attention_portable";
  source.header = "cuda/attention_portable.cuh";
  source.config = "AttentionPortableConfig";
  source.args = "AttentionArgs";
  source.facts = {{"type", c.type}, {"mask", name_of(c.mask)}, {"mask_type", c.mask_type}, {"threads", c.threads}};
  source.threads = c.threads;
  source.pdl = true;
  return source;
}

std::vector<AttentionPortableConfig> portable_samples() {
  return {{DType::f32, AttentionMask::boolean, DType::f32, kPortableThreads},
          {DType::bf16, AttentionMask::added, DType::bf16, kPortableThreads}};
}

jit::Kernels<AttentionPortableConfig> portable_kernels(describe_portable, portable_samples);

void attention_portable(const AttentionArgs& args, int device) {
  const int64_t rows = args.batch * args.heads * args.queries, most = jit::device_facts(device).multiprocessors * 16;
  const int64_t blocks = std::min(ceil_div(rows, kPortableThreads / 32), most);
  portable_kernels.launch(device, {args.type, args.mask_kind, args.mask_type, kPortableThreads}, {unsigned(blocks)},
                          args);
}

// Whether reading the keys, which is done once, is what takes time.
bool has_few_rows(const AttentionArgs& args) { return args.heads / args.key_heads * args.queries <= kFewRows; }

}  // namespace

int64_t attention_scratch(const AttentionArgs& args, int device) {
  return suits_attention_decode(args, device) ? attention_decode_scratch(args, device) : 0;
}

void attention(const AttentionArgs& args, float* scratch, int device) {
  const bool suits_decode = suits_attention_decode(args, device);
  if (suits_decode && has_few_rows(args)) return attention_decode(args, scratch, device);
  if (attention_prefill(args, device)) return;
  if (suits_decode) return attention_decode(args, scratch, device);
  attention_portable(args, device);
}

bool attention_of_parts(const AttentionArgs& args, int device) {
  return !has_few_rows(args) && attention_prefill(args, device);
}

}  // namespace deepinfer::cuda
