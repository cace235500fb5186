#include "attention_decode.h"

#include <algorithm>
#include <limits>

#include "../jit/cuda_launch.h"
#include "attention_config.h"
#include "attention_names.h"
#include "launch.h"

namespace deepinfer::cuda {

namespace {

constexpr int kTileKeys = 16, kWarps = 4, kCombineThreads = 128;  // as in attention_decode.cuh
constexpr int64_t kMostTiles = 2048, kMostKeys = kMostTiles * kTileKeys;  // of a block
constexpr int64_t kMostParts = 32, kMostOfCluster = 8;
constexpr int64_t kBlocksPerProcessor = 2;  // from which on keys are not split

// Registers of a lane: keys, values, queries, sums, rows of the mask, and the rest.
int registers(const AttentionDecodeConfig& c) {
  const int pieces = (c.depth + 31) / 32, chunks = (c.value_depth + 63) / 64;
  return 8 * pieces + 16 * chunks + c.columns * (4 * pieces + 16 * chunks + (c.one_mask ? 0 : 20)) + 30;
}

int blocks_per_sm(const AttentionDecodeConfig& c) {
  return std::clamp(65536 / (32 * c.warps * registers(c)), 1, 4);
}

jit::KernelSource describe(const AttentionDecodeConfig& c) {
  jit::KernelSource source;
  source.name = "attention_decode";
  source.header = "cuda/attention_decode.cuh";
  source.config = "AttentionDecodeConfig";
  source.args = "AttentionDecodeArgs";
  source.facts = {{"type", c.type},
                  {"mask", name_of(c.mask)},
                  {"mask_type", c.mask_type},
                  {"one_mask", c.one_mask},
                  {"depth", c.depth},
                  {"value_depth", c.value_depth},
                  {"columns", c.columns},
                  {"warps", c.warps},
                  {"cluster", c.cluster},
                  {"scratch", c.scratch}};
  source.threads = 32 * c.warps;
  source.blocks_per_sm = blocks_per_sm(c);
  source.cluster = c.cluster;
  source.shared_bytes = (c.warps + (c.cluster > 1)) * 8 * c.columns * 4 * (c.value_depth + 2) + int(kMostTiles);
  source.pdl = true;
  return source;
}

std::vector<AttentionDecodeConfig> samples() {
  return {{DType::bf16, AttentionMask::boolean, DType::f32, 1, 192, 128, 1, kWarps, 1, 0},
          {DType::bf16, AttentionMask::boolean, DType::f32, 1, 128, 128, 1, kWarps, 8, 0},
          {DType::bf16, AttentionMask::added, DType::bf16, 0, 128, 128, 2, kWarps, 1, 1},
          {DType::f16, AttentionMask::causal, DType::f32, 0, 256, 256, 1, kWarps, 1, 0},
          {DType::bf16, AttentionMask::none, DType::f32, 1, 80, 72, 1, kWarps, 1, 0}};
}

jit::KernelSource describe_combine(const AttentionCombineConfig& c) {
  jit::KernelSource source;
  source.name = "attention_combine";
  source.header = "cuda/attention_decode.cuh";
  source.config = "AttentionCombineConfig";
  source.args = "AttentionDecodeArgs";
  source.facts = {{"type", c.type}, {"threads", c.threads}};
  source.threads = c.threads;
  source.pdl = true;
  return source;
}

std::vector<AttentionCombineConfig> combine_samples() { return {{DType::bf16, kCombineThreads}}; }

jit::Kernels<AttentionDecodeConfig> kernels(describe, samples);
jit::Kernels<AttentionCombineConfig> combine_kernels(describe_combine, combine_samples);

int64_t rows_of(const AttentionArgs& args) { return args.heads / args.key_heads * args.queries; }

struct Plan {
  AttentionDecodeConfig config;
  int64_t parts, span, blocks_of_rows;

