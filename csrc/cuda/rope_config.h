// The static facts of a rope kernel. Shared by host and device code.
#pragma once

#include "../ops/rope.h"

namespace deepinfer {

constexpr int kRopeThreads = 128;  // of a block

// A thread turns one piece of each of its rows: 16 bytes of pairs, or for `half` 16 bytes of either half. Its rows have
// the same position, so that its cosines and sines stay in registers.
struct RopeConfig {
  DType x, table;
  RopeStyle style;
  int head_size;  // no more than rotary_dim without a `rest`
  int rotary_dim;
  int round_products;  // 1: to the type of x, before the sum
  int per_pair;        // 1: the tables have a column for each pair, else for each element
  int position_bytes;  // of one position, or 0 without
  int access;          // elements of x that alignment lets one access move
  int table_access;    // likewise of the tables; 0 if their columns are not dense
  int lanes;           // threads of a row
  int heads;           // rows that a thread holds at once
  int rest;            // 1: the elements beyond rotary_dim are copied
  int apart;           // 1: those have rows of their own
  int strided;         // 1: some rows have more than one stride
  int wide;            // 1: threads are not counted in 32 bits
  int exchange;        // 1: for `half`, a thread has 16 bytes of one half and gets the partners from another thread
  int ordered;         // 1: a row is written where it is read, in another order; `lanes` divides kRopeThreads
  int normed;          // 1: rows are normed first; `lanes` is a power of two up to 32
  WeightForm form;     // of that norm
  DType weight;
  int weight_access;
  int slot_bytes;    // of one slot of the cache that takes k and v, or 0 without
  int value_access;  // elements of v that one access moves
  int value_lanes;   // threads of a row of v, 16 bytes each
};

}  // namespace deepinfer
