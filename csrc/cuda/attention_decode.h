#pragma once

#include "../ops/attention.h"

namespace deepinfer::cuda {

// Whether the kernel for few queries takes these arguments.
bool suits_attention_decode(const AttentionArgs& args, int device);

// Floats of scratch that it needs, 0 for none.
int64_t attention_decode_scratch(const AttentionArgs& args, int device);

void attention_decode(const AttentionArgs& args, float* scratch, int device);

}  // namespace deepinfer::cuda
