#pragma once

#include "../ops/mqa_logits.h"

namespace deepinfer::cuda {

// On torch's current stream of the device. The logits of a token whose page is not among `pages` are NaN.
void mqa_logits(const MqaLogitsArgs& args, int device);

}  // namespace deepinfer::cuda
