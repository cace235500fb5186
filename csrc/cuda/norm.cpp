#include "norm.h"

#include <algorithm>
#include <bit>

#include "../jit/cuda_launch.h"
#include "launch.h"
#include "norm_config.h"
#include "quant_names.h"

namespace deepinfer::cuda {

const char* name_of(WeightForm form) {
  switch (form) {
    case WeightForm::cast_mul: return "WeightForm::cast_mul";
    case WeightForm::mul_cast: return "WeightForm::mul_cast";
    case WeightForm::one_plus: return "WeightForm::one_plus";
    case WeightForm::none: return "WeightForm::none";
  }
  return "";
}

namespace {

jit::KernelSource describe(const RmsNormConfig& c) {
  jit::KernelSource source;
  source.name = "rms_norm";
  source.header = "cuda/norm.cuh";
  source.config = "RmsNormConfig";
  source.args = "RmsNormArgs";
  source.facts = {{"x", c.x},
                  {"weight", c.weight},
                  {"out", c.out},
                  {"form", name_of(c.form)},
                  {"add", c.add},
                  {"access", c.access},
                  {"lanes", c.lanes},
                  {"rows", c.rows},
                  {"vectors", c.vectors},
                  {"longer", c.longer},
                  {"strided", c.strided},
                  {"group_lanes", c.group_lanes},
                  {"row_scale", c.row_scale},
                  {"code", name_of(c.code)},
                  {"scale", name_of(c.scale)}};
  source.threads = c.lanes * c.rows;
  source.pdl = true;
  return source;
}

// How a row is laid out over threads. Short rows share a block, and below 32 pieces a warp; long ones have a block
// each.
void plan_row(RmsNormConfig& c, int64_t hidden_size) {
  constexpr int kBlock = 128, kWarp = 32, kThreads = 256, kMostThreads = 512, kMostVectors = 4;  // as registers allow
  const int64_t pieces = ceil_div(hidden_size, 16 / size_of(c.x));
  if (pieces <= 4 * kWarp) {
    c.lanes = std::min<int>(kWarp, int(std::bit_ceil(uint64_t(pieces))));
    c.vectors = int(ceil_div(pieces, c.lanes));
    c.rows = kBlock / c.lanes;
  } else {
    c.vectors = int(std::clamp<int64_t>(ceil_div(pieces, kThreads), 2, kMostVectors));
    c.lanes = int(std::min<int64_t>(kMostThreads, ceil_div(ceil_div(pieces, c.vectors), kWarp) * kWarp));
    c.rows = 1;
  }
  c.longer = pieces > int64_t(c.lanes) * c.vectors;
}

// Where the groups of a row lie among its threads; group_lanes stays 0 if nowhere.
void plan_groups(RmsNormConfig& c, int64_t group, int64_t hidden_size) {
  constexpr int kWarp = 32;
  const int64_t piece = 16 / size_of(c.x), lanes = group / piece;
  c.row_scale = group >= hidden_size;
  if (c.longer) return;
  if (c.row_scale) c.group_lanes = c.lanes;
  else if (group % piece == 0 && lanes <= kWarp && std::has_single_bit(uint64_t(lanes)) && c.lanes % lanes == 0)
    c.group_lanes = int(lanes);
}

RmsNormConfig plan(const RmsNormArgs& args) {
  RmsNormConfig c{};
  c.x = args.dtype;
  c.weight = args.weight_dtype;
  c.out = args.out_dtype;
  c.form = args.form;
  c.add = args.residual != nullptr;
  c.strided = args.x_rows.dims > 1 || (c.add && args.residual_rows.dims > 1);
  Access access(args.hidden_size, 16 / size_of(c.x));
  access.limit(args.x, args.x_rows, size_of(c.x));
  access.limit(args.residual, args.residual_rows, size_of(c.x));
  access.limit(args.weight, size_of(c.weight));
  c.access = access.elements();
  plan_row(c, args.hidden_size);
  if (!args.out) {
    plan_groups(c, args.quantized.group, args.hidden_size);
    c.code = args.quantized.code;
    c.scale = args.quantized.scales.type;
  }
  return c;
}

RmsNormConfig sample(DType x, DType weight, DType out, WeightForm form, int add, int access, int64_t hidden_size) {
  RmsNormConfig c{};
  c.x = x;
  c.weight = weight;
  c.out = out;
  c.form = form;
  c.add = add;
  c.access = access;
  plan_row(c, hidden_size);
  return c;
}

std::vector<RmsNormConfig> samples() {
  constexpr DType bf16 = DType::bf16, f16 = DType::f16, f32 = DType::f32;
  std::vector<RmsNormConfig> configs;
  for (int64_t hidden_size : {128, 576, 2048, 4096, 7168})
    for (int add : {0, 1}) {
      RmsNormConfig c = sample(bf16, bf16, bf16, WeightForm::cast_mul, add, 8, hidden_size);
      c.strided = hidden_size == 128;  // heads inside a wider row
      configs.push_back(c);
      c.scale = ScaleType::f32;
      plan_groups(c, 128, hidden_size);
      configs.push_back(c);
    }
  // The corners: a row too long for registers, a misaligned one, mixed types and the other forms.
  for (auto [x, weight, out, form, access, hidden_size] :
       {std::tuple{f32, f32, f32, WeightForm::mul_cast, 4, 100000},
        std::tuple{f16, f32, f32, WeightForm::cast_mul, 8, 4096},
        std::tuple{f16, bf16, f16, WeightForm::one_plus, 1, 1031},
        std::tuple{bf16, bf16, bf16, WeightForm::none, 2, 70}}) {
    RmsNormConfig c = sample(x, weight, out, form, 1, access, hidden_size);
    c.strided = 1;
    configs.push_back(c);
  }
  // And of what is quantised: each code and scale, a scale a row, groups of other sizes, mixed types.
  for (auto [x, weight, out, code, scale, group, hidden_size] :
       {std::tuple{bf16, bf16, bf16, Code::int8, ScaleType::f32, 7168, 7168},
        std::tuple{bf16, bf16, bf16, Code::e2m1, ScaleType::e8m0, 32, 4096},
        std::tuple{f32, f32, f32, Code::e4m3, ScaleType::packed, 128, 7168},
        std::tuple{f16, f32, f32, Code::e4m3, ScaleType::power, 64, 576}}) {
    RmsNormConfig c = sample(x, weight, out, WeightForm::cast_mul, 1, 16 / size_of(x), hidden_size);
    c.code = code;
    c.scale = scale;
    plan_groups(c, group, hidden_size);
    configs.push_back(c);
  }
  return configs;
}

jit::Kernels<RmsNormConfig> kernels(describe, samples);

}  // namespace

void rms_norm(const RmsNormArgs& args, int device) {
  const RmsNormConfig config = plan(args);
  kernels.launch(device, config, {unsigned(ceil_div(args.x_rows.count, config.rows))}, args);
}

bool quantizes_rows(const RmsNormArgs& args) {
  RmsNormConfig c{};
  c.x = args.dtype;
  plan_row(c, args.hidden_size);
  plan_groups(c, args.quantized.group, args.hidden_size);
  return c.group_lanes > 0;
}

}  // namespace deepinfer::cuda
