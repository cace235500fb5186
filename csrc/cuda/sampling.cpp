#include "sampling.h"

#include "../jit/cuda_launch.h"
#include "launch.h"
#include "sampling_config.h"

namespace deepinfer::cuda {

namespace {

constexpr int kAcceptThreads = 128;

jit::KernelSource source_of(const char* name, const char* args, const SamplingConfig& c) {
  constexpr int kBinBytes = 2048 * 4 + 8;  // the sums of a longest row's chunks need one more if it is not aligned
  jit::KernelSource source;
  source.name = name;
  source.header = "cuda/sampling.cuh";
  source.config = "SamplingConfig";
  source.args = args;
  source.facts = {{"x", c.x},         {"threads", c.threads}, {"cluster", c.cluster},   {"most", c.most},
                  {"slack", c.slack}, {"limit", c.limit},     {"capacity", c.capacity}, {"strided", c.strided}};
  source.threads = c.threads;
  source.cluster = c.cluster;
  source.shared_bytes = (c.capacity + c.most + c.slack) * 8 + kBinBytes;
  source.pdl = true;
  return source;
}

jit::KernelSource describe_sample(const SamplingConfig& c) { return source_of("sample", "SampleArgs", c); }

jit::KernelSource describe_verify(const SamplingConfig& c) {
  jit::KernelSource source = source_of("spec_verify", "SpecVerifyArgs", c);
  source.blocks_per_sm = 1;  // for the registers: it holds two distributions
  return source;
}

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

// Two blocks fit on a processor, so that one reads while the other selects. With few rows several blocks read one.
SamplingConfig plan(const Distributions& from, int multiprocessors, bool clusters) {
  constexpr int kPerThread = 16, kMargin = 1536, kMostBlocks = 8;
  SamplingConfig c{from.dtype, 512, 1, 1024, 512, 0, 0, from.rows.dims > 1};
  const int round = c.threads * kPerThread;
  c.limit = c.most + kMargin;
  c.capacity = c.limit + round;
  while (clusters && c.cluster < kMostBlocks && from.rows.count * c.cluster * 2 <= multiprocessors &&
         from.size >= c.cluster * int64_t(round))
    c.cluster *= 2;
  return c;
}

SamplingConfig plan(const Distributions& from, int device) {
  const jit::DeviceFacts& facts = jit::device_facts(device);
  return plan(from, facts.multiprocessors, facts.capability >= 90);
}

std::vector<SamplingConfig> samples() {
  std::vector<SamplingConfig> configs;
  for (auto [dtype, rows] : {std::pair{DType::f32, 256}, {DType::bf16, 1}, {DType::f16, 64}}) {
    Distributions from{};
    from.dtype = dtype;
    from.rows.count = rows;
    from.size = 129280;
    configs.push_back(plan(from, 132, true));
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
