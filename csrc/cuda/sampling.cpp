#include "sampling.h"

#include <algorithm>

#include "../jit/cuda_launch.h"
#include "filter_plan.h"
#include "launch.h"
#include "sampling_config.h"

namespace deepinfer::cuda {

namespace {

constexpr int kAcceptThreads = 128;

jit::KernelSource source_of(const char* name, const char* args, const SamplingConfig& c) {
  jit::KernelSource source;
  source.name = name;
  source.header = "cuda/sampling.cuh";
  source.config = "SamplingConfig";
  source.args = args;
  source.facts = {{"x", c.x},       {"threads", c.threads},   {"stages", c.stages}, {"cluster", c.cluster},
                  {"most", c.most}, {"capacity", c.capacity}, {"bulk", c.bulk},     {"strided", c.strided}};
  source.threads = c.threads;
  source.cluster = c.cluster;
  source.blocks_per_sm = 1;  // lifts the compiler's own limit on registers
  source.shared_bytes = filter_bytes(c.threads, c.stages, c.capacity);
  source.pdl = true;
  return source;
}

jit::KernelSource describe_sample(const SamplingConfig& c) { return source_of("sample", "SampleArgs", c); }

jit::KernelSource describe_verify(const SamplingConfig& c) { return source_of("spec_verify", "SpecVerifyArgs", c); }

jit::KernelSource describe_accept(const SpecAcceptConfig& c) {
  jit::KernelSource source;
  source.name = "spec_accept";
  source.header = "cuda/sampling.cuh";
  source.config = "SpecAcceptConfig";
  source.args = "SpecVerifyArgs";
  source.facts = {{"threads", c.threads}};
  source.threads = c.threads;
  source.pdl = true;
  return source;
}

SamplingConfig plan(const Distributions& from, const jit::DeviceFacts& facts) {
  constexpr int kMost = 1024, kUsual = 512;
  const int64_t k = from.rows.count > facts.multiprocessors ? kUsual : kMost;  // what clusters gather has to fit
  FilterPlan plan = plan_filter(from.rows.count, from.size * size_of(from.dtype), k, facts);
  plan.most = kMost;
  plan.capacity = std::max(plan.capacity, 9 * kMost / 8 + 1024);
  return {from.dtype, plan.threads, plan.stages, plan.cluster, plan.most, plan.capacity, plan.bulk, from.rows.dims > 1};
}

SamplingConfig plan(const Distributions& from, int device) {
  return plan(from, jit::device_facts(device));
}

std::vector<SamplingConfig> samples() {
  std::vector<SamplingConfig> configs;
  for (auto [dtype, rows] : {std::pair{DType::f32, 256}, {DType::bf16, 1}, {DType::f16, 64}}) {
    Distributions from{};
    from.dtype = dtype;
    from.rows.count = rows;
    from.size = 129280;
    configs.push_back(plan(from, typical_device()));
  }
  return configs;
}

std::vector<SpecAcceptConfig> accept_samples() { return {{kAcceptThreads}}; }

jit::Kernels<SamplingConfig> sample_kernels(describe_sample, samples);
jit::Kernels<SamplingConfig> verify_kernels(describe_verify, samples);
jit::Kernels<SpecAcceptConfig> accept_kernels(describe_accept, accept_samples);

}  // namespace

void sample(const SampleArgs& args, int device) {
  const SamplingConfig config = plan(args.from, device);
  sample_kernels.launch(device, config, {unsigned(args.from.rows.count * config.cluster)}, args);
}

void spec_verify(const SpecVerifyArgs& args, int device) {
  const SamplingConfig config = plan(args.target, device);
  verify_kernels.launch(device, config, {unsigned(args.target.rows.count * config.cluster)}, args);
  const int64_t batch = args.target.rows.count / (args.drafted + 1);
  accept_kernels.launch(device, SpecAcceptConfig{kAcceptThreads}, {unsigned(ceil_div(batch, kAcceptThreads))}, args);
}

}  // namespace deepinfer::cuda
