#pragma once

#include "../ops/rope.h"

namespace deepinfer::cuda {

// Both q and k in one launch, on torch's current stream of the device. A position outside the cache turns the rotated
// elements of its rows to NaN.
void rotary_embedding(const RopeArgs& args, int device);

// Whether all of a row is read before any of it is written: interleaved_to_half may then work in place.
bool reads_whole_rows(const RopeArgs& args);

// Whether the kernel can norm rows of this size on their way.
bool norms_rows(const RopeArgs& args);

}  // namespace deepinfer::cuda
