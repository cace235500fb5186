#include "moe_dispatch.h"

#include <algorithm>
#include <bit>

#include "../jit/cuda_launch.h"
#include "launch.h"
#include "moe_dispatch_config.h"

namespace deepinfer::cuda {

namespace {

constexpr int64_t kSlotsOfChunk = 1024;
constexpr int64_t kMostSlotsInOneLaunch = 1 << 16;  // up to here each block counts all slots faster than a second launch
constexpr int64_t kMostChunks = 512;
constexpr int kMapThreads = 1024, kRowThreads = 256, kWarp = 32;
constexpr int kMostTopk = 16;  // that is unrolled
constexpr int kRowsToFill = 32;  // of a block of moe_permute, as in moe_dispatch.cuh
constexpr int kMostStageBytes = 32 * 1024;  // of a row in shared memory: several blocks share a processor

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

jit::KernelSource source_of(const char* name, const ExpertMapConfig& c) {
  jit::KernelSource source = source_of(name, "ExpertMapConfig", "ExpertMapArgs", c.threads);
  source.facts = {{"wide_ids", c.wide_ids}, {"counted", c.counted}, {"capacity", c.capacity}, {"threads", c.threads}};
  source.shared_bytes = 2 * c.capacity * int(sizeof(int32_t));
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

jit::KernelSource describe_unpermute(const MoeUnpermuteConfig& c) {
  jit::KernelSource source = source_of("moe_unpermute", "MoeUnpermuteConfig", "MoeUnpermuteArgs", c.threads);
  source.facts = {{"y", c.y},           {"weights", c.weights}, {"weighted", c.weighted},
                  {"access", c.access}, {"topk", c.topk},       {"threads", c.threads}};
  return source;
}

// Threads of a block that walks a row of `pieces` accesses.
int threads_for(int64_t pieces) { return int(std::clamp<int64_t>(ceil_div(pieces, 32) * 32, 32, kRowThreads)); }

int unrolled(int64_t topk) { return topk <= kMostTopk ? int(topk) : 0; }

std::vector<ExpertMapConfig> count_samples() { return {{1, 1, kMapThreads, kMapThreads}}; }
std::vector<ExpertMapConfig> map_samples() {
  return {{1, 0, kMapThreads, kMapThreads}, {0, 1, 2 * kMapThreads, kMapThreads}};
}
std::vector<MoePermuteConfig> token_samples() { return {{16, 8, 4, kRowThreads, 0}, {2, 0, 4, 64, 0}}; }
std::vector<MoePermuteConfig> bulk_samples() { return {{16, 0, 4, kWarp, 16384}}; }
std::vector<MoePermuteConfig> row_samples() { return {{16, 0, 4, kRowThreads, 0}, {1, 0, 4, 32, 0}}; }
std::vector<MoeUnpermuteConfig> unpermute_samples() {
  return {{DType::bf16, DType::f32, 1, 8, 8, kRowThreads}, {DType::f32, DType::f32, 0, 1, 0, 64}};
}

jit::Kernels<ExpertMapConfig> count_kernels(describe_count, count_samples);
jit::Kernels<ExpertMapConfig> map_kernels(describe_map, map_samples);
jit::Kernels<MoePermuteConfig> token_kernels(describe_by_token, token_samples);
jit::Kernels<MoePermuteConfig> bulk_kernels(describe_bulk, bulk_samples);
jit::Kernels<MoePermuteConfig> row_kernels(describe_by_row, row_samples);
jit::Kernels<MoeUnpermuteConfig> unpermute_kernels(describe_unpermute, unpermute_samples);

}  // namespace

int64_t expert_map_chunks(int64_t slots) {
  return std::clamp<int64_t>(ceil_div(slots, kSlotsOfChunk), 1, kMostChunks);
}

bool expert_map_needs_counts(int64_t slots) { return slots > kMostSlotsInOneLaunch; }

void expert_map(const ExpertMapArgs& args, int device) {
  ExpertMapConfig c{args.wide_ids, expert_map_needs_counts(args.slots), 0, kMapThreads};
  c.capacity = int(ceil_div(args.num_local_experts, c.threads)) * c.threads;
  const jit::Grid grid{unsigned(args.chunks)};
  if (c.counted) count_kernels.launch(device, c, grid, args);
  map_kernels.launch(device, c, grid, args);
}

void moe_permute(const MoePermuteArgs& args, int device) {
  if (args.row_bytes == 0) return;
  Access access(args.row_bytes, 16);
  access.limit(args.x, 1);
  access.limit(args.out, 1);
  access.limit(reinterpret_cast<const void*>(args.row_stride), 1);
  MoePermuteConfig c{access.elements(), 0, 4, threads_for(args.row_bytes / access.elements()), 0};
  if (!args.slots_to_rows) return row_kernels.launch(device, c, {unsigned(args.rows)}, args);
  const jit::Grid grid{unsigned(args.tokens + ceil_div(args.rows, kRowsToFill))};
  if (c.access == 16 && jit::device_facts(device).capability >= 90) {
    c.threads = kWarp;
    c.stage_bytes = int(std::min<uint64_t>(std::bit_ceil(uint64_t(args.row_bytes)), kMostStageBytes));
    return bulk_kernels.launch(device, c, grid, args);
  }
  c.topk = unrolled(args.topk);
  token_kernels.launch(device, c, grid, args);
}

void moe_unpermute(const MoeUnpermuteArgs& args, int device) {
  if (args.hidden_size == 0) return;
  const int element = size_of(args.dtype);
  Access access(args.hidden_size, 16 / element);
  access.limit(args.y, element);
  access.limit(args.out, element);
  access.limit(reinterpret_cast<const void*>(args.row_stride * element), element);
  const int64_t pieces = ceil_div(args.hidden_size, 16 / element);
  const MoeUnpermuteConfig c{args.dtype, args.weights ? args.weights_dtype : DType::f32, args.weights != nullptr,
                             access.elements(), unrolled(args.topk), threads_for(pieces)};
  unpermute_kernels.launch(device, c, {unsigned(args.tokens), unsigned(ceil_div(pieces, c.threads))}, args);
}

}  // namespace deepinfer::cuda
