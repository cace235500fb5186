#include "gemm.h"

#include "../jit/npu_launch.h"
#include "gemm_plan.h"

namespace deepinfer::npu {

namespace {

struct GemmConfig {
  DType x, out;
  int a_dense, b_dense;
};

jit::AscendSource describe(const GemmConfig& c) {
  jit::AscendSource source;
  source.name = "gemm";
  source.header = "npu/gemm_kernel.h";
  source.tiling = "GemmTiling";
  source.buffers = {"a", "b", "out"};
  source.facts = {{"x", c.x}, {"out", c.out}, {"a_dense", c.a_dense}, {"b_dense", c.b_dense}};
  source.cube = true;
  return source;
}

std::vector<GemmConfig> samples() {
  constexpr DType bf16 = DType::bf16, f16 = DType::f16, f32 = DType::f32;
  return {{bf16, bf16, 1, 1}, {bf16, f32, 1, 0}, {f16, f16, 0, 1}, {bf16, bf16, 0, 0}, {f32, f32, 1, 1}};
}

jit::AscendKernels<GemmConfig> kernels(describe, samples);

struct FinishConfig {
  DType out;
  int sums, bias, addend;
};

jit::AscendSource describe_finish(const FinishConfig& c) {
  jit::AscendSource source;
  source.name = "gemm_finish";
  source.header = "npu/gemm_finish_kernel.h";
  source.tiling = "GemmFinishTiling";
  source.buffers = {"sums", "bias", "addend", "out"};
  source.facts = {{"out", c.out}, {"sums", c.sums}, {"bias", c.bias}, {"addend", c.addend}};
  return source;
}

std::vector<FinishConfig> finish_samples() {
  return {{DType::bf16, 1, 1, 1}, {DType::f16, 1, 0, 1}, {DType::f32, 1, 1, 0}, {DType::bf16, 0, 0, 0}};
}

jit::AscendKernels<FinishConfig> finish_kernels(describe_finish, finish_samples);

}  // namespace

int64_t matmul_scratch(const MatmulArgs& args) {
  return needs_finish(args) && args.depth > 0 ? args.rows * args.columns : 0;
}

void matmul(const MatmulArgs& args, float* scratch, int device) {
  if (args.rows == 0 || args.columns == 0) return;
  const Chip chip = chip_of(device);
  if (args.depth > 0) {
    MatmulArgs sums = args;
    if (scratch) {
      sums.out = scratch;
      sums.out_dtype = DType::f32;
      sums.out_stride = args.columns;
    }
    const GemmTiling tiling = tile_gemm(sums, chip);
    const GemmConfig config{args.dtype, sums.out_dtype, a_is_dense(args), b_is_dense(args)};
    kernels.launch(device, config, blocks_of(tiling, chip), {args.x, args.weight, sums.out}, tiling);
  }
  if (!needs_finish(args)) return;
  const GemmFinishTiling tiling = tile_gemm_finish(args, chip);
  const FinishConfig config{args.out_dtype, args.depth > 0, args.bias != nullptr, args.addend != nullptr};
  finish_kernels.launch(device, config, blocks_of(tiling, chip), {scratch, args.bias, args.addend, args.out}, tiling);
}

}  // namespace deepinfer::npu
