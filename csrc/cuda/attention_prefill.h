#pragma once

#include "../ops/attention.h"

namespace deepinfer::cuda {

// Attention of many queries, on torch's current stream of the device; false if the kernel does not take the call.
bool attention_prefill(const AttentionArgs& args, int device);

}  // namespace deepinfer::cuda
