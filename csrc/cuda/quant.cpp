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
                  {"lanes", c.lanes},   {"vectors", c.vectors},    {"items", c.items},          {"groups", c.groups},
                  {"rows", c.rows},     {"longer", c.longer},      {"strided", c.strided}};
  return source;
}

// A thread has 16 elements of a group; of a short one 8, of several groups. Codes of four bits take more registers:
// they stay with one group.
void plan_groups(QuantizeRowsConfig& c, int64_t group, int64_t across) {
  const int n = 16 / size_of(c.x);
  const bool four_bits = c.code == Code::e2m1;
  const int wanted = group < (four_bits ? 32 : 128) ? 8 : 16;
  c.items = wanted == 8 && !four_bits ? int(std::clamp<int64_t>(across, 1, 4)) : 1;
  cuda::plan_groups(c, n, wanted / n, group, across, c.items);
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
    QuantizeRowsConfig c{x, code, scale, 16 / size_of(x), 0, 0, 0, 0, 0, 0, 0};
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
      source_of("quantize_blocks", "QuantizeBlocksConfig", "QuantizeArgs", c.threads * c.tiles);
  source.facts = {{"x", c.x},             {"code", name_of(c.code)}, {"scale", name_of(c.scale)}, {"access", c.access},
                  {"lanes", c.lanes},     {"beside", c.beside},      {"threads", c.threads},      {"tiles", c.tiles},
                  {"vectors", c.vectors}, {"longer", c.longer}};
  return source;
}

// Narrow blocks and single columns share tiles of 128 columns, so that runs of memory stay long.
void plan_blocks(QuantizeBlocksConfig& c, int64_t block_rows, int64_t block_columns, int64_t across) {
  constexpr int kFewVectors = 4, kMostVectors = 8, kColumns = 128;
  const int n = 16 / size_of(c.x);
  const bool narrow = block_columns < kColumns && block_columns % n == 0 && kColumns % block_columns == 0 && across > 1;
  c.beside = block_columns == 1 ? 0 : narrow ? int(kColumns / block_columns) : 1;
  c.lanes = int(ceil_div(c.beside == 1 ? block_columns : kColumns, n));
  const int64_t pieces = c.lanes * block_rows;
  const bool small = c.beside == 1 && pieces <= kWarp * kFewVectors;
  c.tiles = small ? kThreads / kWarp : 1;
  c.threads = small ? kWarp : int(std::min<int64_t>(kMostThreads, whole_warps(ceil_div(pieces, kMostVectors))));
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
  if (b.rows > 1) access.limit_stride(b.row_stride, size_of(c.x));
  if (b.across > 1 && b.block_columns > 1) access.divide(b.block_columns);  // a column's neighbours are beside it
  c.access = access.elements();
  plan_blocks(c, b.block_rows, b.block_columns, b.across);
  return c;
}

std::vector<QuantizeBlocksConfig> blocks_samples() {
  std::vector<QuantizeBlocksConfig> configs;
  auto add = [&](DType x, Code code, ScaleType scale, int64_t rows, int64_t columns) -> QuantizeBlocksConfig& {
    QuantizeBlocksConfig c{x, code, scale, 16 / size_of(x), 0, 0, 0, 0, 0, 0};
    plan_blocks(c, rows, columns, 2);
    return configs.emplace_back(c);
  };
  add(DType::bf16, Code::e4m3, ScaleType::f32, 128, 128);
  add(DType::bf16, Code::e4m3, ScaleType::f32, 32, 32);
  add(DType::bf16, Code::e4m3, ScaleType::f32, 128, 32);
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
                  {"vectors", c.vectors},
                  {"down", c.down}};
  return source;
}
jit::KernelSource describe_dequantize(const ScalingConfig& c) {
  return describe_scaling("dequantize", "DequantizeArgs", c);
}
jit::KernelSource describe_with_scales(const ScalingConfig& c) {
  return describe_scaling("quantize_with_scales", "QuantizeArgs", c);
}

ScalingConfig plan_scaling(DType dtype, Code code, ScaleType scale, int64_t block_rows, int64_t block_columns,
                           int64_t columns, int access) {
  constexpr int kVectors = 4;
  ScalingConfig c{dtype, code, scale, block_columns == columns ? 0 : int(block_columns), access, 0, 0, kVectors, 0};
  const int64_t pieces = ceil_div(columns, 16 / size_of(dtype));
  c.down = c.block_columns == 1 && block_rows % kVectors == 0;
  if (!c.down) c.vectors = int(std::min<int64_t>(kVectors, ceil_div(pieces, kWarp)));
  const int across = c.down ? 1 : c.vectors;
  const int64_t runs = ceil_div(pieces, kThreads * across), lanes = ceil_div(pieces, runs * across);
  c.lanes = lanes > kWarp ? whole_warps(lanes) : int(std::bit_ceil(uint64_t(lanes)));
  c.rows = std::max(1, 128 / c.lanes);
  return c;
}

ScalingConfig plan_scaling(const Blocks& b, DType dtype, Code code, ScaleType scale, const void* strided,
                           int element_size) {
  Access access(b.columns, 16 / size_of(dtype));
  access.limit(strided, b.matrices, element_size);
  if (b.rows > 1) access.limit_stride(b.row_stride, element_size);
  return plan_scaling(dtype, code, scale, b.block_rows, b.block_columns, b.columns, access.elements());
}

jit::Grid grid_of(const ScalingConfig& c, const Blocks& b) {
  const int64_t run = int64_t(c.lanes) * (c.down ? 1 : c.vectors) * (16 / size_of(c.dtype));
  const int64_t pieces = b.matrices.count * ceil_div(b.rows, c.down ? c.vectors : 1);
  return {unsigned(ceil_div(b.columns, run) * ceil_div(pieces, c.rows))};
}

std::vector<ScalingConfig> scaling_samples() {
  return {plan_scaling(DType::bf16, Code::e4m3, ScaleType::f32, 1, 128, 7168, 8),
          plan_scaling(DType::bf16, Code::e4m3, ScaleType::packed, 128, 128, 7168, 8),
          plan_scaling(DType::bf16, Code::e2m1, ScaleType::e8m0, 1, 32, 7168, 8),
          plan_scaling(DType::f32, Code::int8, ScaleType::f32, 1, 7168, 7168, 4),
          plan_scaling(DType::bf16, Code::e4m3, ScaleType::f32, 128, 1, 7168, 8),
          plan_scaling(DType::f16, Code::e4m3, ScaleType::power, 1, 7, 70, 1)};
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
    return rows_kernels.launch(device, c, group_grid(c, b.matrices.count, b.across, c.items), args);
  }
  const QuantizeBlocksConfig c = plan_blocks(args);
  const int64_t strips = c.beside == 1 ? b.across : ceil_div(b.columns, c.lanes * (16 / size_of(c.x)));
  blocks_kernels.launch(device, c, {unsigned(ceil_div(b.matrices.count * b.down * strips, c.tiles))}, args);
}

void dequantize(const DequantizeArgs& args, int device) {
  const Blocks& b = args.blocks;
  if (b.matrices.count * b.down * b.across == 0) return;
  const ScalingConfig c = plan_scaling(b, args.dtype, args.code, args.scales.type, args.codes, 1);
  dequantize_kernels.launch(device, c, grid_of(c, b), args);
}

}  // namespace deepinfer::cuda
