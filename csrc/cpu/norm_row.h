// One row of an RMSNorm, for the kernels that have one inside. Include from kernel files only.
#pragma once

#include "../ops/norm.h"
#include "vec.h"

namespace deepinfer::cpu::DEEPINFER_ISA {

namespace {

// x rounded to T. For bf16 without the test for NaN: one that bf16 operands have made has a zero low half and survives
// the rounding, which adds less than 1 to the high half.
template <typename T>
inline F32 round_result(F32 x) { return round_to<T>(x); }
template <>
inline F32 round_result<bf16>(F32 x) {
  const U32 u = bit_cast<U32>(x);
  return bit_cast<F32>((u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u);
}

// xhat times the weight, with the roundings of the model's own code.
template <typename T, WeightForm form>
inline F32 apply_weight(F32 normed, F32 weight) {
  if constexpr (form == WeightForm::cast_mul) return round_result<T>(normed) * weight;
  if constexpr (form == WeightForm::mul_cast) return normed * weight;
  if constexpr (form == WeightForm::one_plus) return normed * (1.f + weight);
  return normed;
}

// The sum of squares of a row in the order of torch's own sum: 32 partial sums, carried over four levels every 16 (or
// more) additions, then added as four groups of eight. So a norm has the bits of the model's unfused code.
class SquareSum {
 public:
  static constexpr int64_t kBlock = 2 * kLanes;

  explicit SquareSum(int64_t row_size) {
    const int64_t blocks = row_size / kBlock;
    const int log2 = blocks > 2 ? 64 - __builtin_clzll(blocks - 1) : 1;
    if (log2 / kLevels > power_) power_ = log2 / kLevels;
  }

  void add(F32 low, F32 high) {
    low_ += low * low;
    high_ += high * high;
    if ((++blocks_ & mask(0)) == 0) carry();
  }

  // `rest` is what remains of the row, fewer elements than a block.
  float finish(const float* rest, int64_t count) {
    if (blocks_ > mask(0)) {
      for (auto& level : carried_) {
        low_ += level[0];
        high_ += level[1];
      }
    }
    float partial[kBlock];
    store(partial, low_);
    store(partial + kLanes, high_);
    int64_t i = 0;
    for (; i + 8 <= count; i += 8)
      for (int k = 0; k < 8; ++k) partial[k] += rest[i + k] * rest[i + k];
    float sum = 0;
    for (; i < count; ++i) sum += rest[i] * rest[i];
    for (int k = 0; k < 8; ++k) sum += ((partial[k] + partial[8 + k]) + partial[16 + k]) + partial[24 + k];
    return sum;
  }

 private:
  static constexpr int kLevels = 4;

  int64_t mask(int level) const { return ((int64_t(1) << power_) - 1) << (level * power_); }

  void carry() {
    if (blocks_ == mask(0) + 1) std::memset(carried_, 0, sizeof(carried_));  // short rows never get here
    F32 low = low_, high = high_;
    low_ = high_ = F32{};
    for (int j = 1; j < kLevels; ++j) {
      F32(&level)[2] = carried_[j - 1];
      level[0] += low;
      level[1] += high;
      if ((blocks_ & mask(j)) || j + 1 == kLevels) break;
      low = level[0];
      high = level[1];
      level[0] = level[1] = F32{};
    }
  }

  F32 low_ = {}, high_ = {}, carried_[kLevels - 1][2];
  int64_t blocks_ = 0;
  int power_ = 4;
};

// y, rounded to Out, as Out or as float. `from_bf16`: it was made of bf16 operands alone.
template <typename Out, bool from_bf16, typename To>
inline void store_rounded(To* to, F32 y, int n) {
  if constexpr (dtype_of<Out>::value == DType::bf16 && from_bf16) {
    y = round_result<bf16>(y);
    if constexpr (dtype_of<To>::value == DType::bf16) {
      const U16 bits = to_u16(bit_cast<U32>(y) >> 16);
      if (n == kLanes) return void(std::memcpy(to, &bits, sizeof(bits)));
    }
  } else if constexpr (dtype_of<Out>::value != dtype_of<To>::value) {
    y = round_to<Out>(y);
  }
  store(to, y, n);
}

// The norm of n elements, rounded to Out; with `add` that of x + residual, which is written to `sum`. Two passes: the
// second one reads the row out of the L1 cache. A kernel that goes on with the row takes it as floats.
template <typename T, typename W, typename Out, WeightForm form, bool add, typename To>
void norm_row(const T* x, const T* residual, const W* w, To* out, T* sum, int64_t n, float eps) {
  auto read = [&](int64_t i) {
    if constexpr (!add) return load(x + i);
    const F32 v = round_to<T>(load(x + i) + load(residual + i));
    store(sum + i, v);
    return v;
  };
  auto read_part = [&](int64_t i, int64_t count) {
    if constexpr (!add) return load_part(x + i, count);
    const F32 v = round_to<T>(load_part(x + i, count) + load_part(residual + i, count));
    store_part(sum + i, v, count);
    return v;
  };
  SquareSum squares(n);
  int64_t i = 0;
  for (; i + SquareSum::kBlock <= n; i += SquareSum::kBlock) {
    const F32 low = read(i);
    squares.add(low, read(i + kLanes));
  }
  float rest[SquareSum::kBlock];
  for (int64_t begin = i; begin < n; begin += kLanes)
    store(rest + (begin - i), begin + kLanes <= n ? read(begin) : read_part(begin, n - begin));
  const float mean = squares.finish(rest, n - i) / float(n);
  if constexpr (add) x = sum;
  const F32 scale = splat(1.f / __builtin_sqrtf(mean + eps));
  constexpr bool from_bf16 =
      dtype_of<T>::value == DType::bf16 && (dtype_of<W>::value == DType::bf16 || form == WeightForm::none);
  for_lanes(n, [&](int64_t at, int count) {
    const F32 weight = form == WeightForm::none ? F32{} : load(w + at, count);
    store_rounded<Out, from_bf16>(out + at, apply_weight<T, form>(load(x + at, count) * scale, weight), count);
  });
}

}  // namespace

}  // namespace deepinfer::cpu::DEEPINFER_ISA
