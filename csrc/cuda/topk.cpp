#include "topk.h"

#include <algorithm>
#include <bit>

#include "../jit/cuda_launch.h"
#include "filter_plan.h"
#include "launch.h"
#include "topk_config.h"

namespace deepinfer::cuda {

namespace {

constexpr int kMostListed = 4096;  // the greatest k whose list fits in shared memory
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
  source.facts = {{"x", c.x},
                  {"threads", c.threads},
                  {"stages", c.stages},
                  {"cluster", c.cluster},
                  {"most", c.most},
                  {"capacity", c.capacity},
                  {"bulk", c.bulk},
                  {"order", name_of(c.order)},
                  {"wide_index", c.wide_index},
                  {"values", c.values},
                  {"strided", c.strided}};
  source.threads = c.threads;
  source.cluster = c.cluster;
  source.blocks_per_sm = 1;  // lifts the compiler's own limit on registers
  source.shared_bytes = filter_bytes(c.threads, c.stages, c.capacity);
  source.pdl = true;
  return source;
}

jit::KernelSource describe_short(const TopkShortConfig& c) {
  jit::KernelSource source;
  source.name = "topk_short";
  source.header = "cuda/topk_short.cuh";
  source.config = "TopkShortConfig";
  source.args = "TopkArgs";
  source.facts = {{"x", c.x},
                  {"threads", c.threads},
                  {"lanes", c.lanes},
                  {"vectors", c.vectors},
                  {"digit", c.digit},
                  {"wide_index", c.wide_index},
                  {"values", c.values},
                  {"strided", c.strided}};
  source.threads = c.threads;
  source.pdl = true;
  return source;
}

jit::KernelSource describe_many(const TopkManyConfig& c) {
  jit::KernelSource source;
  source.name = "topk_many";
  source.header = "cuda/topk.cuh";
  source.config = "TopkManyConfig";
  source.args = "TopkArgs";
  source.facts = {{"x", c.x},
                  {"threads", c.threads},
                  {"order", name_of(c.order)},
                  {"wide_index", c.wide_index},
                  {"values", c.values},
                  {"strided", c.strided}};
  source.threads = c.threads;
  source.blocks_per_sm = 1;
  source.pdl = true;
  return source;
}

TopkConfig config_of(DType x, TopkOrder order, const FilterPlan& plan) {
  TopkConfig c{};
  c.x = x;
  c.threads = plan.threads;
  c.stages = plan.stages;
  c.cluster = plan.cluster;
  c.most = plan.most;
  c.capacity = plan.capacity;
  c.bulk = plan.bulk;
  c.order = order;
  return c;
}

TopkConfig plan(const TopkArgs& args, const jit::DeviceFacts& facts) {
  TopkConfig c = config_of(args.dtype, args.order,
                           plan_filter(args.x_rows.count, args.row_size * size_of(args.dtype), args.k, facts));
  c.wide_index = args.wide_index;
  c.values = args.values != nullptr;
  c.strided = args.x_rows.dims > 1;
  return c;
}

// Rows in registers: up to 8 KB, in the order of indices.
bool is_short(const TopkArgs& args) {
  return args.order == TopkOrder::by_index && args.row_size * size_of(args.dtype) <= 8192;
}

// A warp for a row, or as many as it takes. Few rows: more threads, and fewer but longer steps.
TopkShortConfig plan_short(DType dtype, int64_t rows, int64_t row_size, bool aligned) {
  constexpr int64_t kFewVectors = 76800;  // of 16 bytes, that the processors hold at once with one for each thread
  TopkShortConfig c{};
  c.x = dtype;
  const int per_vector = 16 / size_of(dtype);
  const int64_t vectors = std::max<int64_t>(1, ceil_div(row_size + (aligned ? 0 : per_vector - 1), per_vector));
  const bool few = rows * vectors <= kFewVectors;
  c.lanes = std::max(32, int(std::bit_ceil(uint64_t(ceil_div(vectors, few ? 2 : 4)))));
  if (few && vectors > 32) c.lanes = std::max(c.lanes, 128);
  c.threads = std::max(c.lanes, 128);
  if (c.lanes > 32) c.lanes = c.threads;
  c.vectors = int(std::bit_ceil(uint64_t(ceil_div(vectors, c.lanes))));
  c.digit = c.lanes > 32 && few ? 2 : 1;
  return c;
}

TopkShortConfig plan_short(const TopkArgs& args) {
  Access access(args.row_size, 16 / size_of(args.dtype));
  access.limit(args.x, args.x_rows, size_of(args.dtype));
  TopkShortConfig c = plan_short(args.dtype, args.x_rows.count, args.row_size,
                                 access.elements() * size_of(args.dtype) == 16);
  c.wide_index = args.wide_index;
  c.values = args.values != nullptr;
  c.strided = args.x_rows.dims > 1;
  return c;
}

std::vector<TopkConfig> samples() {
  std::vector<TopkConfig> configs;
  const jit::DeviceFacts typical = typical_device();
  for (auto [x, rows, row_size, k, order, wide, values] :
       {std::tuple{DType::bf16, 4096, 131072, 512, TopkOrder::by_index, 0, 0},
        std::tuple{DType::bf16, 256, 131072, 1024, TopkOrder::by_index, 0, 0},
        std::tuple{DType::bf16, 6, 1 << 20, 1024, TopkOrder::by_index, 0, 0},
        std::tuple{DType::f32, 1, 129280, 512, TopkOrder::by_value, 1, 1},
        std::tuple{DType::f32, 64, 129280, 50, TopkOrder::by_value, 1, 1},
        std::tuple{DType::f16, 4096, 16384, 512, TopkOrder::by_index, 0, 1},
        std::tuple{DType::f32, 4, 262144, 4096, TopkOrder::by_value, 1, 1}}) {
    TopkConfig c = config_of(x, order, plan_filter(rows, int64_t(row_size) * size_of(x), k, typical));
    c.wide_index = wide;
    c.values = values;
    configs.push_back(c);
  }
  return configs;
}

std::vector<TopkShortConfig> short_samples() {
  return {plan_short(DType::bf16, 4096, 1024, true), plan_short(DType::bf16, 4096, 4096, true),
          plan_short(DType::f16, 6, 4096, true), plan_short(DType::f32, 64, 2048, false)};
}

std::vector<TopkManyConfig> many_samples() {
  return {{DType::bf16, kManyThreads, TopkOrder::by_value, 1, 1, 1}};
}

jit::Kernels<TopkConfig> kernels(describe, samples);
jit::Kernels<TopkShortConfig> short_kernels(describe_short, short_samples);
jit::Kernels<TopkManyConfig> many_kernels(describe_many, many_samples);

}  // namespace

int64_t topk_scratch(const TopkArgs& args) {
  return args.k > kMostListed && args.order == TopkOrder::by_value ? int64_t(std::bit_ceil(uint64_t(args.k))) : 0;
}

void topk(const TopkArgs& args, int device) {
  const unsigned rows = unsigned(args.x_rows.count);
  if (args.k > kMostListed && !is_short(args)) {
    const TopkManyConfig config{args.dtype, kManyThreads, args.order, args.wide_index, args.values != nullptr,
                                args.x_rows.dims > 1};
    return many_kernels.launch(device, config, {rows}, args);
  }
  if (is_short(args)) {
    const TopkShortConfig config = plan_short(args);
    return short_kernels.launch(device, config, {unsigned(ceil_div(rows, config.threads / config.lanes))}, args);
  }
  const TopkConfig config = plan(args, jit::device_facts(device));
  kernels.launch(device, config, {rows * config.cluster}, args);
}

}  // namespace deepinfer::cuda
