#pragma once

#include "../ops/topk.h"

namespace deepinfer::cuda {

// Words of 64 bits that args.candidates has to hold for each row; 0: none.
int64_t topk_scratch(const TopkArgs& args);

// On torch's current stream of the device.
void topk(const TopkArgs& args, int device);

}  // namespace deepinfer::cuda
