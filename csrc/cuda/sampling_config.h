// The static facts of the sampling kernels. Shared by host and device code.
#pragma once

#include "../ops/sampling.h"

namespace deepinfer {

struct SamplingConfig {
  DType x;
  int threads;
  int cluster;   // blocks of a row
  int most;      // elements that filters leave, if they are to be found in one pass
  int slack;     // entries beyond those that a cut may leave
  int limit;     // entries in the list before a round
  int capacity;  // of the list
  int strided;   // 1: the rows have more than one stride
};

struct SpecAcceptConfig {
  int threads;
};

}  // namespace deepinfer
