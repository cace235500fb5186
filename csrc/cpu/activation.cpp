// Gated activations: act(gate) * up in one pass over memory.

#include "activation.h"

#include "gated.h"

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

template <typename T, Gated form, bool interleaved>
void gated_row(const GatedArgs& args, int64_t row) {
  const T* gate = static_cast<const T*>(args.gate) + row_offset(args.gate_rows, row);
  const T* up = interleaved ? nullptr : static_cast<const T*>(args.up) + row_offset(args.up_rows, row);
  T* out = static_cast<T*>(args.out) + row * args.size;
  const Gating<T, form> gating(args.limit, args.alpha, args.up_offset);
  auto gated = [&](int64_t i, int n) {
    const Pair pair = interleaved ? load_pairs(gate + 2 * i, n) : Pair{load(gate + i, n), load(up + i, n)};
    return gating(pair.gate, pair.up);
  };
  if (args.row_weights) {
    const F32 weight = splat(args.row_weights[row]);
    for_lanes(args.size, [&](int64_t i, int n) { store(out + i, round_to<T>(gated(i, n)) * weight, n); });
  } else {
    for_lanes(args.size, [&](int64_t i, int n) { store(out + i, gated(i, n), n); });
  }
}

template <typename T, Gated form>
void gated_rows(const GatedArgs& args, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row)
    args.interleaved ? gated_row<T, form, true>(args, row) : gated_row<T, form, false>(args, row);
}

template <typename T>
void with_form(const GatedArgs& args, int64_t begin, int64_t end) {
  switch (args.form) {
    case Gated::silu: return gated_rows<T, Gated::silu>(args, begin, end);
    case Gated::swish: return gated_rows<T, Gated::swish>(args, begin, end);
    case Gated::gelu: return gated_rows<T, Gated::gelu>(args, begin, end);
    case Gated::gelu_tanh: return gated_rows<T, Gated::gelu_tanh>(args, begin, end);
  }
}

}  // namespace

void gated_activation(const GatedArgs& args, int64_t begin, int64_t end) {
  switch (args.dtype) {
    case DType::f32: return with_form<float>(args, begin, end);
    case DType::bf16: return with_form<bf16>(args, begin, end);
    case DType::f16: return with_form<f16>(args, begin, end);
  }
}

}  // namespace deepinfer::cpu::DEEPINFER_ISA
