// What silu_and_mul and gelu_and_mul hand to the kernels of any device.
#pragma once

#include "../cpu/types.h"

namespace deepinfer {

// act(gate) * up, with the intermediate roundings of the unfused code: `silu` and the two gelu forms round the
// activation and the product, `swish` (alpha or up_offset in use) rounds after each of its five steps.
enum class Gated : int { silu, swish, gelu, gelu_tanh };

struct GatedArgs {
  const void* gate;          // rows of `size` elements of `dtype`; of 2 * size, gate and up alternating, if interleaved
  const void* up;            // rows of `size` elements; not read if interleaved
  const float* row_weights;  // one a row, or null
  void* out;                 // dense rows of `dtype`
  Rows gate_rows, up_rows;
  int64_t size;
  float limit;  // gate is clamped from above and up on both sides; infinity for no limit
  float alpha, up_offset;
  Gated form;
  DType dtype;
  bool interleaved;
};

}  // namespace deepinfer
