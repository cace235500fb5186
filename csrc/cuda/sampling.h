#pragma once

#include "../ops/sampling.h"

namespace deepinfer::cuda {

// On torch's current stream of the device.
void sample(const SampleArgs& args, int device);
void spec_verify(const SpecVerifyArgs& args, int device);

}  // namespace deepinfer::cuda
