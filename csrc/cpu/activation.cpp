// Gated activations: act(gate) * up in one pass over memory, also quantised.

#include "activation.h"

#include "gated.h"
#include "quantizer.h"

namespace deepinfer::cpu::DEEPINFER_ISA {

namespace {

struct Pair { F32 gate, up; };

// Sixteen neighbouring (gate, up) pairs.
inline Pair load_pairs(const float* p) {
  F32 a = load(p), b = load(p + kLanes);
  return {__builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30),
          __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31)};
}
inline Pair load_pairs(const bf16* p) {
  U32 both;
  std::memcpy(&both, p, sizeof(both));
  return {bit_cast<F32>(both << 16), bit_cast<F32>(both & 0xffff0000u)};
}
inline Pair load_pairs(const f16* p) {
  U32 both;
  std::memcpy(&both, p, sizeof(both));
  return {from_f16(to_u16(both)), from_f16(to_u16(both >> 16))};
}
template <typename T>
inline Pair load_pairs(const T* p, int n) {
  if (n == kLanes) return load_pairs(p);
  Pair r{};
  for (int i = 0; i < n; ++i) {
    r.gate[i] = load1(p + 2 * i);
    r.up[i] = load1(p + 2 * i + 1);
  }
  return r;
}

// Elements [first, first + size) of a row to out, times the weight if there is one.
template <typename T>
using Piece = void (*)(const GatedArgs& args, int64_t row, int64_t first, int64_t size, const float* weight, T* out);

template <typename T, Gated form, bool interleaved>
void gated_piece(const GatedArgs& args, int64_t row, int64_t first, int64_t size, const float* weight, T* out) {
  const T* gate =
      static_cast<const T*>(args.gate) + row_offset(args.gate_rows, row) + (interleaved ? 2 * first : first);
  const T* up = interleaved ? nullptr : static_cast<const T*>(args.up) + row_offset(args.up_rows, row) + first;
  const Gating<T, form> gating(args.limit, args.alpha, args.up_offset);
  auto gated = [&](int64_t i, int n) {
    const Pair pair = interleaved ? load_pairs(gate + 2 * i, n) : Pair{load(gate + i, n), load(up + i, n)};
    return gating(pair.gate, pair.up);
  };
  if (weight) {
    const F32 factor = splat(*weight);
    for_lanes(size, [&](int64_t i, int n) { store(out + i, round_to<T>(gated(i, n)) * factor, n); });
  } else {
    for_lanes(size, [&](int64_t i, int n) { store(out + i, gated(i, n), n); });
  }
}

template <typename T, Gated form>
Piece<T> piece_of(const GatedArgs& args) {
  return args.interleaved ? gated_piece<T, form, true> : gated_piece<T, form, false>;
}

template <typename T>
Piece<T> piece_of(const GatedArgs& args) {
  switch (args.form) {
    case Gated::silu: return piece_of<T, Gated::silu>(args);
    case Gated::swish: return piece_of<T, Gated::swish>(args);
    case Gated::gelu: return piece_of<T, Gated::gelu>(args);
    default: return piece_of<T, Gated::gelu_tanh>(args);
  }
}

template <typename T>
void gated_rows(const GatedArgs& args, int64_t begin, int64_t end) {
  const Piece<T> piece = piece_of<T>(args);
  for (int64_t row = begin; row < end; ++row)
    piece(args, row, 0, args.size, args.row_weights ? args.row_weights + row : nullptr,
          static_cast<T*>(args.out) + row * args.size);
}

// Each piece of a row passes through a scratch that stays in the cache.
template <typename T>
void gated_quant_rows(const GatedQuantArgs& args, int64_t begin, int64_t end) {
  const GatedArgs& gated = args.gated;
  const Piece<T> piece = piece_of<T>(gated);
  const Scratch<T> scratch(args.quantized.group, gated.size);
  for (int64_t row = begin; row < end; ++row) {
    const int64_t slot = args.rows_to_slots ? args.rows_to_slots[row] : row;
    const float* weight = gated.row_weights ? gated.row_weights + slot : nullptr;
    for (int64_t first = 0; first < gated.size; first += scratch.size()) {
      const int64_t left = gated.size - first, size = left < scratch.size() ? left : scratch.size();
      if (slot < 0) {
        std::memset(scratch.data(), 0, size_t(size) * sizeof(T));
      } else {
        piece(gated, row, first, size, weight, scratch.data());
      }
      quantize_piece(scratch.data(), size, args.quantized, row, gated.size, first);
    }
  }
}

}  // namespace

void gated_activation(const GatedArgs& args, int64_t begin, int64_t end) {
  switch (args.dtype) {
    case DType::f32: return gated_rows<float>(args, begin, end);
    case DType::bf16: return gated_rows<bf16>(args, begin, end);
    case DType::f16: return gated_rows<f16>(args, begin, end);
  }
}

void gated_quant(const GatedQuantArgs& args, int64_t begin, int64_t end) {
  switch (args.gated.dtype) {
    case DType::f32: return gated_quant_rows<float>(args, begin, end);
    case DType::bf16: return gated_quant_rows<bf16>(args, begin, end);
    case DType::f16: return gated_quant_rows<f16>(args, begin, end);
  }
}

}  // namespace deepinfer::cpu::DEEPINFER_ISA
