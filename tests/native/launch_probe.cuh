// Kernels that show what a launch brought: clusters, dynamic shared memory, tensor maps.
#pragma once

#include "cuda/device.cuh"
#include "cuda/tensor_map.h"

namespace deepinfer {

struct ProbeConfig {
  int cluster, shared_bytes;
};

struct ProbeArgs {
  int* out;  // four numbers for each block
};

template <ProbeConfig c>
DEVICE void probe(const ProbeArgs& args) {
  extern __shared__ int shared[];
  wait_for_previous_kernel();
  uint32_t blocks_in_cluster = 1, bytes;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(blocks_in_cluster));
#endif
  asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
  // Every word is written by one thread and read by another.
  const int words = c.shared_bytes / 4;
  for (int i = threadIdx.x; i < words; i += blockDim.x) shared[i] = i;
  __syncthreads();
  int wrong = 0;
  for (int i = threadIdx.x; i < words; i += blockDim.x) wrong += shared[words - 1 - i] != words - 1 - i;
  wrong = __syncthreads_count(wrong);
  if (threadIdx.x == 0) {
    int* out = args.out + 4 * blockIdx.x;
    out[0] = int(blocks_in_cluster), out[1] = int(bytes), out[2] = wrong, out[3] = int(blockDim.x);
  }
}

struct TileCopyConfig {
  int rows, columns;
};

struct TileCopyArgs {
  TensorMap input;
  float* out;  // a dense tile for each block
  int tiles_across;
};

// Each block fetches one tile with the bulk copy engine and writes it out densely.
template <TileCopyConfig c>
DEVICE void tile_copy(const TileCopyArgs& args) {
#if __CUDA_ARCH__ >= 900
  __shared__ alignas(128) float tile[c.rows * c.columns];
  __shared__ uint64_t barrier;
  wait_for_previous_kernel();
  const auto barrier_at = uint32_t(__cvta_generic_to_shared(&barrier));
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier_at));
    asm volatile("fence.mbarrier_init.release.cluster;");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier_at),
                 "r"(uint32_t(sizeof(tile))));
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
            uint32_t(__cvta_generic_to_shared(tile))),
        "l"(&args.input), "r"(int(blockIdx.x) % args.tiles_across * c.columns),
        "r"(int(blockIdx.x) / args.tiles_across * c.rows), "r"(barrier_at)
        : "memory");
  }
  __syncthreads();
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], 0;\n"
      "@!done bra again;\n"
      "}" ::"r"(barrier_at)
      : "memory");
  for (int i = threadIdx.x; i < c.rows * c.columns; i += blockDim.x)
    args.out[int64_t(blockIdx.x) * c.rows * c.columns + i] = tile[i];
#endif
}

}  // namespace deepinfer
