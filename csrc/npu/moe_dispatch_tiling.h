// How the dispatch of tokens to experts is cut for the cores of an NPU. Shared by host and kernels.
#pragma once

#include "../ops/moe_dispatch.h"

namespace deepinfer::npu {

// Both walk a map of int32 in tiles of kMapTile entries.
constexpr int32_t kMapTile = 64;

// Of a counting sort of slots by expert. Each block counts and places one chunk of the slots.
struct ExpertMapTiling {
  int64_t slots, chunks, rows;
  int64_t num_experts, first_expert, num_local_experts, alignment;
};

constexpr int32_t kSlotsAtOnce = 512;         // of a chunk, on the core
constexpr int64_t kMostLocalExperts = 8192;  // whose counts fit the core, four times

struct PermuteTiling {
  int64_t row_bytes, row_stride, topk, rows, tokens;
  int64_t x_bytes;   // that the kernel may touch
  int32_t chunk;     // bytes of a row that are copied at once
  int32_t buffers;   // chunks under way
};

// Strides are in scales.
struct PermuteScalesTiling {
  int64_t row_stride, column_stride, out_row_stride, out_column_stride;
  int64_t columns, topk, rows, tokens;
  int64_t scale_bytes, out_bytes;  // that the kernel may touch
  int32_t chunk;                   // columns that are copied at once
};

struct UnpermuteTiling {
  int64_t row_stride, hidden_size, topk, rows, tokens;
  int64_t y_bytes;         // that the kernel may touch
  int32_t has_weights;     // 0: every weight is 1
  int32_t chunk;           // elements of a row at once
  int32_t tokens_at_once;  // whose part of the map is on the core
};

}  // namespace deepinfer::npu
