#include "mqa_logits.h"

#include <algorithm>

#include "../jit/cuda_launch.h"
#include "../jit/tensor_map.h"
#include "launch.h"
#include "mqa_logits_config.h"

namespace deepinfer::cuda {

namespace {

// As in mqa_logits.cuh.
constexpr int kDepth = 128, kKeys = 128, kStages = 8, kThreads = 384, kMostColumns = 128;
constexpr int kPortableThreads = 256;

jit::KernelSource describe(const MqaLogitsConfig& c) {
  jit::KernelSource source;
  source.name = "mqa_logits";
  source.header = "cuda/mqa_logits.cuh";
  source.config = "MqaLogitsConfig";
  source.args = "MqaLogitsKernelArgs";
  source.facts = {{"heads", c.heads}, {"queries", c.queries}, {"box", c.box}, {"paged", c.paged}};
  source.threads = kThreads;
  source.blocks_per_sm = 1;
  source.shared_bytes = 1024 + 2 * c.queries * c.heads * kDepth + kStages * kKeys * kDepth + 8 * (4 + 2 * kStages);
  source.pdl = true;
  return source;
}

std::vector<MqaLogitsConfig> samples() {
  return {{64, 2, 64, 0}, {32, 4, 64, 0}, {64, 1, 64, 1}, {64, 2, 64, 1}, {32, 3, 16, 1}};
}

struct PortableConfig {
  int threads;
};

jit::KernelSource describe_portable(const PortableConfig& c) {
  jit::KernelSource source;
  source.name = "mqa_logits_portable";
  source.header = "cuda/mqa_logits_portable.cuh";
  source.config = "MqaLogitsPortableConfig";
  source.args = "MqaLogitsArgs";
  source.facts = {{"threads", c.threads}};
  source.threads = c.threads;
  source.pdl = true;
  return source;
}

std::vector<PortableConfig> portable_samples() { return {{kPortableThreads}}; }

jit::Kernels<MqaLogitsConfig> kernels(describe, samples);
jit::Kernels<PortableConfig> portable_kernels(describe_portable, portable_samples);

// Neighbouring rows that share their keys: any without pages, those of one request with them.
int queries_of(const MqaLogitsArgs& args) {
  const int most = kMostColumns / int(args.heads);
  if (!args.page_table) return most;
  int queries = int(std::min<int64_t>(most, args.table_rows));
  while (args.table_rows % queries != 0) --queries;
  return queries;
}

bool suits_copy_engine(const MqaLogitsArgs& args) {
  const int64_t page = args.page_size;
  const bool pages = !args.page_table || page % 64 == 0 || (64 % page == 0 && page >= 8);
  return pages && args.depth == kDepth && (args.heads == 32 || args.heads == 64) &&
         (reinterpret_cast<uintptr_t>(args.q) | reinterpret_cast<uintptr_t>(args.k)) % 16 == 0;
}

TensorMap map_of_heads(const MqaLogitsArgs& args, int columns) {
  jit::TensorMapSpec spec{};
  spec.type = jit::TensorMapType::u8;
  spec.rank = 2;
  spec.address = const_cast<void*>(args.q);
  spec.sizes[0] = kDepth;
  spec.sizes[1] = uint64_t(args.rows * args.heads);
  spec.strides[0] = kDepth;
  spec.box[0] = kDepth;
  spec.box[1] = uint32_t(columns);
  spec.swizzle = jit::Swizzle::bytes128;
  return jit::encode_tensor_map(spec, "the queries of index logits");
}

TensorMap map_of_keys(const MqaLogitsArgs& args, int box) {
  jit::TensorMapSpec spec{};
  spec.type = jit::TensorMapType::u8;
  spec.rank = 3;
  spec.address = const_cast<uint8_t*>(args.k);
  spec.sizes[0] = kDepth;
  spec.sizes[1] = uint64_t(args.page_size);
  spec.sizes[2] = uint64_t(args.pages);
  spec.strides[0] = kDepth;
  spec.strides[1] = uint64_t(args.page_bytes);
  spec.box[0] = kDepth;
  spec.box[1] = uint32_t(box);
  spec.box[2] = 1;
  spec.swizzle = jit::Swizzle::bytes128;
  return jit::encode_tensor_map(spec, "the keys of index logits");
}

}  // namespace

void mqa_logits(const MqaLogitsArgs& args, int device) {
  const jit::DeviceFacts& facts = jit::device_facts(device);
  if (facts.capability != 90 || !suits_copy_engine(args)) {
    const int64_t blocks = std::min<int64_t>(args.rows, int64_t(facts.multiprocessors) * 8);
    return portable_kernels.launch(device, {kPortableThreads}, {unsigned(blocks)}, args);
  }
  MqaLogitsConfig c{};
  c.heads = int(args.heads);
  c.queries = queries_of(args);
  c.paged = args.page_table != nullptr;
  c.box = c.paged ? int(std::min<int64_t>(args.page_size, 64)) : 64;
  MqaLogitsKernelArgs kernel_args{};
  kernel_args.q = map_of_heads(args, c.queries * c.heads);
  kernel_args.k = map_of_keys(args, c.box);
  kernel_args.problem = args;
  // Small enough chunks that processors finish together, large enough that the queries are loaded seldom.
  const int64_t blocks = ceil_div(args.rows, c.queries), wanted = ceil_div(6 * facts.multiprocessors, blocks);
  const int64_t chunk = std::clamp<int64_t>(ceil_div(ceil_div(args.tokens, wanted), kKeys) * kKeys, 1024, 16384);
  kernel_args.problem.chunk = chunk;
  const int64_t items = blocks * ceil_div(args.tokens, chunk);
  kernels.launch(device, c, {unsigned(std::min<int64_t>(items, facts.multiprocessors))}, kernel_args);
}

}  // namespace deepinfer::cuda