  int64_t blocks(const AttentionArgs& args) const { return args.batch * args.key_heads * parts * blocks_of_rows; }
};

// Keys are split where there are fewer queries than processors have room for. More and smaller parts were slower: each
// costs a block's start, and traffic for its sums.
Plan plan_of(const AttentionArgs& args, const jit::DeviceFacts& facts) {
  const int64_t rows = rows_of(args);
  Plan plan{};
  AttentionDecodeConfig& c = plan.config;
  c.type = args.type;
  c.mask = args.mask_kind;
  c.mask_type = args.mask_type;
  const bool by_row = (args.queries > 1 && args.mask_query != 0) || (args.heads > args.key_heads && args.mask_head != 0);
  c.one_mask = args.mask_kind != AttentionMask::causal && !by_row;
  c.depth = int(args.depth);
  c.value_depth = int(args.value_depth);
  c.warps = kWarps;
  c.columns = 2;
  if (rows <= 8 || registers(c) > 250) c.columns = 1;
  plan.blocks_of_rows = ceil_div(rows, 8 * c.columns);
  const int64_t blocks = args.batch * args.key_heads * plan.blocks_of_rows, least = 2 * kTileKeys * c.warps;
  int64_t parts = std::min({kBlocksPerProcessor * facts.multiprocessors / blocks, ceil_div(args.keys, least), kMostParts});
  parts = std::max({parts, ceil_div(args.keys, kMostKeys), int64_t(1)});
  // A cluster saves the second kernel, which takes longer than some more keys for each block.
  c.cluster = 1;
  if (facts.capability >= 90 && parts <= 2 * kMostOfCluster && args.keys <= kMostKeys)
    while (c.cluster < kMostOfCluster && 2 * c.cluster <= parts) c.cluster *= 2;
  if (c.cluster > 1) parts = c.cluster;
  const int64_t step = kTileKeys * c.warps;
  plan.span = std::max(step, ceil_div(ceil_div(args.keys, parts), step) * step);
  plan.parts = c.cluster > 1 ? parts : std::max(int64_t(1), ceil_div(args.keys, plan.span));
  c.scratch = plan.parts > c.cluster;
  return plan;
}

bool is_aligned(const void* data, const HeadStrides& s, int64_t batch, int64_t heads, int64_t tokens) {
  uint64_t bits = reinterpret_cast<uintptr_t>(data);
  if (batch > 1) bits |= uint64_t(s.batch) * 2;
  if (heads > 1) bits |= uint64_t(s.head) * 2;
  if (tokens > 1) bits |= uint64_t(s.token) * 2;
  return bits % 16 == 0;
}

}  // namespace

bool suits_attention_decode(const AttentionArgs& args, int device) {
  const jit::DeviceFacts& facts = jit::device_facts(device);
  return args.type != DType::f32 && facts.capability >= 80 && args.keys <= kMostParts * kMostKeys &&
         is_aligned(args.query, args.query_strides, args.batch, args.heads, args.queries) &&
         is_aligned(args.key, args.key_strides, args.batch, args.key_heads, args.keys) &&
         is_aligned(args.value, args.value_strides, args.batch, args.key_heads, args.keys) &&
         plan_of(args, facts).blocks(args) <= std::numeric_limits<int32_t>::max();
}

int64_t attention_decode_scratch(const AttentionArgs& args, int device) {
  const Plan plan = plan_of(args, jit::device_facts(device));
  if (!plan.config.scratch) return 0;
  return args.batch * args.key_heads * plan.parts * rows_of(args) * (args.value_depth + 2);
}

void attention_decode(const AttentionArgs& args, float* scratch, int device) {
  const Plan plan = plan_of(args, jit::device_facts(device));
  AttentionDecodeArgs kernel_args{};
  kernel_args.problem = args;
  kernel_args.span = plan.span;
  kernel_args.parts = int(plan.parts);
  kernel_args.blocks_of_rows = int(plan.blocks_of_rows);
  const int64_t rows = args.batch * args.key_heads * rows_of(args);
  kernel_args.sums = scratch;
  kernel_args.stats = scratch + rows * plan.parts * args.value_depth;
  kernels.launch(device, plan.config, {unsigned(plan.blocks(args))}, kernel_args);
  if (plan.config.scratch)
    combine_kernels.launch(device, {args.type, kCombineThreads}, {unsigned(ceil_div(rows, kCombineThreads / 32))},
                           kernel_args);
}

}  // namespace deepinfer::cuda
