// Sorting tokens by expert, gathering their rows and summing them up again. All of it is bound by memory.

#include "moe_dispatch.h"

#include "fp8.h"

namespace deepinfer::cpu::DEEPINFER_ISA {

namespace {

struct Span { int64_t begin, end; };

Span slots_of(const ExpertMapArgs& args, int64_t chunk) {
  return {args.slots * chunk / args.chunks, args.slots * (chunk + 1) / args.chunks};
}

template <typename Id>
void count_chunk(const ExpertMapArgs& args, int64_t chunk) {
  const Id* ids = static_cast<const Id*>(args.ids);
  int32_t* counts = args.cursors + chunk * args.num_local_experts;
  std::memset(counts, 0, args.num_local_experts * sizeof(int32_t));
  args.invalid[chunk] = -1;
  const auto [begin, end] = slots_of(args, chunk);
  for (int64_t slot = begin; slot < end; ++slot) {
    const int64_t id = ids[slot];
    if (id < -1 || id >= args.num_experts) {
      args.invalid[chunk] = slot;
      return;
    }
    const uint64_t local = id - args.first_expert;
    if (local < uint64_t(args.num_local_experts)) ++counts[local];
  }
}

template <typename Id>
void place_chunk(const ExpertMapArgs& args, int64_t chunk) {
  const Id* ids = static_cast<const Id*>(args.ids);
  int32_t* cursors = args.cursors + chunk * args.num_local_experts;
  const auto [begin, end] = slots_of(args, chunk);
  for (int64_t slot = begin; slot < end; ++slot) {
    const uint64_t local = int64_t(ids[slot]) - args.first_expert;
    if (local < uint64_t(args.num_local_experts)) {
      const int32_t row = cursors[local]++;
      args.rows_to_slots[row] = int32_t(slot);
      args.slots_to_rows[slot] = row;
    } else {
      args.slots_to_rows[slot] = -1;
    }
  }
}

template <typename W>
inline float factor_of(const MoeUnpermuteArgs& args, int64_t slot, int64_t row) {
  const float weight = args.weights ? load1(static_cast<const W*>(args.weights) + slot) : 1.f;
  return args.row_scales ? weight * args.row_scales[row] : weight;
}

// out = sum over j of factor[j] * y[row[j]], in this order, without fused multiply-add, then rounded and perhaps added
// to; `at` is where in the row.
template <typename Y, typename T, typename W, int vectors>
inline void sum_block(const MoeUnpermuteArgs& args, int64_t token, int64_t at) {
  F32 sum[vectors] = {};
  for (int64_t slot = token * args.topk; slot < (token + 1) * args.topk; ++slot) {
    const int64_t row = args.slots_to_rows[slot];
    if (row < 0) continue;
    const float factor = factor_of<W>(args, slot, row);
    const Y* y = static_cast<const Y*>(args.y) + row * args.row_stride + at;
    for (int v = 0; v < vectors; ++v) sum[v] = sum[v] + factor * load(y + v * kLanes);
  }
  T* out = static_cast<T*>(args.out) + token * args.hidden_size + at;
  for (int v = 0; v < vectors; ++v) store(out + v * kLanes, sum[v]);
  if (!args.addend) return;
  const T* addend = static_cast<const T*>(args.addend) + token * args.hidden_size + at;
  for (int v = 0; v < vectors; ++v) store(out + v * kLanes, load(out + v * kLanes) + load(addend + v * kLanes));
}

template <typename Y, typename T, typename W>
inline void sum_element(const MoeUnpermuteArgs& args, int64_t token, int64_t at) {
  float sum = 0.f;
  for (int64_t slot = token * args.topk; slot < (token + 1) * args.topk; ++slot) {
    const int64_t row = args.slots_to_rows[slot];
    if (row < 0) continue;
    sum = sum + factor_of<W>(args, slot, row) * load1(static_cast<const Y*>(args.y) + row * args.row_stride + at);
  }
  T* out = static_cast<T*>(args.out) + token * args.hidden_size + at;
  store1(out, sum);
  if (args.addend) store1(out, load1(out) + load1(static_cast<const T*>(args.addend) + token * args.hidden_size + at));
}

template <typename Y, typename T, typename W>
void unpermute(const MoeUnpermuteArgs& args, int64_t begin, int64_t end) {
  constexpr int kBlock = 4;
  for (int64_t token = begin; token < end; ++token) {
    int64_t at = 0;
    for (; at + kBlock * kLanes <= args.hidden_size; at += kBlock * kLanes)
      sum_block<Y, T, W, kBlock>(args, token, at);
    for (; at + kLanes <= args.hidden_size; at += kLanes) sum_block<Y, T, W, 1>(args, token, at);
    for (; at < args.hidden_size; ++at) sum_element<Y, T, W>(args, token, at);
  }
}

template <typename T>
void with_weights(const MoeUnpermuteArgs& args, int64_t begin, int64_t end) {
  if (args.coded) return unpermute<e4m3, T, float>(args, begin, end);
  switch (args.weights_dtype) {
    case DType::f32: return unpermute<T, T, float>(args, begin, end);
    case DType::bf16: return unpermute<T, T, bf16>(args, begin, end);
    case DType::f16: return unpermute<T, T, f16>(args, begin, end);
  }
}

template <typename Scale>
void permute_scales(const MoePermuteScalesArgs& args, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const int32_t slot = args.rows_to_slots[row];
    const Scale* scales = static_cast<const Scale*>(args.scales) + (slot < 0 ? 0 : slot / args.topk * args.row_stride);
    Scale* out = static_cast<Scale*>(args.out) + row * args.out_row_stride;
    for (int64_t i = 0; i < args.columns; ++i)
      out[i * args.out_column_stride] = slot < 0 ? Scale(0) : scales[i * args.column_stride];
  }
}

}  // namespace

