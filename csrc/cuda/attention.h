#pragma once

#include "../ops/attention.h"

namespace deepinfer::cuda {

// Floats of scratch on the device that attention() needs for these arguments, 0 for none.
int64_t attention_scratch(const AttentionArgs& args, int device);

// On torch's current stream of the device; chooses the kernel. There is at least one query.
void attention(const AttentionArgs& args, float* scratch, int device);

// The same with query_rope and key_rope; false if no kernel takes the call so.
bool attention_of_parts(const AttentionArgs& args, int device);

}  // namespace deepinfer::cuda
