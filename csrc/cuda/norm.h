#pragma once

#include "../ops/norm.h"

namespace deepinfer::cuda {

// On torch's current stream of the device.
void rms_norm(const RmsNormArgs& args, int device);

// Whether the kernel can quantise these rows: they fit registers, and the threads of a group lie in a warp.
bool quantizes_rows(const RmsNormArgs& args);

// The enumerator, as generated sources write it.
const char* name_of(WeightForm form);

}  // namespace deepinfer::cuda