void expert_count(const ExpertMapArgs& args, int64_t begin, int64_t end) {
  for (int64_t chunk = begin; chunk < end; ++chunk)
    args.wide_ids ? count_chunk<int64_t>(args, chunk) : count_chunk<int32_t>(args, chunk);
}

void expert_layout(const ExpertMapArgs& args, int64_t, int64_t) {
  int32_t row = 0;
  for (int64_t e = 0; e < args.num_local_experts; ++e) {
    const int32_t start = row;
    args.offsets[e] = start;
    for (int64_t chunk = 0; chunk < args.chunks; ++chunk) {
      int32_t& cursor = args.cursors[chunk * args.num_local_experts + e];
      const int32_t count = cursor;
      cursor = row;
      row += count;
    }
    args.counts[e] = row - start;
    while ((row - start) % args.alignment) args.rows_to_slots[row++] = -1;
  }
  args.offsets[args.num_local_experts] = row;
  for (int64_t r = row; r < args.rows; ++r) args.rows_to_slots[r] = -1;
}

void expert_place(const ExpertMapArgs& args, int64_t begin, int64_t end) {
  for (int64_t chunk = begin; chunk < end; ++chunk)
    args.wide_ids ? place_chunk<int64_t>(args, chunk) : place_chunk<int32_t>(args, chunk);
}

void moe_permute(const MoePermuteArgs& args, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const int32_t slot = args.rows_to_slots[row];
    char* out = args.out + row * args.row_bytes;
    if (slot < 0)
      std::memset(out, 0, args.row_bytes);
    else
      std::memcpy(out, args.x + slot / args.topk * args.row_stride, args.row_bytes);
  }
}

void moe_permute_scales(const MoePermuteScalesArgs& args, int64_t begin, int64_t end) {
  args.bytes == 1 ? permute_scales<uint8_t>(args, begin, end) : permute_scales<uint32_t>(args, begin, end);
}

void moe_unpermute(const MoeUnpermuteArgs& args, int64_t begin, int64_t end) {
  switch (args.dtype) {
    case DType::f32: return with_weights<float>(args, begin, end);
    case DType::bf16: return with_weights<bf16>(args, begin, end);
    case DType::f16: return with_weights<f16>(args, begin, end);
  }
}

}  // namespace deepinfer::cpu::DEEPINFER_ISA
