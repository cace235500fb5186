#include "activation.h"

#include <limits>

#include "../jit/cuda_launch.h"
#include "activation_config.h"
#include "launch.h"
#include "quant_names.h"
#include "quant_plan.h"

namespace deepinfer::cuda {

namespace {

constexpr int kThreads = 256, kShortThreads = 128, kFewThreads = 64;
constexpr int64_t kThreadsToFill = 512;  // a processor: no more pieces a thread before there are as many threads

const char* name_of(Gated form) {
  switch (form) {
    case Gated::silu: return "Gated::silu";
    case Gated::swish: return "Gated::swish";
    case Gated::gelu: return "Gated::gelu";
    case Gated::gelu_tanh: return "Gated::gelu_tanh";
  }
  return "";
}

jit::KernelSource describe(const GatedConfig& c) {
  jit::KernelSource source;
  source.name = "gated_activation";
  source.header = "cuda/activation.cuh";
  source.config = "GatedConfig";
  source.args = "GatedArgs";
  source.facts = {{"x", c.x},
                  {"form", name_of(c.form)},
                  {"limited", c.limited},
                  {"weighted", c.weighted},
                  {"interleaved", c.interleaved},
                  {"access", c.access},
                  {"lanes", c.lanes},
                  {"rows", c.rows},
                  {"vectors", c.vectors},
                  {"strided", c.strided}};
  source.threads = c.lanes * c.rows;
  source.pdl = true;
  return source;
}

// Results of a piece of 16 bytes.
template <typename Config>
int results(const Config& c) { return 16 / size_of(c.x) / (c.interleaved ? 2 : 1); }

bool is_dense(const Rows& rows, int64_t size) {
  return rows.dims == 0 || (rows.dims == 1 && rows.strides[0] == size);
}

// Rows that follow each other without gaps are one long row, whose kernel does not depend on their size.
bool join_rows(GatedArgs& args) {
  if (args.row_weights || !is_dense(args.gate_rows, args.interleaved ? 2 * args.size : args.size)) return false;
  if (!args.interleaved && !is_dense(args.up_rows, args.size)) return false;
  args.size *= args.gate_rows.count;
  args.gate_rows = args.up_rows = Rows{};
  return true;
}

// How a row is laid out over threads: in runs of about the same length, short rows together in a block.
void plan_row(GatedConfig& c, int64_t size, bool few, bool joined) {
  const int most = few ? kFewThreads : kThreads;
  c.vectors = few ? 1 : c.interleaved ? 4 : 2;
  const int64_t pieces = ceil_div(size, results(c)), runs = ceil_div(pieces, most * c.vectors);
  const int64_t lanes = joined ? most : ceil_div(pieces, runs * c.vectors);
  c.lanes = int(lanes > 32 ? ceil_div(lanes, 32) * 32 : std::bit_ceil(uint64_t(lanes)));
  c.rows = joined ? 1 : std::max(1, kShortThreads / c.lanes);
}

// What does not depend on the layout over threads. Accesses do not cross a multiple of `unit` results.
template <typename Config>
Config plan_inputs(const GatedArgs& args, int64_t unit) {
  Config c{};
  c.x = args.dtype;
  c.form = args.form;
  c.limited = args.limit < std::numeric_limits<float>::infinity() &&
              (c.form == Gated::silu || c.form == Gated::swish);
  c.weighted = args.row_weights != nullptr;
  c.interleaved = args.interleaved;
  c.strided = args.gate_rows.dims > 1 || (!c.interleaved && args.up_rows.dims > 1);
  Access access(c.interleaved ? 2 * args.size : args.size, 16 / size_of(c.x));
  access.limit(args.gate, args.gate_rows, size_of(c.x));
  if (!c.interleaved) access.limit(args.up, args.up_rows, size_of(c.x));
  access.divide(c.interleaved ? 2 * unit : unit);
  c.access = access.elements();
  return c;
}

GatedConfig plan(const GatedArgs& args, bool joined, int device) {
  GatedConfig c = plan_inputs<GatedConfig>(args, args.size);
  const int64_t threads = ceil_div(args.size, results(c)) * args.gate_rows.count;
  plan_row(c, args.size, threads < jit::device_facts(device).multiprocessors * kThreadsToFill, joined);
  return c;
}

std::vector<GatedConfig> samples() {
  std::vector<GatedConfig> configs;
  auto add = [&](DType x, Gated form, int64_t size, bool few, bool joined) -> GatedConfig& {
    GatedConfig c{};
    c.x = x;
    c.form = form;
    c.access = 16 / size_of(x);
    plan_row(c, size, few, joined);
    return configs.emplace_back(c);
  };
  for (bool few : {false, true}) {
    add(DType::bf16, Gated::silu, 7168, few, true);   // gate and up of their own
    add(DType::bf16, Gated::silu, 2048, few, false);  // halves of one tensor
  }
  for (Gated form : {Gated::gelu, Gated::gelu_tanh})
    for (DType x : {DType::bf16, DType::f32}) add(x, form, 14336, false, false);
  add(DType::bf16, Gated::silu, 768, false, false).weighted = 1;
  add(DType::f32, Gated::silu, 768, false, true);
  for (bool few : {false, true}) {  // gpt-oss
    GatedConfig& c = add(DType::bf16, Gated::swish, 2880, few, true);
    c.limited = c.interleaved = 1;
    plan_row(c, 2880, few, true);
  }
  for (int interleaved : {0, 1}) {  // misaligned
    GatedConfig& c = add(DType::f16, Gated::swish, 70, false, false);
    c.limited = c.weighted = c.strided = c.access = 1;
    c.interleaved = interleaved;
    plan_row(c, 70, false, false);
  }
  return configs;
}

jit::Kernels<GatedConfig> kernels(describe, samples);

// ---- with quantisation ----

jit::KernelSource describe_quant(const GatedQuantConfig& c) {
  jit::KernelSource source;
  source.name = "gated_quant";
  source.header = "cuda/activation.cuh";
  source.config = "GatedQuantConfig";
  source.args = "GatedQuantArgs";
  source.facts = {{"x", c.x},
                  {"form", name_of(c.form)},
                  {"limited", c.limited},
                  {"weighted", c.weighted},
                  {"interleaved", c.interleaved},
                  {"mapped", c.mapped},
                  {"code", cuda::name_of(c.code)},
                  {"scale", cuda::name_of(c.scale)},
                  {"access", c.access},
                  {"lanes", c.lanes},
                  {"vectors", c.vectors},
                  {"groups", c.groups},
                  {"rows", c.rows},
                  {"longer", c.longer},
                  {"strided", c.strided}};
  source.threads = whole_warps(c.lanes * c.groups * c.rows);
  source.pdl = true;
  return source;
}

// 16 results a thread.
void plan_groups(GatedQuantConfig& c, int64_t group, int64_t across) {
  cuda::plan_groups(c, results(c), 16 / results(c), group, across);
}

GatedQuantConfig plan(const GatedQuantArgs& args) {
  const QuantizedRows& out = args.quantized;
  GatedQuantConfig c = plan_inputs<GatedQuantConfig>(args.gated, out.scales.across > 1 ? out.group : args.gated.size);
  c.mapped = args.rows_to_slots != nullptr;
  c.code = out.code;
  c.scale = out.scales.type;
  plan_groups(c, out.group, out.scales.across);
  return c;
}

std::vector<GatedQuantConfig> quant_samples() {
  std::vector<GatedQuantConfig> configs;
  auto add = [&](DType x, Code code, ScaleType scale, int64_t group, int64_t size) -> GatedQuantConfig& {
    GatedQuantConfig c{};
    c.x = x;
    c.form = Gated::silu;
    c.code = code;
    c.scale = scale;
    c.access = 16 / size_of(x);
    plan_groups(c, group, ceil_div(size, group));
    return configs.emplace_back(c);
  };
  for (int64_t size : {2048, 7168}) add(DType::bf16, Code::e4m3, ScaleType::f32, 128, size);
  GatedQuantConfig& experts = add(DType::bf16, Code::e4m3, ScaleType::packed, 128, 2048);
  experts.limited = experts.weighted = experts.mapped = 1;
  add(DType::bf16, Code::int8, ScaleType::f32, 7168, 7168);
  add(DType::bf16, Code::e2m1, ScaleType::e8m0, 32, 2048);
  add(DType::f32, Code::e4m3, ScaleType::power, 100000, 100000);  // too long for registers
  GatedQuantConfig& misaligned = add(DType::f16, Code::e4m3, ScaleType::f32, 7, 70);
  misaligned.form = Gated::swish;
  misaligned.limited = misaligned.interleaved = misaligned.strided = misaligned.access = 1;
  plan_groups(misaligned, 7, 10);
  return configs;
}

jit::Kernels<GatedQuantConfig> quant_kernels(describe_quant, quant_samples);

}  // namespace

void gated_activation(const GatedArgs& given, int device) {
  if (given.size == 0 || given.gate_rows.count == 0) return;
  GatedArgs args = given;
  const bool joined = join_rows(args);
  const GatedConfig c = plan(args, joined, device);
  const int64_t runs = ceil_div(args.size, int64_t(results(c)) * c.lanes * c.vectors);
  kernels.launch(device, c, {unsigned(runs * ceil_div(args.gate_rows.count, c.rows))}, args);
}

void gated_quant(const GatedQuantArgs& args, int device) {
  if (args.gated.size == 0 || args.gated.gate_rows.count == 0) return;
  const GatedQuantConfig c = plan(args);
  quant_kernels.launch(device, c, group_grid(c, args.gated.gate_rows.count, args.quantized.scales.across), args);
}

}  // namespace deepinfer::cuda
