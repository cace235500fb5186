#include "moe_router.h"

#include <algorithm>

#include "../jit/cuda_launch.h"
#include "launch.h"
#include "moe_router_config.h"

namespace deepinfer::cuda {

namespace {

constexpr int kMostExperts = 512;  // of a token that one warp handles
constexpr int kMostPicks = 32;
constexpr int kWideThreads = 256;

const char* name_of(Score score) {
  switch (score) {
    case Score::softmax: return "Score::softmax";
    case Score::sigmoid: return "Score::sigmoid";
    case Score::sqrt_softplus: return "Score::sqrt_softplus";
  }
  return "";
}

const char* name_of(GroupScore score) { return score == GroupScore::max ? "GroupScore::max" : "GroupScore::top2_sum"; }

jit::KernelSource source_of(const char* name, const MoeRouterConfig& c) {
  jit::KernelSource source;
  source.name = name;
  source.header = "cuda/moe_router.cuh";
  source.config = "MoeRouterConfig";
  source.args = "MoeRouterArgs";
  source.facts = {{"logits", c.logits}, {"bias", c.bias}, {"weights", c.weights}, {"score", name_of(c.score)},
                  {"group_score", name_of(c.group_score)}, {"experts", c.experts}, {"topk", c.topk},
                  {"groups", c.groups}, {"kept_groups", c.kept_groups}, {"has_bias", c.has_bias},
                  {"score_after_topk", c.score_after_topk}, {"renormalize", c.renormalize}, {"wide_ids", c.wide_ids},
                  {"access", c.access}, {"threads", c.threads}};
  source.threads = c.threads;
  source.pdl = true;
  return source;
}

jit::KernelSource describe(const MoeRouterConfig& c) { return source_of("moe_router", c); }

jit::KernelSource describe_wide(const MoeRouterConfig& c) {
  jit::KernelSource source = source_of("moe_router_wide", c);
  const int group_keys = c.kept_groups < c.groups ? c.groups : 0;
  source.shared_bytes = int(sizeof(uint32_t)) * (2 * c.experts + group_keys + std::max(c.topk, c.kept_groups));
  return source;
}

// A warp a token needs the keys in registers, and groups that are whole runs of lanes.
bool fits_warp(const MoeRouterConfig& c) {
  const bool even_groups = c.groups == 1 || (c.experts % 32 == 0 && 32 % c.groups == 0);
  return c.experts <= kMostExperts && c.topk <= kMostPicks && even_groups;
}

MoeRouterConfig plan(const MoeRouterArgs& args) {
  MoeRouterConfig c{};
  c.logits = args.dtype;
  c.bias = args.bias ? args.bias_dtype : args.dtype;
  c.weights = args.weights_dtype;
  c.score = args.score;
  c.group_score = args.group_score;
  c.experts = int(args.num_experts);
  c.topk = int(args.topk);
  const bool masked = args.topk_groups < args.num_groups;
  c.groups = masked ? int(args.num_groups) : 1;
  c.kept_groups = masked ? int(args.topk_groups) : 1;
  c.has_bias = args.bias != nullptr;
  c.score_after_topk = args.score_after_topk;
  c.renormalize = args.renormalize;
  c.wide_ids = args.wide_ids;
  c.access = 1;
  c.threads = kWideThreads;
  if (!fits_warp(c)) return c;
  // Few tokens are spread over more processors by smaller blocks.
  c.threads = args.tokens <= 512 ? 32 : 128;
  Access access(c.experts, 16 / size_of(c.logits));
  access.limit(args.logits, size_of(c.logits));
  access.limit_stride(args.row_stride, size_of(c.logits));
  access.limit(args.bias, size_of(c.bias));
  access.divide(int(ceil_div(c.experts, 32)));
  c.access = access.elements();
  return c;
}

MoeRouterConfig sample(Score score, int experts, int topk, int groups = 1, int kept_groups = 1) {
  const bool biased = score != Score::softmax;
  return {DType::f32, DType::f32, DType::f32, score, GroupScore::top2_sum, experts, topk, groups, kept_groups, biased,
          0, 1, 1, 4, 128};
}

std::vector<MoeRouterConfig> samples() {
  MoeRouterConfig deepseek_v2 = sample(Score::softmax, 160, 6, 8, 3);
  deepseek_v2.group_score = GroupScore::max;
  deepseek_v2.access = 1;
  MoeRouterConfig gpt_oss = sample(Score::softmax, 32, 4);
  gpt_oss.logits = gpt_oss.bias = gpt_oss.weights = DType::bf16;
  gpt_oss.score_after_topk = gpt_oss.access = 1;
  gpt_oss.threads = 32;
  return {sample(Score::sigmoid, 256, 8, 8, 4), sample(Score::softmax, 128, 8), sample(Score::sqrt_softplus, 384, 6),
          deepseek_v2, gpt_oss};
}

std::vector<MoeRouterConfig> wide_samples() {
  MoeRouterConfig grouped = sample(Score::softmax, 72, 6, 3, 2), many = sample(Score::sigmoid, 1024, 40);
  grouped.threads = many.threads = kWideThreads;
  grouped.access = many.access = 1;
  return {grouped, many};
}

jit::Kernels<MoeRouterConfig> kernels(describe, samples);
jit::Kernels<MoeRouterConfig> wide_kernels(describe_wide, wide_samples);

}  // namespace

void moe_router(const MoeRouterArgs& args, int device) {
  const MoeRouterConfig config = plan(args);
  if (!fits_warp(config)) return wide_kernels.launch(device, config, {unsigned(args.tokens)}, args);
  kernels.launch(device, config, {unsigned(ceil_div(args.tokens, config.threads / 32))}, args);
}

}  // namespace deepinfer::cuda
