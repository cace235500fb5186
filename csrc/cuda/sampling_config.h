// The static facts of the sampling kernels. Shared by host and device code.
#pragma once

#include "../ops/sampling.h"

namespace deepinfer {

struct SamplingConfig {
  DType x;
  int threads;
  int stages;    // of the ring
  int cluster;   // blocks of a row
  int most;      // elements that filters leave, if they are to be found in one pass
  int capacity;  // of the list
  int bulk;      // 1: the copy engine fills the ring
  int strided;   // 1: the rows have more than one stride
};

struct SpecAcceptConfig {
  int threads;
};

}  // namespace deepinfer
