// The static facts of the topk kernels. Shared by host and device code.
#pragma once

#include "../ops/topk.h"

namespace deepinfer {

struct TopkConfig {
  DType x;
  int threads;
  int stages;    // of the ring
  int cluster;   // blocks of a row
  int most;      // k at most, a power of two
  int capacity;  // of the list
  int bulk;      // 1: the copy engine fills the ring
  TopkOrder order;
  int wide_index, values;
  int strided;  // 1: the rows have more than one stride
};

// Rows of at most lanes * vectors * 16 bytes.
struct TopkShortConfig {
  DType x;
  int threads;
  int lanes;    // threads of a row, 32 or all
  int vectors;  // of a thread, 16 bytes each
  int digit;    // bits of a key that a step of the bisection finds, 1 or 2
  int wide_index, values, strided;
};

struct TopkManyConfig {
  DType x;
  int threads;
  TopkOrder order;
  int wide_index, values, strided;
};

}  // namespace deepinfer
