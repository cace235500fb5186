#include "quant.h"

#include "../jit/cuda_launch.h"
#include "launch.h"
#include "quant_config.h"
#include "quant_names.h"
#include "quant_plan.h"

namespace deepinfer::cuda {

namespace {

constexpr int kWarp = 32, kThreads = 256, kMostThreads = 512;

jit::KernelSource source_of(const char* name, const char* config, const char* args, int threads) {
  jit::KernelSource source;
  source.name = name;
  source.header = "cuda/quant.cuh";
  source.config = config;
  source.args = args;
  source.threads = threads;
  source.pdl = true;
  return source;
}

// ---- groups ----

jit::KernelSource describe_rows(const QuantizeRowsConfig& c) {
  jit::KernelSource source =
      source_of("quantize_rows", "QuantizeRowsConfig", "QuantizeArgs", whole_warps(c.lanes * c.groups * c.rows));
  source.facts = {{"x", c.x},           {"code", name_of(c.code)}, {"scale", name_of(c.scale)}, {"access", c.access},
                  {"lanes", c.lanes},   {"vectors", c.vectors},    {"groups", c.groups},        {"rows", c.rows},
                  {"longer", c.longer}, {"strided", c.strided}};
  return source;
}

// 16 elements a thread.
void plan_groups(QuantizeRowsConfig& c, int64_t group, int64_t across) {
  cuda::plan_groups(c, 16 / size_of(c.x), size_of(c.x), group, across);
}

QuantizeRowsConfig plan_rows(const QuantizeArgs& args) {
  const Blocks& b = args.blocks;
  QuantizeRowsConfig c{};
  c.x = args.dtype;
  c.code = args.code;
  c.scale = args.scales.type;
  c.strided = b.matrices.dims > 1;
  Access access(b.columns, 16 / size_of(c.x));
  access.limit(args.x, b.matrices, size_of(c.x));
  if (b.across > 1) access.divide(b.block_columns);
  c.access = access.elements();
  plan_groups(c, b.block_columns, b.across);
  return c;
}

std::vector<QuantizeRowsConfig> rows_samples() {
  std::vector<QuantizeRowsConfig> configs;
  auto add = [&](DType x, Code code, ScaleType scale, int64_t group, int64_t columns) -> QuantizeRowsConfig& {
    QuantizeRowsConfig c{x, code, scale, 16 / size_of(x), 0, 0, 0, 0, 0, 0};
    plan_groups(c, group, ceil_div(columns, group));
    return configs.emplace_back(c);
  };
  for (int64_t columns : {2048, 4096, 7168}) add(DType::bf16, Code::e4m3, ScaleType::f32, 128, columns);
  add(DType::bf16, Code::e4m3, ScaleType::packed, 128, 7168);
  add(DType::bf16, Code::e4m3, ScaleType::e8m0, 32, 7168);
  add(DType::bf16, Code::e2m1, ScaleType::e8m0, 32, 7168);
  add(DType::bf16, Code::e2m1, ScaleType::f32, 16, 2048);
  for (Code code : {Code::e4m3, Code::int8}) add(DType::bf16, code, ScaleType::f32, 7168, 7168);
  add(DType::f32, Code::e4m3, ScaleType::f32, 128, 7168);
  add(DType::f32, Code::int8, ScaleType::power, 100000, 100000);  // too long for registers
  QuantizeRowsConfig& misaligned = add(DType::f16, Code::e4m3, ScaleType::power, 7, 70);
  misaligned.access = misaligned.strided = 1;
  return configs;
}

// ---- blocks ----

jit::KernelSource describe_blocks(const QuantizeBlocksConfig& c) {
  jit::KernelSource source =
      source_of("quantize_blocks", "QuantizeBlocksConfig", "QuantizeArgs", c.threads * c.blocks);
  source.facts = {{"x", c.x},           {"code", name_of(c.code)}, {"scale", name_of(c.scale)}, {"access", c.access},
                  {"lanes", c.lanes},   {"threads", c.threads},    {"blocks", c.blocks},        {"vectors", c.vectors},
                  {"longer", c.longer}, {"columns", c.columns}};
  return source;
}

// A warp for small blocks, several of them together; else a CUDA block.
void plan_blocks(QuantizeBlocksConfig& c, int64_t block_rows, int64_t block_columns) {
  constexpr int kFewVectors = 4, kMostVectors = 8;
  const int n = 16 / size_of(c.x);
  c.columns = block_columns == 1;
  c.lanes = c.columns ? 64 / n : int(ceil_div(block_columns, n));
  const int64_t pieces = c.lanes * block_rows;
  c.blocks = 1;
  if (c.columns) {
    c.threads = kThreads;
  } else if (pieces <= kWarp * kFewVectors) {
    c.threads = kWarp;
    c.blocks = kThreads / kWarp;
  } else {
    c.threads = int(std::min<int64_t>(kMostThreads, whole_warps(ceil_div(pieces, kMostVectors))));
  }
  c.vectors = int(std::clamp<int64_t>(ceil_div(pieces, c.threads), 1, kMostVectors));
  c.longer = pieces > int64_t(c.threads) * c.vectors;
}

QuantizeBlocksConfig plan_blocks(const QuantizeArgs& args) {
  const Blocks& b = args.blocks;
  QuantizeBlocksConfig c{};
  c.x = args.dtype;
  c.code = args.code;
  c.scale = args.scales.type;
  Access access(b.columns, 16 / size_of(c.x));
  access.limit(args.x, b.matrices, size_of(c.x));
  if (b.rows > 1) access.limit(reinterpret_cast<const void*>(b.row_stride * size_of(c.x)), size_of(c.x));
  if (b.across > 1 && b.block_columns > 1) access.divide(b.block_columns);
  c.access = access.elements();
  plan_blocks(c, b.block_rows, b.block_columns);
  return c;
}

std::vector<QuantizeBlocksConfig> blocks_samples() {
  std::vector<QuantizeBlocksConfig> configs;
  auto add = [&](DType x, Code code, ScaleType scale, int64_t rows, int64_t columns) -> QuantizeBlocksConfig& {
    QuantizeBlocksConfig c{x, code, scale, 16 / size_of(x), 0, 0, 0, 0, 0, 0};
    plan_blocks(c, rows, columns);
    return configs.emplace_back(c);
  };
  add(DType::bf16, Code::e4m3, ScaleType::f32, 128, 128);
  add(DType::bf16, Code::e4m3, ScaleType::f32, 32, 32);
  add(DType::f32, Code::e4m3, ScaleType::packed, 128, 128);
  add(DType::bf16, Code::e2m1, ScaleType::e8m0, 32, 32);
  add(DType::bf16, Code::e4m3, ScaleType::f32, 128, 1);
  add(DType::f32, Code::int8, ScaleType::power, 1000, 1);
  add(DType::f16, Code::int8, ScaleType::f32, 7168, 7168);
  add(DType::f16, Code::e4m3, ScaleType::power, 3, 7).access = 1;
  return configs;
}

// ---- scales that are given ----

jit::KernelSource describe_scaling(const char* name, const char* args, const ScalingConfig& c) {
  jit::KernelSource source = source_of(name, "ScalingConfig", args, c.lanes * c.rows);
  source.facts = {{"dtype", c.dtype},
                  {"code", name_of(c.code)},
                  {"scale", name_of(c.scale)},
                  {"block_columns", c.block_columns},
                  {"access", c.access},
                  {"lanes", c.lanes},
                  {"rows", c.rows},
                  {"vectors", c.vectors}};
  return source;
}
jit::KernelSource describe_dequantize(const ScalingConfig& c) {
  return describe_scaling("dequantize", "DequantizeArgs", c);
}
jit::KernelSource describe_with_scales(const ScalingConfig& c) {
  return describe_scaling("quantize_with_scales", "QuantizeArgs", c);
}

ScalingConfig plan_scaling(DType dtype, Code code, ScaleType scale, int64_t block_columns, int64_t columns,
                           int access) {
  ScalingConfig c{dtype, code, scale, block_columns == columns ? 0 : int(block_columns), access, 0, 0, 4};
  const int64_t pieces = ceil_div(columns, 16 / size_of(dtype)), runs = ceil_div(pieces, kThreads * c.vectors);
  c.vectors = int(std::min<int64_t>(c.vectors, ceil_div(pieces, kWarp)));
  const int64_t lanes = ceil_div(pieces, runs * c.vectors);
  c.lanes = lanes > kWarp ? whole_warps(lanes) : int(std::bit_ceil(uint64_t(lanes)));
  c.rows = std::max(1, 128 / c.lanes);
  return c;
}

ScalingConfig plan_scaling(const Blocks& b, DType dtype, Code code, ScaleType scale, const void* strided,
                           int element_size) {
  Access access(b.columns, 16 / size_of(dtype));
  access.limit(strided, b.matrices, element_size);
  if (b.rows > 1) access.limit(reinterpret_cast<const void*>(b.row_stride * element_size), element_size);
  return plan_scaling(dtype, code, scale, b.block_columns, b.columns, access.elements());
}

jit::Grid grid_of(const ScalingConfig& c, const Blocks& b) {
  const int64_t run = int64_t(c.lanes) * c.vectors * (16 / size_of(c.dtype));
  return {unsigned(ceil_div(b.columns, run) * ceil_div(b.matrices.count * b.rows, c.rows))};
}

std::vector<ScalingConfig> scaling_samples() {
  return {plan_scaling(DType::bf16, Code::e4m3, ScaleType::f32, 128, 7168, 8),
          plan_scaling(DType::bf16, Code::e4m3, ScaleType::packed, 128, 7168, 8),
          plan_scaling(DType::bf16, Code::e2m1, ScaleType::e8m0, 32, 7168, 8),
          plan_scaling(DType::f32, Code::int8, ScaleType::f32, 7168, 7168, 4),
          plan_scaling(DType::bf16, Code::e4m3, ScaleType::f32, 1, 7168, 8),
          plan_scaling(DType::f16, Code::e4m3, ScaleType::power, 7, 70, 1)};
}

jit::Kernels<QuantizeRowsConfig> rows_kernels(describe_rows, rows_samples);
jit::Kernels<QuantizeBlocksConfig> blocks_kernels(describe_blocks, blocks_samples);
jit::Kernels<ScalingConfig> with_scales_kernels(describe_with_scales, scaling_samples);
jit::Kernels<ScalingConfig> dequantize_kernels(describe_dequantize, scaling_samples);

}  // namespace

void quantize(const QuantizeArgs& args, int device) {
  const Blocks& b = args.blocks;
  if (b.matrices.count * b.down * b.across == 0) return;
  if (args.given) {
    const ScalingConfig c =
        plan_scaling(b, args.dtype, args.code, args.scales.type, args.x, size_of(args.dtype));
    return with_scales_kernels.launch(device, c, grid_of(c, b), args);
  }
  if (b.block_rows == 1 && b.block_columns > 1) {
    const QuantizeRowsConfig c = plan_rows(args);
    const int64_t blocks = ceil_div(b.across, c.groups) * ceil_div(b.matrices.count, c.rows);
    return rows_kernels.launch(device, c, {unsigned(blocks)}, args);
  }
  const QuantizeBlocksConfig c = plan_blocks(args);
  const int64_t strips = c.columns ? ceil_div(b.columns, c.lanes * (16 / size_of(c.x))) : b.across;
  blocks_kernels.launch(device, c, {unsigned(ceil_div(b.matrices.count * b.down * strips, c.blocks))}, args);
}

void dequantize(const DequantizeArgs& args, int device) {
  const Blocks& b = args.blocks;
  if (b.matrices.count * b.down * b.across == 0) return;
  const ScalingConfig c = plan_scaling(b, args.dtype, args.code, args.scales.type, args.codes, 1);
  dequantize_kernels.launch(device, c, grid_of(c, b), args);
}

}  // namespace deepinfer::cuda
