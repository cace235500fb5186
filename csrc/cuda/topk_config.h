// The static facts of the topk kernels. Shared by host and device code.
#pragma once

#include "../ops/topk.h"

namespace deepinfer {

struct TopkConfig {
  DType x;
  int threads;
  int cluster;   // blocks of a row
  int most;      // k at most
  int slack;     // entries beyond k that a cut may leave
  int limit;     // entries in the list before a round
  int capacity;  // of the list
  TopkOrder order;
  int wide_index, values;
  int strided;  // 1: the rows have more than one stride
};

struct TopkManyConfig {
  DType x;
  int threads;
  TopkOrder order;
  int wide_index, values, strided;
};

}  // namespace deepinfer
