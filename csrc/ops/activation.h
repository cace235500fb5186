// What the gated activations hand to the kernels of any device.
#pragma once

#include "quant.h"

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

// The same, quantised. `gated.out` is not used.
struct GatedQuantArgs {
  GatedArgs gated;  // row_weights has one for each slot if there is a map
  QuantizedRows quantized;
  const int32_t* rows_to_slots;  // -1: the row counts as zeros and is not read; null: no map
  int64_t slots;                 // beyond the greatest of the map
};

}  // namespace deepinfer
