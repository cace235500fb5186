#include "moe_dispatch.h"

#include <algorithm>
#include <bit>

#include "../jit/cuda_launch.h"
#include "launch.h"
#include "moe_dispatch_config.h"

namespace deepinfer::cuda {

namespace {

constexpr int kCluster = 8;
constexpr int kMostRounds = 8;
constexpr int64_t kMostChunks = 128;  // more only where the rounds of a thread do not suffice
constexpr int kStaticBytes = 1024;  // at most, of expert_map in shared memory beside its tables
constexpr int kLeastThreads = 128, kMostThreads = 1024;  // of expert_map
constexpr int kRowThreads = 256, kFewThreads = 64, kWarp = 32;
constexpr int64_t kFewBlocks = 1024;  // below that many, a row is shared out over several, of few threads
constexpr int64_t kFewRows = 1024;  // up to that many, a block a row: reads x again for each of them, but all at once
constexpr int kMostTopk = 16;  // that is unrolled
constexpr int kMostStageBytes = 32 * 1024;  // of a row in shared memory: several blocks share a processor
constexpr int kVector = 16;                 // bytes
constexpr int kRingBytes = 200 * 1024, kMostStages = 16, kLeastStages = 3;  // of moe_unpermute_bulk

jit::KernelSource source_of(const char* name, const char* config, const char* args, int threads) {
  jit::KernelSource source;
  source.name = name;
  source.header = "cuda/moe_dispatch.cuh";
  source.config = config;
  source.args = args;
  source.threads = threads;
  source.pdl = true;
  return source;
}

// Three tables of the block, one of 16-bit counts for each warp.
int table_bytes(int64_t capacity, int threads) { return int(capacity * (3 * 4 + threads / kWarp * 2)); }

int64_t capacity_for(int64_t experts, int threads) { return ceil_div(experts, threads) * threads; }

struct MapShape {
  int threads, rounds;
  int64_t chunks;
  bool cluster;
};

// One block for the slots that it can take in one round; a cluster, as long as the registers of its threads hold them;
// beyond that, or without clusters, blocks of a few rounds, so that there are many of them.
MapShape map_shape(int64_t slots, int64_t experts, const jit::DeviceFacts& facts) {
  MapShape shape{kMostThreads, 1, 1, false};
  const auto fits = [&] {
    const int bytes = table_bytes(capacity_for(experts, shape.threads), shape.threads);
    return bytes <= facts.shared_bytes_per_block - kStaticBytes;
  };
  while (shape.threads > kLeastThreads && (!fits() || shape.threads / 2 >= slots)) shape.threads /= 2;
  if (slots <= shape.threads) return shape;
  const auto rounds_over = [&](int64_t blocks) {
    return int(std::bit_ceil(uint64_t(ceil_div(slots, blocks * shape.threads))));
  };
  shape.cluster = facts.capability >= 90 && rounds_over(kCluster) <= kMostRounds;
  shape.rounds = shape.cluster ? rounds_over(kCluster) : std::clamp(rounds_over(kMostChunks), 2, kMostRounds);
  shape.chunks = shape.cluster ? kCluster : ceil_div(slots, int64_t(shape.threads) * shape.rounds);
  return shape;
}

jit::KernelSource source_of(const char* name, const ExpertMapConfig& c) {
  jit::KernelSource source = source_of(name, "ExpertMapConfig", "ExpertMapArgs", c.threads);
  source.facts = {{"wide_ids", c.wide_ids}, {"counted", c.counted}, {"cluster", c.cluster}, {"bits", c.bits},
                  {"rounds", c.rounds}, {"capacity", c.capacity}, {"threads", c.threads}};
  source.cluster = c.cluster;
  source.shared_bytes = table_bytes(c.capacity, c.threads);
  return source;
}

jit::KernelSource describe_count(const ExpertMapConfig& c) { return source_of("expert_count", c); }
jit::KernelSource describe_map(const ExpertMapConfig& c) { return source_of("expert_map", c); }

jit::KernelSource source_of(const char* name, const MoePermuteConfig& c) {
  jit::KernelSource source = source_of(name, "MoePermuteConfig", "MoePermuteArgs", c.threads);
  source.facts = {{"access", c.access}, {"topk", c.topk}, {"vectors", c.vectors}, {"threads", c.threads},
                  {"stage_bytes", c.stage_bytes}};
  source.shared_bytes = c.stage_bytes;
  return source;
}

jit::KernelSource describe_by_token(const MoePermuteConfig& c) { return source_of("moe_permute_by_token", c); }
jit::KernelSource describe_bulk(const MoePermuteConfig& c) { return source_of("moe_permute_bulk", c); }
jit::KernelSource describe_by_row(const MoePermuteConfig& c) { return source_of("moe_permute_by_row", c); }

jit::KernelSource describe_scales(const MoePermuteScalesConfig& c) {
  jit::KernelSource source =
      source_of("moe_permute_scales", "MoePermuteScalesConfig", "MoePermuteScalesArgs", c.threads);
  source.facts = {{"bytes", c.bytes}, {"by_rows", c.by_rows}, {"threads", c.threads}};
  return source;
}

jit::KernelSource source_of(const char* name, const MoeUnpermuteConfig& c) {
  jit::KernelSource source = source_of(name, "MoeUnpermuteConfig", "MoeUnpermuteArgs", c.threads);
  source.header = "cuda/moe_unpermute.cuh";
  source.facts = {{"out", c.out},       {"weights", c.weights}, {"coded", c.coded},     {"weighted", c.weighted},
                  {"added", c.added},
                  {"access", c.access}, {"topk", c.topk},       {"threads", c.threads}, {"stages", c.stages}};
  return source;
}

// Of one slot of a token.
int piece_bytes(const MoeUnpermuteConfig& c) { return c.threads * kVector / (c.coded ? size_of(c.out) : 1); }

jit::KernelSource describe_unpermute(const MoeUnpermuteConfig& c) { return source_of("moe_unpermute", c); }
jit::KernelSource describe_unpermute_bulk(const MoeUnpermuteConfig& c) {
  jit::KernelSource source = source_of("moe_unpermute_bulk", c);
  source.threads = c.threads + kWarp;
  source.shared_bytes = c.stages * (c.topk + c.added) * piece_bytes(c);
  return source;
}

// Threads of a block that walks a row of `pieces` accesses.
int threads_for(int64_t pieces, int most = kRowThreads) {
  return int(std::clamp<int64_t>(ceil_div(pieces, kWarp) * kWarp, kWarp, most));
}

int unrolled(int64_t topk) { return topk <= kMostTopk ? int(topk) : 0; }

std::vector<ExpertMapConfig> count_samples() { return {{1, 1, 1, 8, 2, 1024, 1024}}; }
std::vector<ExpertMapConfig> map_samples() {
  return {{1, 0, kCluster, 8, 4, 1024, 1024}, {1, 0, 1, 7, 1, 128, 128}, {0, 1, 1, 11, 8, 2048, 1024}};
}
std::vector<MoePermuteConfig> token_samples() { return {{16, 8, 4, kRowThreads, 0}, {2, 0, 4, 64, 0}}; }
std::vector<MoePermuteConfig> bulk_samples() { return {{16, 0, 4, kWarp, 16384}}; }
std::vector<MoePermuteConfig> row_samples() { return {{16, 0, 4, kRowThreads, 0}, {1, 0, 4, 32, 0}}; }
std::vector<MoePermuteScalesConfig> scales_samples() { return {{4, 1, kRowThreads}, {1, 0, kRowThreads}}; }
std::vector<MoeUnpermuteConfig> unpermute_samples() {
  return {{DType::bf16, DType::f32, 0, 1, 0, 8, 8, kRowThreads, 0},
          {DType::f32, DType::f32, 0, 0, 1, 1, 0, 64, 0},
          {DType::bf16, DType::f32, 1, 1, 0, 8, 8, kRowThreads, 0}};
}
std::vector<MoeUnpermuteConfig> unpermute_bulk_samples() {
  return {{DType::bf16, DType::f32, 0, 1, 0, 8, 8, kRowThreads, 6},
          {DType::bf16, DType::f32, 0, 1, 1, 8, 8, kRowThreads, 5},
          {DType::bf16, DType::f32, 1, 1, 0, 8, 8, 224, 13}};
}

jit::Kernels<ExpertMapConfig> count_kernels(describe_count, count_samples);
jit::Kernels<ExpertMapConfig> map_kernels(describe_map, map_samples);
jit::Kernels<MoePermuteConfig> token_kernels(describe_by_token, token_samples);
jit::Kernels<MoePermuteConfig> bulk_kernels(describe_bulk, bulk_samples);
jit::Kernels<MoePermuteConfig> row_kernels(describe_by_row, row_samples);
jit::Kernels<MoePermuteScalesConfig> scales_kernels(describe_scales, scales_samples);
jit::Kernels<MoeUnpermuteConfig> unpermute_kernels(describe_unpermute, unpermute_samples);
jit::Kernels<MoeUnpermuteConfig> unpermute_bulk_kernels(describe_unpermute_bulk, unpermute_bulk_samples);

}  // namespace

int64_t most_local_experts(int device) {
  const int bytes = jit::device_facts(device).shared_bytes_per_block - kStaticBytes;
  return bytes / table_bytes(1, kLeastThreads) / kLeastThreads * kLeastThreads;
}

ExpertMapPlan plan_expert_map(int64_t slots, int64_t num_local_experts, int device) {
  const MapShape shape = map_shape(slots, num_local_experts, jit::device_facts(device));
  return {shape.chunks, shape.chunks > 1 && !shape.cluster};
}

void expert_map(const ExpertMapArgs& args, int device) {
  const MapShape shape = map_shape(args.slots, args.num_local_experts, jit::device_facts(device));
  const ExpertMapConfig c{args.wide_ids,
                          args.cursors != nullptr,
                          shape.cluster ? kCluster : 1,
                          int(std::bit_width(uint64_t(args.num_local_experts - 1))),
                          shape.rounds,
                          int(capacity_for(args.num_local_experts, shape.threads)),
                          shape.threads};
  const jit::Grid grid{unsigned(args.chunks)};
  if (c.counted) count_kernels.launch(device, c, grid, args);
  map_kernels.launch(device, c, grid, args);
}

void moe_permute(const MoePermuteArgs& args, int device) {
  if (args.row_bytes == 0) return;
  Access access(args.row_bytes, 16);
  access.limit(args.x, 1);
  access.limit(args.out, 1);
  access.limit_stride(args.row_stride, 1);
  MoePermuteConfig c{access.elements(), 0, 4, threads_for(args.row_bytes / access.elements()), 0};
  if (!args.slots_to_rows || args.rows <= kFewRows) return row_kernels.launch(device, c, {unsigned(args.rows)}, args);
  const jit::Grid grid{unsigned(args.tokens + ceil_div(args.rows, kRowsToFill))};
  if (c.access == 16 && jit::device_facts(device).capability >= 90) {
    c.threads = kWarp;
    c.stage_bytes = int(std::min<uint64_t>(std::bit_ceil(uint64_t(args.row_bytes)), kMostStageBytes));
    return bulk_kernels.launch(device, c, grid, args);
  }
  c.topk = unrolled(args.topk);
  token_kernels.launch(device, c, grid, args);
}

void moe_permute_scales(const MoePermuteScalesArgs& args, int device) {
  const MoePermuteScalesConfig c{args.bytes, args.out_row_stride < args.out_column_stride, kRowThreads};
  scales_kernels.launch(device, c, {unsigned(ceil_div(args.rows * args.columns, c.threads))}, args);
}

void moe_unpermute(const MoeUnpermuteArgs& args, int device) {
  if (args.hidden_size == 0) return;
  const int element = size_of(args.dtype), y_element = args.coded ? 1 : element;
  Access access(args.hidden_size, 16 / element);
  access.limit(args.y, y_element);
  access.limit(args.addend, element);
  access.limit(args.out, element);
  access.limit_stride(args.row_stride, y_element);
  const int64_t pieces = ceil_div(args.hidden_size, 16 / element);
  const bool few = args.tokens * ceil_div(pieces, kRowThreads) < kFewBlocks;
  MoeUnpermuteConfig c{args.dtype,
                       args.weights ? args.weights_dtype : DType::f32,
                       args.coded,
                       args.weights != nullptr,
                       args.addend != nullptr,
                       access.elements(),
                       unrolled(args.topk),
                       threads_for(pieces, few ? kFewThreads : kRowThreads),
                       0};
  const jit::DeviceFacts& facts = jit::device_facts(device);
  const uint64_t bits =
      reinterpret_cast<uintptr_t>(args.y) | reinterpret_cast<uintptr_t>(args.addend) | uint64_t((args.row_stride | args.hidden_size) * y_element);
  const bool copies = facts.capability >= 90 && bits % kVector == 0 && c.access * element == kVector;
  if (copies && args.tokens >= kFewBlocks && c.topk) {
    c.threads = threads_for(ceil_div(pieces, ceil_div(pieces, kRowThreads)));  // of a piece, all of the same size
    c.stages = std::min(kRingBytes / ((c.topk + c.added) * piece_bytes(c)), kMostStages);
    const int64_t blocks = std::min<int64_t>(args.tokens, facts.multiprocessors);
    if (c.stages >= kLeastStages) return unpermute_bulk_kernels.launch(device, c, {unsigned(blocks)}, args);
    c.stages = 0;
  }
  const int64_t blocks = args.tokens < kFewBlocks ? ceil_div(pieces, c.threads) : 1;
  unpermute_kernels.launch(device, c, {unsigned(args.tokens * blocks)}, args);
}

}  // namespace deepinfer::cuda
