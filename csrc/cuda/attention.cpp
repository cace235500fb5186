#include "attention.h"

#include <algorithm>

#include "../jit/cuda_launch.h"
#include "attention_config.h"
#include "attention_prefill.h"
#include "launch.h"

namespace deepinfer::cuda {

namespace {

constexpr int kPortableThreads = 128;

const char* name_of(AttentionMask mask) {
  switch (mask) {
    case AttentionMask::none: return "AttentionMask::none";
    case AttentionMask::causal: return "AttentionMask::causal";
    case AttentionMask::boolean: return "AttentionMask::boolean";
    case AttentionMask::added: return "AttentionMask::added";
  }
  return "";
}

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

}  // namespace

int64_t attention_scratch(const AttentionArgs& args, int device) { return 0; }

void attention(const AttentionArgs& args, float* scratch, int device) {
  if (!attention_prefill(args, device)) attention_portable(args, device);
}

}  // namespace deepinfer::cuda
