// How gated activations are cut for the cores of an NPU. Shared by host and kernel.
#pragma once

#include "../ops/activation.h"

namespace deepinfer::npu {

struct GatedTiling {
  Rows gate_rows, up_rows;
  int64_t size;
  int64_t gate_bytes, up_bytes, out_bytes, scale_bytes;  // that the kernel may touch
  int64_t weight_bytes, map_bytes;                       // 0: there are no weights, there is no map
  int64_t slots;
  Scales scales;  // of rows that are quantised
  float limit, alpha, up_offset;                          // limit: a value of the dtype
  int32_t rows, chunk;                                    // of a tile; rows 1 if the chunk is not the whole row
  int32_t pitch;                                          // elements from row to row on the core
  int32_t group;                                          // elements that share a scale
};

// Floats an element beside gate and up.
constexpr int scratch_of(Gated form) { return form == Gated::gelu ? 4 : form == Gated::swish ? 2 : 1; }

}  // namespace deepinfer::npu
