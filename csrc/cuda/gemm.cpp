#include "gemm.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "../jit/cuda_launch.h"
#include "../jit/tensor_map.h"
#include "gemm_config.h"
#include "gemm_plan.h"
#include "launch.h"

namespace deepinfer::cuda {

namespace {

constexpr int kPortableThreads = 256, kPortableTile = 64, kPortableBlocks = 4;  // of a processor
constexpr int kBoxBytes = 128;                                                  // of a stage, along k

thread_local GemmTiling forced{};

const char* name_of(Operand type) {
  switch (type) {
    case Operand::bf16: return "Operand::bf16";
    case Operand::f16: return "Operand::f16";
    case Operand::e4m3: return "Operand::e4m3";
    case Operand::f32: return "Operand::f32";
  }
  return "";
}

const char* name_of(RowGroups groups) {
  switch (groups) {
    case RowGroups::none: return "RowGroups::none";
    case RowGroups::ends: return "RowGroups::ends";
    case RowGroups::counts: return "RowGroups::counts";
    case RowGroups::batch: return "RowGroups::batch";
    case RowGroups::depth: return "RowGroups::depth";
  }
  return "";
}

const char* name_of(BiasStep bias) {
  switch (bias) {
    case BiasStep::none: return "BiasStep::none";
    case BiasStep::once: return "BiasStep::once";
    case BiasStep::rounded: return "BiasStep::rounded";
  }
  return "";
}

const char* name_of(GatePairs gates) {
  switch (gates) {
    case GatePairs::none: return "GatePairs::none";
    case GatePairs::eight_apart: return "GatePairs::eight_apart";
    case GatePairs::neighbours: return "GatePairs::neighbours";
  }
  return "";
}

const char* name_of(Gated form) {
  switch (form) {
    case Gated::silu: return "Gated::silu";
    case Gated::swish: return "Gated::swish";
    case Gated::gelu: return "Gated::gelu";
    case Gated::gelu_tanh: return "Gated::gelu_tanh";
  }
  return "";
}

jit::KernelSource source_of(const char* name, const char* header, const GemmConfig& c) {
  jit::KernelSource source;
  source.name = name;
  source.header = header;
  source.config = "GemmConfig";
  source.facts = {{"type", name_of(c.type)},
                  {"out", c.out},
                  {"weight_dense_k", c.weight_dense_k},
                  {"x_dense_k", c.x_dense_k},
                  {"tile_n", c.tile_n},
                  {"tile_m", c.tile_m},
                  {"tokens_as_rows", c.tokens_as_rows},
                  {"warpgroups", c.warpgroups},
                  {"in_turn", c.in_turn},
                  {"stages", c.stages},
                  {"cluster", c.cluster},
                  {"split", c.split},
                  {"streamed", c.streamed},
                  {"column_scales", c.column_scales},
                  {"groups", name_of(c.groups)},
                  {"bias", name_of(c.bias)},
                  {"addend", c.addend},
                  {"gates", name_of(c.gates)},
                  {"form", name_of(c.form)},
                  {"limited", c.limited},
                  {"shared", c.shared},
                  {"handed_out", c.handed_out},
                  {"bulk", c.bulk},
                  {"access", c.access},
                  {"blocks", c.blocks}};
  source.pdl = true;
  return source;
}

int64_t out_columns(const MatmulArgs& args) {
  return args.gate_up == GateUp::none ? args.columns : args.columns / 2;
}

// By numbers that are on the device.
bool is_counted(RowGroups groups) { return groups == RowGroups::ends || groups == RowGroups::counts; }

GemmTiling tiling_of(const GemmConfig& c) {
  return {c.tile_n, c.tile_m, c.warpgroups, c.stages, c.cluster, c.split, c.streamed, c.blocks,
          c.tokens_as_rows, c.in_turn};
}

GemmResult result_of(const GemmConfig& c) {
  const int out_bytes = size_of(c.out);
  return {c.addend ? 4 : out_bytes, out_bytes == 2 && !c.addend && c.access == 8, c.type == Operand::e4m3,
          c.column_scales != 0};
}

jit::KernelSource describe(const GemmConfig& c) {
  jit::KernelSource source = source_of("gemm", "cuda/gemm.cuh", c);
  source.args = "GemmKernelArgs";
  source.threads = (c.warpgroups + 1) * 128;
  source.blocks_per_sm = c.blocks;
  source.cluster = c.cluster;
  source.shared_bytes = gemm_shared_bytes(tiling_of(c), result_of(c), is_counted(c.groups));
  return source;
}

jit::KernelSource describe_sum(const GemmConfig& c) {
  jit::KernelSource source = source_of("gemm_sum", "cuda/gemm.cuh", c);
  source.args = "GemmKernelArgs";
  source.threads = c.warpgroups * 128;
  return source;
}

jit::KernelSource describe_portable(const GemmConfig& c) {
  jit::KernelSource source = source_of("gemm_portable", "cuda/gemm_portable.cuh", c);
  source.args = "MatmulArgs";
  source.threads = kPortableThreads;
  return source;
}

void set_tiling(GemmConfig& c, const GemmTiling& t) {
  c.tile_n = t.tile_n;
  c.tile_m = t.tile_m;
  c.warpgroups = t.warpgroups;
  c.stages = t.stages;
  c.cluster = t.cluster;
  c.split = t.split;
  c.streamed = t.streamed;
  c.blocks = t.blocks;
  c.tokens_as_rows = t.tokens_as_rows;
  c.in_turn = t.in_turn;
  c.bulk = !t.split && result_of(c).bulk;
}

std::vector<GemmConfig> samples() {
  std::vector<GemmConfig> configs;
  constexpr int kProcessors = 132;
  auto add = [&](int64_t rows, int64_t columns, int64_t depth, int64_t experts, const GemmConfig& like) {
    GemmConfig c = like;
    set_tiling(c, choose_tiling({rows, columns, depth, experts, c.weight_dense_k != 0, c.x_dense_k != 0, c.groups,
                                 result_of(c)},
                                kProcessors));
    for (const GemmConfig& other : configs)
      if (std::memcmp(&other, &c, sizeof(c)) == 0) return;
    configs.push_back(c);
  };
  GemmConfig plain{};
  plain.type = Operand::bf16;
  plain.out = DType::bf16;
  plain.weight_dense_k = plain.x_dense_k = 1;
  plain.access = 8;
  for (int64_t rows : {1, 32, 64, 128, 512, 4096}) add(rows, 4096, 7168, 0, plain);
  add(1, 576, 7168, 0, plain);
  add(4096, 2112, 7168, 0, plain);
  GemmConfig gradient = plain;  // float32, added to
  gradient.out = DType::f32;
  gradient.weight_dense_k = gradient.x_dense_k = 0;
  gradient.access = 4;
  gradient.addend = 1;
  add(4096, 7168, 4096, 0, gradient);
  GemmConfig grouped = plain;
  grouped.groups = RowGroups::ends;
  for (int64_t rows : {8, 2048, 4096, 16384, 65536}) add(rows, 1536, 2048, 128, grouped);
  grouped.weight_dense_k = 0;  // gpt-oss
  grouped.bias = BiasStep::rounded;
  add(2048, 5760, 2880, 32, grouped);
  grouped.gates = GatePairs::neighbours;
  grouped.form = Gated::swish;
  grouped.limited = grouped.handed_out = 1;
  add(8192, 5760, 2880, 32, grouped);
  grouped.weight_dense_k = 1;
  grouped.gates = GatePairs::eight_apart;
  grouped.form = Gated::silu;
  grouped.bias = BiasStep::none;
  grouped.limited = 0;
  add(16384, 1536, 2048, 128, grouped);
  GemmConfig shared = grouped;
  shared.shared = 1;
  add(16384, 1536, 2048, 128, shared);
  grouped.handed_out = shared.handed_out = 0;
  for (int64_t rows : {8, 2048, 4096}) add(rows, 1536, 2048, 128, grouped);
  for (int64_t rows : {8, 2048}) add(rows, 1536, 2048, 128, shared);
  shared.gates = GatePairs::none;
  add(16384, 2048, 768, 128, shared);
  GemmConfig masked = plain;
  masked.type = Operand::f16;
  masked.out = DType::f16;
  masked.groups = RowGroups::counts;
  masked.bias = BiasStep::once;
  masked.access = 1;
  GemmConfig batch = plain;
  batch.groups = RowGroups::batch;
  add(32 * 128, 128, 512, 128, batch);
  gradient.groups = RowGroups::depth;
  add(4096, 7168, 8192, 4, gradient);
  add(4096 * 32, 4096, 7168, 32, masked);
  GemmConfig fp8 = plain;
  fp8.type = Operand::e4m3;
  for (int64_t rows : {1, 64, 128, 4096}) add(rows, 4096, 7168, 0, fp8);
  fp8.groups = RowGroups::ends;
  add(4096, 4096, 7168, 8, fp8);
  fp8.column_scales = 1;
  add(4096, 4096, 7168, 8, fp8);
  return configs;
}

std::vector<GemmConfig> sum_samples() {
  std::vector<GemmConfig> configs;
  for (const GemmConfig& c : samples())
    if (c.streamed) configs.push_back(c);
  return configs;
}

GemmConfig portable(GemmConfig c) {
  set_tiling(c, {kPortableTile, kPortableTile, 0, 0, 1, 0, 0, 0});
  c.access = 1;
  c.weight_dense_k = c.x_dense_k = 1;  // strides are arguments
  return c;
}

std::vector<GemmConfig> portable_samples() {
  GemmConfig dense{}, grouped{};
  dense.type = Operand::f32;
  dense.out = DType::f32;
  dense.bias = BiasStep::once;
  dense.addend = 1;
  grouped.type = Operand::bf16;
  grouped.out = DType::bf16;
  grouped.groups = RowGroups::ends;
  grouped.bias = BiasStep::rounded;
  GemmConfig fp8 = dense;
  fp8.type = Operand::e4m3;
  return {portable(dense), portable(grouped), portable(fp8)};
}

jit::Kernels<GemmConfig> kernels(describe, samples);
jit::Kernels<GemmConfig> sum_kernels(describe_sum, sum_samples);
jit::Kernels<GemmConfig> portable_kernels(describe_portable, portable_samples);

Operand operand(DType dtype) {
  switch (dtype) {
    case DType::f32: return Operand::f32;
    case DType::bf16: return Operand::bf16;
    case DType::f16: return Operand::f16;
  }
  throw std::logic_error("no such operand");
}

jit::TensorMapType map_type(Operand type) {
  switch (type) {
    case Operand::bf16: return jit::TensorMapType::bf16;
    case Operand::f16: return jit::TensorMapType::f16;
    case Operand::e4m3: return jit::TensorMapType::u8;
    case Operand::f32: return jit::TensorMapType::f32;
  }
  throw std::logic_error("no such operand");
}

// Rows of k, as the copy engine is to see them.
struct OperandShape {
  const void* data;
  bool dense_k;
  int64_t rows, stride, depth_stride;
  int64_t experts, expert_stride;
};

// A box is 128 bytes of the dense dimension.
TensorMap map_of(Operand type, const OperandShape& o, int64_t depth, int box_rows, int rank, const char* what) {
  const int size = type == Operand::e4m3 ? 1 : 2, box = kBoxBytes / size;
  // The stride of a dimension of size 1 is anything, but not for the driver.
  auto bytes = [&](int64_t count, int64_t elements) { return uint64_t(count > 1 ? elements * size : kBoxBytes); };
  jit::TensorMapSpec spec{};
  spec.type = map_type(type);
  spec.rank = rank;
  spec.address = const_cast<void*>(o.data);
  spec.sizes[o.dense_k ? 0 : 1] = uint64_t(depth);
  spec.sizes[o.dense_k ? 1 : 0] = uint64_t(o.rows);
  spec.sizes[2] = uint64_t(o.experts);
  spec.strides[0] = o.dense_k ? bytes(o.rows, o.stride) : bytes(depth, o.depth_stride);
  spec.strides[1] = bytes(o.experts, o.expert_stride);
  spec.box[0] = uint32_t(box);
  spec.box[1] = uint32_t(o.dense_k ? box_rows : box);
  spec.box[2] = 1;
  spec.swizzle = jit::Swizzle::bytes128;
  return jit::encode_tensor_map(spec, what);
}

// Rows of gates, and where the ups lie.
struct GateUpShape {
  const void* gates;
  uint64_t row_bytes, to_ups;  // from a row to the next, from a gate to its up
  int64_t experts, expert_stride;
};

// Gates and ups of 8 columns by turns, for GatePairs::eight_apart.
TensorMap map_of_gate_up(const MatmulArgs& args, const GateUpShape& o, int tile_n) {
  jit::TensorMapSpec spec{};
  spec.type = args.dtype == DType::bf16 ? jit::TensorMapType::bf16 : jit::TensorMapType::f16;
  spec.rank = 5;
  spec.address = const_cast<void*>(o.gates);
  const uint64_t sizes[] = {uint64_t(args.depth), 8, 2, uint64_t(args.columns / 16), uint64_t(o.experts)};
  const uint64_t strides[] = {o.row_bytes, o.to_ups, 8 * o.row_bytes,
                              o.experts > 1 ? uint64_t(o.expert_stride * 2) : uint64_t(kBoxBytes)};
  const uint32_t box[] = {uint32_t(kBoxBytes / 2), 8, 2, uint32_t(tile_n / 16), 1};
  std::copy(std::begin(sizes), std::end(sizes), spec.sizes);
  std::copy(std::begin(strides), std::end(strides), spec.strides);
  std::copy(std::begin(box), std::end(box), spec.box);
  spec.swizzle = jit::Swizzle::bytes128;
  return jit::encode_tensor_map(spec, "the gates and ups of a matrix product");
}

TensorMap map_of_experts_gate_up(const MatmulArgs& args, int tile_n) {
  const uint64_t row = uint64_t(args.column_stride * 2);
  GateUpShape shape{args.weight, row, row * uint64_t(args.columns / 2), args.experts, args.expert_stride};
  if (args.gate_up == GateUp::alternating) shape = {args.weight, 2 * row, row, args.experts, args.expert_stride};
  return map_of_gate_up(args, shape, tile_n);
}

// The shared expert: two weights, as if they were one, whichever comes first.
void set_shared_weight(GemmKernelArgs& to, const MatmulArgs& args, const GemmConfig& c) {
  if (c.gates == GatePairs::none) {
    const OperandShape weight{args.shared_weight, true, args.columns, args.shared_column_stride, 1, 1, 0};
    to.shared_weight = map_of(c.type, weight, args.depth, c.tile_n, 3, "the shared weight of a matrix product");
    return;
  }
  const auto gates = reinterpret_cast<uintptr_t>(args.shared_weight), ups = reinterpret_cast<uintptr_t>(args.shared_up);
  to.ups_first = ups < gates;
  const GateUpShape shape{to.ups_first ? args.shared_up : args.shared_weight, uint64_t(args.shared_column_stride * 2),
                          to.ups_first ? gates - ups : ups - gates, 1, 0};
  to.shared_weight = map_of_gate_up(args, shape, c.tile_n);
}

TensorMap map_of_scales(const MatmulArgs& args, int tile_m) {
  const int64_t blocks = args.x_scale_depth_stride != 0 ? ceil_div(args.depth, 128) : 1;
  jit::TensorMapSpec spec{};
  spec.type = jit::TensorMapType::f32;
  spec.rank = 2;
  spec.address = const_cast<float*>(args.x_scale);
  spec.sizes[0] = uint64_t(args.rows);
  spec.sizes[1] = uint64_t(blocks);
  spec.strides[0] = blocks > 1 ? uint64_t(args.x_scale_depth_stride * 4) : uint64_t(kBoxBytes);
  spec.box[0] = uint32_t(tile_m);
  spec.box[1] = 1;
  spec.swizzle = jit::Swizzle::none;
  return jit::encode_tensor_map(spec, "the scales of a matrix product");
}

TensorMap map_of_result(const MatmulArgs& args, int chunk) {
  jit::TensorMapSpec spec{};
  spec.type = args.out_dtype == DType::bf16 ? jit::TensorMapType::bf16 : jit::TensorMapType::f16;
  spec.rank = args.row_groups == RowGroups::batch || args.row_groups == RowGroups::depth ? 3 : 2;
  spec.address = args.out;
  spec.sizes[0] = uint64_t(out_columns(args));
  spec.sizes[1] = uint64_t(args.rows + args.shared_rows);
  spec.strides[0] = args.rows + args.shared_rows > 1 ? uint64_t(args.out_stride * 2) : uint64_t(kBoxBytes);
  spec.sizes[2] = uint64_t(args.experts);
  spec.strides[1] = args.experts > 1 ? uint64_t(args.out_batch_stride * 2) : uint64_t(kBoxBytes);
  spec.box[2] = 1;
  spec.box[0] = kBoxBytes / 2;
  spec.box[1] = uint32_t(chunk);
  spec.swizzle = jit::Swizzle::bytes128;
  return jit::encode_tensor_map(spec, "the result of a matrix product");
}

bool is_dense(int64_t depth, int64_t depth_stride) { return depth == 1 || depth_stride == 1; }

// The most tiles there can be: every expert may leave one unfinished.
int64_t most_tiles(const MatmulArgs& args, const GemmConfig& c) {
  int64_t m_tiles = ceil_div(args.rows, c.tile_m);
  if (c.groups == RowGroups::ends) m_tiles += std::min(args.experts, args.rows);
  if (c.groups == RowGroups::batch || c.groups == RowGroups::depth) m_tiles *= args.experts;
  if (c.groups == RowGroups::counts) m_tiles = args.experts * ceil_div(args.group_rows, c.tile_m);
  m_tiles += ceil_div(args.shared_rows, c.tile_m);
  return m_tiles * ceil_div(args.columns, int64_t(c.tile_n) * (c.split ? 1 : c.cluster));
}

GemmConfig plan(const MatmulArgs& args, int device) {
  GemmConfig c{};
  c.type = args.e4m3 ? Operand::e4m3 : operand(args.dtype);
  c.column_scales = args.e4m3 && args.column_scales;
  c.out = args.out_dtype;
  c.groups = args.row_groups;
  c.bias = args.bias ? args.bias_step : BiasStep::none;
  c.addend = args.addend != nullptr;
  const bool empty = args.depth == 0 || args.experts == 0;  // of which the copy engine takes no description
  if (c.type == Operand::f32 || empty || jit::device_facts(device).capability != 90) return portable(c);
  c.weight_dense_k = is_dense(args.depth, args.depth_stride);
  c.x_dense_k = is_dense(args.depth, args.x_depth_stride);
  if (c.groups == RowGroups::depth && (c.weight_dense_k || c.x_dense_k)) return portable(c);
  const int out_bytes = size_of(c.out);
  if (args.gate_up != GateUp::none) {
    c.gates = c.weight_dense_k ? GatePairs::eight_apart : GatePairs::neighbours;
    c.form = args.form;
    c.limited = std::isfinite(args.limit);
  }
  Access access(out_columns(args), 16 / out_bytes);
  access.limit(args.out, out_bytes);
  access.limit(args.addend, out_bytes);
  access.limit_stride(args.out_stride | args.addend_stride | args.out_batch_stride, out_bytes);
  c.access = access.elements() * out_bytes == 16 ? access.elements() : 1;
  GemmTiling tiling = forced;
  if (tiling.tile_n) {
    tiling.stages = gemm_stages(tiling, result_of(c), is_counted(c.groups));
  } else {
    const int64_t rows = args.rows * (c.groups == RowGroups::batch ? args.experts : 1);
    tiling = choose_tiling({rows, args.columns, args.depth, args.experts, c.weight_dense_k != 0, c.x_dense_k != 0,
                            c.groups, result_of(c)},
                           jit::device_facts(device).multiprocessors);
  }
  set_tiling(c, tiling);
  c.shared = args.shared_rows > 0;
  c.handed_out = args.handed_out && c.cluster > 1;  // few rows have small tiles, all alike
  return c;
}

GemmShares shares_of(const MatmulArgs& args, const GemmConfig& c, int device) {
  const int64_t stages = ceil_div(args.depth, c.type == Operand::e4m3 ? 128 : 64);
  return share_out(tiling_of(c), args.rows, args.columns, stages, jit::device_facts(device).multiprocessors);
}

}  // namespace

bool uses_copy_engine(int device) { return jit::device_facts(device).capability == 90; }

void force_tiling(const int (&f)[9]) {
  forced = {f[0], f[1], f[2], 0, f[3], f[4], f[5], f[6], f[7], f[8]};
}

int64_t matmul_scratch_bytes(const MatmulArgs& args, int device) {
  if (args.row_groups != RowGroups::none || args.rows == 0 || args.columns == 0) return 0;
  const GemmConfig c = plan(args, device);
  return c.streamed ? shares_of(args, c, device).partial_bytes : 0;
}

void matmul(const MatmulArgs& args, void* scratch, int device) {
  if (args.rows == 0 || args.columns == 0) return;
  const int multiprocessors = jit::device_facts(device).multiprocessors;
  const GemmConfig c = plan(args, device);
  if (c.stages == 0) {
    const int64_t tiles = std::max<int64_t>(1, most_tiles(args, c));
    const int64_t blocks = std::min<int64_t>(tiles, int64_t(multiprocessors) * kPortableBlocks);
    return portable_kernels.launch(device, c, {unsigned(blocks)}, args);
  }
  // As in gemm.cuh.
  const bool ragged = is_counted(c.groups) && c.tile_m > 32, batch = c.groups == RowGroups::batch;
  const int box_rows = ragged ? (c.x_dense_k ? 32 : 64) : c.tile_m / (c.split ? 1 : c.cluster);
  const OperandShape weight{args.weight, c.weight_dense_k != 0, args.columns, args.column_stride,
                            args.depth_stride, c.groups == RowGroups::depth ? 1 : args.experts, args.expert_stride};
  const int64_t x_rows = args.rows + (args.shared_x ? 0 : args.shared_rows);
  const OperandShape x{args.x, c.x_dense_k != 0, x_rows, args.x_stride, args.x_depth_stride, batch ? args.experts : 1,
                       args.x_batch_stride};
  GemmKernelArgs kernel_args{};
  kernel_args.weight = c.gates == GatePairs::eight_apart ? map_of_experts_gate_up(args, c.tile_n) :
                       map_of(c.type, weight, args.depth, c.tile_n, 3, "the weight of a matrix product");
  kernel_args.x = map_of(c.type, x, args.depth, box_rows, batch ? 3 : 2, "the first operand of a matrix product");
  if (c.shared) set_shared_weight(kernel_args, args, c);
  if (args.shared_x) {
    const OperandShape shared{args.shared_x, true, args.shared_rows, args.shared_x_stride, 1, 1, 0};
    kernel_args.shared_x = map_of(c.type, shared, args.depth, box_rows, 2, "the tokens of a matrix product");
  }
  if (args.e4m3) kernel_args.x_scale = map_of_scales(args, c.groups == RowGroups::none ? c.tile_m : c.tile_m + 4);
  if (c.bulk) kernel_args.out = map_of_result(args, gemm_chunk(tiling_of(c)));
  kernel_args.problem = args;
  kernel_args.weight_read_once = args.rows <= c.tile_m * std::max<int64_t>(1, args.groups ? args.experts : 0);
  if (c.streamed) {
    const GemmShares shares = shares_of(args, c, device);
    kernel_args.partial = static_cast<float*>(scratch);
    kernel_args.whole = shares.whole;
    kernel_args.share = shares.share;
    kernel_args.longer = shares.longer;
    kernels.launch(device, c, {unsigned(shares.clusters * c.cluster)}, kernel_args);
    const int chunks = c.tile_m / gemm_chunk(tiling_of(c)) * (c.tile_n / c.warpgroups / 64);
    return sum_kernels.launch(device, c, {unsigned(shares.left * c.cluster * chunks)}, kernel_args);
  }
  const int64_t clusters = std::max<int64_t>(1, most_tiles(args, c));
  const int64_t resident = std::max(1, multiprocessors * c.blocks / c.cluster);
  const int64_t grid = (c.split ? clusters : std::min(clusters, resident)) * c.cluster;
  kernels.launch(device, c, {unsigned(grid)}, kernel_args);
}

}  // namespace deepinfer::cuda
