// The static facts and the arguments of the index logits. Shared by host and device code.
#pragma once

#include "../ops/mqa_logits.h"
#include "tensor_map.h"

namespace deepinfer {

struct MqaLogitsConfig {
  int heads;
  int queries;  // neighbouring rows of q that are multiplied at once
  int box;      // tokens that are loaded at once, at most 64: a page or a part of one
  int paged;
};

struct MqaLogitsKernelArgs {
  TensorMap q;  // depth, rows x heads
  TensorMap k;  // depth, token of a page, page
  MqaLogitsArgs problem;
};

}  // namespace deepinfer
