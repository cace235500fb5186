#include "norm.h"

#include <algorithm>
#include <bit>

#include "../jit/cuda_launch.h"
#include "launch.h"
#include "norm_config.h"

namespace deepinfer::cuda {

namespace {

const char* name_of(WeightForm form) {
  switch (form) {
    case WeightForm::cast_mul: return "WeightForm::cast_mul";
    case WeightForm::mul_cast: return "WeightForm::mul_cast";
    case WeightForm::one_plus: return "WeightForm::one_plus";
    case WeightForm::none: return "WeightForm::none";
  }
  return "";
}

jit::KernelSource describe(const RmsNormConfig& c) {
  jit::KernelSource source;
  source.name = "rms_norm";
  source.header = "cuda/norm.cuh";
  source.config = "RmsNormConfig";
  source.args = "RmsNormArgs";
  source.facts = {{"x", c.x},         {"weight", c.weight}, {"out", c.out},         {"form", name_of(c.form)},
                  {"add", c.add},     {"access", c.access}, {"lanes", c.lanes},     {"rows", c.rows},
                  {"vectors", c.vectors}, {"longer", c.longer}, {"strided", c.strided}};
  source.threads = c.lanes * c.rows;
  source.pdl = true;
  return source;
}

// How a row is laid out over threads. Short rows share a block, and below 32 pieces a warp; long ones have a block
// each.
void plan_row(RmsNormConfig& c, int64_t hidden_size) {
  constexpr int kBlock = 128, kWarp = 32, kMostThreads = 512, kMostVectors = 4;  // as registers allow
  const int64_t pieces = ceil_div(hidden_size, 16 / size_of(c.x));
  if (pieces <= 4 * kWarp) {
    c.lanes = std::min<int>(kWarp, int(std::bit_ceil(uint64_t(pieces))));
    c.vectors = int(ceil_div(pieces, c.lanes));
    c.rows = kBlock / c.lanes;
  } else {
    c.vectors = int(std::clamp<int64_t>(ceil_div(pieces, kMostThreads), 2, kMostVectors));
    c.lanes = int(std::min<int64_t>(kMostThreads, ceil_div(ceil_div(pieces, c.vectors), kWarp) * kWarp));
    c.rows = 1;
  }
  c.longer = pieces > int64_t(c.lanes) * c.vectors;
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
  return c;
}

std::vector<RmsNormConfig> samples() {
  std::vector<RmsNormConfig> configs;
  for (int64_t hidden_size : {128, 576, 2048, 4096, 7168})
    for (int add : {0, 1}) {
      constexpr DType type = DType::bf16;
      const int strided = hidden_size == 128;  // heads inside a wider row
      RmsNormConfig c{type, type, type, WeightForm::cast_mul, add, 8, 0, 0, 0, 0, strided};
      plan_row(c, hidden_size);
      configs.push_back(c);
    }
  // The corners: a row too long for registers, a misaligned one, mixed types and the other forms.
  for (auto [x, weight, out, form, access, hidden_size] :
       {std::tuple{DType::f32, DType::f32, DType::f32, WeightForm::mul_cast, 4, 100000},
        std::tuple{DType::f16, DType::f32, DType::f32, WeightForm::cast_mul, 8, 4096},
        std::tuple{DType::f16, DType::bf16, DType::f16, WeightForm::one_plus, 1, 1031},
        std::tuple{DType::bf16, DType::bf16, DType::bf16, WeightForm::none, 2, 70}}) {
    RmsNormConfig c{x, weight, out, form, 1, access, 0, 0, 0, 0, 1};
    plan_row(c, hidden_size);
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

}  // namespace deepinfer::cuda
