// The k greatest elements of each row. One pass over the row, bound by memory for k far below the row size; see
// Selection. Rows that are too few for all threads are searched in parts, and the best of their candidates taken.

#include "topk.h"

#include "select.h"

namespace deepinfer::cpu::DEEPINFER_ISA {

namespace {

int64_t length_of(const TopkArgs& args, int64_t row) {
  if (!args.lengths) return args.row_size;
  const int64_t length = args.lengths[row];
  return length < 0 ? 0 : length < args.row_size ? length : args.row_size;
}

int64_t place_of(const TopkArgs& args, int64_t row, int64_t index) {
  if (args.page_table) {
    const int64_t page = args.page_table[row * args.pages + index / args.page_size];
    if (page < 0) return args.fill_index;
    index = page * args.page_size + index % args.page_size;
  }
  return args.offsets ? index + args.offsets[row] : index;
}

template <typename Index>
void write_indices(const TopkArgs& args, int64_t row, const Entry* list, int64_t count) {
  Index* indices = static_cast<Index*>(args.indices) + row * args.k;
  for (int64_t i = 0; i < count; ++i) indices[i] = Index(place_of(args, row, index_of(list[i])));
  for (int64_t i = count; i < args.k; ++i) indices[i] = Index(args.fill_index);
}

// `other` is scratch for count entries.
template <typename T>
void write_row(const TopkArgs& args, int64_t row, Entry* list, Entry* other, int64_t count) {
  if (args.order == TopkOrder::by_value) sort_by_key(list, other, count);
  args.wide_index ? write_indices<int64_t>(args, row, list, count) : write_indices<int32_t>(args, row, list, count);
  if (!args.values) return;
  const T* x = static_cast<const T*>(args.x) + row_offset(args.x_rows, row);
  T* values = static_cast<T*>(args.values) + row * args.k;
  for (int64_t i = 0; i < count; ++i) values[i] = x[index_of(list[i])];
  for (int64_t i = count; i < args.k; ++i) store1(values + i, args.fill_value);
}

template <typename T>
void rows(const TopkArgs& args, int64_t begin, int64_t end) {
  const int64_t most = args.k < args.row_size ? args.k : args.row_size;
  const Scratch<Entry> list(Selection<T>::capacity(args.k, args.row_size)), other(most);
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(args.x) + row_offset(args.x_rows, row);
    const int64_t count = Selection<T>(list, args.k).run(x, 0, length_of(args, row));
    write_row<T>(args, row, list, other, count);
  }
}

template <typename T>
void parts(const TopkArgs& args, int64_t begin, int64_t end) {
  const int64_t size = (args.row_size + args.parts - 1) / args.parts;
  const Scratch<Entry> list(Selection<T>::capacity(args.k, size));
  for (int64_t task = begin; task < end; ++task) {
    const int64_t row = task / args.parts, first = task % args.parts * size, length = length_of(args, row);
    const T* x = static_cast<const T*>(args.x) + row_offset(args.x_rows, row);
    const int64_t stop = first + size < length ? first + size : length;
    args.counts[task] = first < stop ? Selection<T>(list, args.k).run(x, first, stop) : 0;
    std::memcpy(args.candidates + task * args.k, list, size_t(args.counts[task]) * sizeof(Entry));
  }
}

template <typename T>
void merge(const TopkArgs& args, int64_t begin, int64_t end) {
  const Scratch<Entry> list(args.k * args.parts), other(args.k);
  for (int64_t row = begin; row < end; ++row) {
    int64_t count = 0;
    for (int64_t task = row * args.parts; task < (row + 1) * args.parts; ++task) {
      std::memcpy(list + count, args.candidates + task * args.k, size_t(args.counts[task]) * sizeof(Entry));
      count += args.counts[task];
    }
    if (count > args.k) {
      keep_greatest(list, count, args.k);
      count = args.k;
    }
    write_row<T>(args, row, list, other, count);
  }
}

}  // namespace

#define DEEPINFER_DISPATCH(kernel)                                  \
  switch (args.dtype) {                                             \
    case DType::f32: return kernel<float>(args, begin, end);        \
    case DType::bf16: return kernel<bf16>(args, begin, end);        \
    case DType::f16: return kernel<f16>(args, begin, end);          \
  }

void topk_rows(const TopkArgs& args, int64_t begin, int64_t end) { DEEPINFER_DISPATCH(rows) }
void topk_parts(const TopkArgs& args, int64_t begin, int64_t end) { DEEPINFER_DISPATCH(parts) }
void topk_merge(const TopkArgs& args, int64_t begin, int64_t end) { DEEPINFER_DISPATCH(merge) }

}  // namespace deepinfer::cpu::DEEPINFER_ISA
