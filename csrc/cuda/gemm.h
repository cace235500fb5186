#pragma once

#include "../ops/gemm.h"

namespace deepinfer::cuda {

// Whether operands of 8 or 16 bits have to lie as the copy engine takes them: one of the two dimensions of each dense
// (k for 8 bits), addresses and all other strides multiples of 16 bytes.
bool uses_copy_engine(int device);

constexpr int64_t kMostExperts = 1024;

// Scratch that matmul() needs for these arguments, on the device and aligned to 16 bytes.
int64_t matmul_scratch_bytes(const MatmulArgs& args, int device);

// On torch's current stream of the device. rows, columns and depth are below 2^31.
void matmul(const MatmulArgs& args, void* scratch, int device);

// For measurements: the tiling from now on, on this thread, as tile_n, tile_m, warpgroups, cluster, split, streamed,
// blocks, tokens_as_rows, in_turn; zeros for the usual choice.
void force_tiling(const int (&facts)[9]);

}  // namespace deepinfer::cuda
