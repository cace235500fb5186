// Where the topk kernels write.
#pragma once

#include "../ops/topk.h"
#include "entries.cuh"

namespace deepinfer {

DEVICE int64_t length_of(const TopkArgs& args, int64_t row) {
  if (!args.lengths) return args.row_size;
  const int64_t length = args.lengths[row];
  return length < 0 ? 0 : length < args.row_size ? length : args.row_size;
}

// Out of line: a division is long.
__device__ __noinline__ int64_t place_in_pages(const TopkArgs& args, int64_t row, uint32_t index) {
  const uint32_t size = args.page_size < 0x7fffffff ? uint32_t(args.page_size) : 0x7fffffff;  // no index reaches that
  const int64_t page = args.page_table[row * args.pages + index / size];
  return page < 0 ? -1 : page * args.page_size + index % size;
}

DEVICE int64_t place_of(const TopkArgs& args, int64_t row, uint32_t index) {
  int64_t place = index;
  if (args.page_table) {
    place = place_in_pages(args, row, index);
    if (place < 0) return args.fill_index;
  }
  return args.offsets ? place + args.offsets[row] : place;
}

template <int wide>
DEVICE void write_index(const TopkArgs& args, int64_t row, int64_t at, int64_t place) {
  if constexpr (wide) static_cast<int64_t*>(args.indices)[row * args.k + at] = place;
  else static_cast<int32_t*>(args.indices)[row * args.k + at] = int32_t(place);
}

template <int wide, int with_values, typename T>
DEVICE void write_place(const TopkArgs& args, const T* x, int64_t row, int64_t at, int64_t index) {
  write_index<wide>(args, row, at, place_of(args, row, uint32_t(index)));
  if constexpr (with_values) static_cast<T*>(args.values)[row * args.k + at] = x[index];
}

// The same of an entry, whose key has the value unless it is a NaN or a zero, of which there are several.
template <int wide, int with_values, typename T>
DEVICE void write_entry(const TopkArgs& args, const T* x, int64_t row, int64_t at, uint64_t entry) {
  const uint32_t key = key_in(entry), zero = 0x80000000;
  write_index<wide>(args, row, at, place_of(args, row, index_in(entry)));
  if constexpr (with_values)
    static_cast<T*>(args.values)[row * args.k + at] =
        key == kNanKey || key == zero ? x[index_in(entry)] : from_float<T>(value_of(key));
}

template <int wide, int with_values, typename T>
DEVICE void write_fill(const TopkArgs& args, int64_t row, int64_t at) {
  write_index<wide>(args, row, at, args.fill_index);
  if constexpr (with_values) static_cast<T*>(args.values)[row * args.k + at] = from_float<T>(args.fill_value);
}

}  // namespace deepinfer
