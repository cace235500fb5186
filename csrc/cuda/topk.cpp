#include "topk.h"

#include <algorithm>
#include <bit>

#include "../jit/cuda_launch.h"
#include "launch.h"
#include "topk_config.h"

namespace deepinfer::cuda {

namespace {

constexpr int kMostListed = 4096;  // the greatest k whose list fits in shared memory
constexpr int kPerThread = 16, kBinBytes = 2048 * 4;
constexpr int kManyThreads = 1024;

const char* name_of(TopkOrder order) {
  return order == TopkOrder::by_value ? "TopkOrder::by_value" : "TopkOrder::by_index";
}

jit::KernelSource describe(const TopkConfig& c) {
  jit::KernelSource source;
  source.name = "topk";
  source.header = "cuda/topk.cuh";
  source.config = "TopkConfig";
  source.args = "TopkArgs";
  source.facts = {{"x", c.x},         {"threads", c.threads},   {"cluster", c.cluster},      {"most", c.most},
                  {"slack", c.slack}, {"limit", c.limit}, {"capacity", c.capacity}, {"order", name_of(c.order)},
                  {"wide_index", c.wide_index}, {"values", c.values}, {"strided", c.strided}};
  source.threads = c.threads;
  source.cluster = c.cluster;
  source.shared_bytes = (c.capacity + c.most + c.slack) * 8 + kBinBytes;
  source.pdl = true;
  return source;
}

jit::KernelSource describe_many(const TopkManyConfig& c) {
  jit::KernelSource source;
  source.name = "topk_many";
  source.header = "cuda/topk.cuh";
  source.config = "TopkManyConfig";
  source.args = "TopkArgs";
  source.facts = {{"x", c.x},           {"threads", c.threads}, {"order", name_of(c.order)}, {"wide_index", c.wide_index},
                  {"values", c.values}, {"strided", c.strided}};
  source.threads = c.threads;
  source.pdl = true;
  return source;
}

// How a row is shared out. Few rows: several blocks each, as long as every block has a round of work and the first one
// room for what the others found. Many rows: smaller blocks, so that some read while others select.
void plan_row(TopkConfig& c, int64_t rows, int64_t row_size, int64_t k, int multiprocessors, bool clusters) {
  constexpr int kMostBlocks = 16, kMargin = 1536;
  c.most = std::max(256, int(std::bit_ceil(uint64_t(k))));
  const bool many = rows >= 3 * int64_t(multiprocessors);
  c.threads = row_size <= 2048 ? 128 : row_size <= 4096 || (many && k <= 1024) ? 256 : 512;
  const int round = c.threads * kPerThread;
  c.slack = std::min(c.most / 2, 512);
  c.limit = c.most + kMargin;
  c.capacity = c.limit + round;
  c.cluster = 1;
  while (clusters && c.cluster < kMostBlocks && rows * c.cluster * 2 <= multiprocessors &&
         row_size >= c.cluster * int64_t(round) && c.cluster * 2 * k <= c.capacity)
    c.cluster *= 2;
  // A row of one round needs no more than its own size, and a sort a power of two.
  if (c.cluster == 1 && row_size + 16 <= round)
    c.capacity = std::min(c.capacity, std::max(c.most, int(std::bit_ceil(uint64_t(row_size + 16)))));
}

TopkConfig plan(const TopkArgs& args, const jit::DeviceFacts& facts) {
  TopkConfig c{};
  c.x = args.dtype;
  c.order = args.order;
  c.wide_index = args.wide_index;
  c.values = args.values != nullptr;
  c.strided = args.x_rows.dims > 1;
  plan_row(c, args.x_rows.count, args.row_size, args.k, facts.multiprocessors, facts.capability >= 90);
  return c;
}

std::vector<TopkConfig> samples() {
  std::vector<TopkConfig> configs;
  for (auto [x, rows, row_size, k, order, wide, values] :
       {std::tuple{DType::bf16, 4096, 131072, 512, TopkOrder::by_index, 0, 0},
        std::tuple{DType::bf16, 256, 131072, 512, TopkOrder::by_index, 0, 0},
        std::tuple{DType::bf16, 6, 1 << 20, 1024, TopkOrder::by_index, 0, 0},
        std::tuple{DType::f32, 1, 129280, 512, TopkOrder::by_value, 1, 1},
        std::tuple{DType::f32, 64, 129280, 50, TopkOrder::by_value, 1, 1},
        std::tuple{DType::f16, 4096, 1024, 512, TopkOrder::by_index, 0, 1},
        std::tuple{DType::f32, 4, 262144, 4096, TopkOrder::by_value, 1, 1}}) {
    TopkConfig c{x, 0, 0, 0, 0, 0, 0, order, wide, values, 0};
    plan_row(c, rows, row_size, k, 132, true);
    configs.push_back(c);
  }
  return configs;
}

std::vector<TopkManyConfig> many_samples() {
  return {{DType::bf16, kManyThreads, TopkOrder::by_value, 1, 1, 1}};
}

jit::Kernels<TopkConfig> kernels(describe, samples);
jit::Kernels<TopkManyConfig> many_kernels(describe_many, many_samples);

}  // namespace

int64_t topk_scratch(const TopkArgs& args) {
  return args.k > kMostListed && args.order == TopkOrder::by_value ? int64_t(std::bit_ceil(uint64_t(args.k))) : 0;
}

void topk(const TopkArgs& args, int device) {
  const unsigned rows = unsigned(args.x_rows.count);
  if (args.k > kMostListed) {
    const TopkManyConfig config{args.dtype, kManyThreads, args.order, args.wide_index, args.values != nullptr,
                                args.x_rows.dims > 1};
    return many_kernels.launch(device, config, {rows}, args);
  }
  const TopkConfig config = plan(args, jit::device_facts(device));
  kernels.launch(device, config, {rows * config.cluster}, args);
}

}  // namespace deepinfer::cuda
