// How gated activations are cut for the cores of an NPU. Shared by host and kernel.
#pragma once

#include "../ops/activation.h"

namespace deepinfer::npu {

struct GatedTiling {
  Rows gate_rows, up_rows;
  int64_t size;
  int64_t gate_bytes, up_bytes, weight_bytes, out_bytes;  // that the kernel may touch; weight_bytes 0: no weights
  float limit, alpha, up_offset;                          // limit: a value of the dtype
  int32_t rows, chunk;                                    // of a tile; rows 1 if the chunk is not the whole row
  int32_t pitch;                                          // elements from row to row on the core
};

// Floats an element beside gate and up.
constexpr int scratch_of(Gated form) { return form == Gated::gelu ? 4 : form == Gated::swish ? 2 : 1; }

}  // namespace deepinfer::npu
