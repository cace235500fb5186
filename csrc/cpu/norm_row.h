// One row of an RMSNorm, for the kernels that have one inside. Include from kernel files only.
#pragma once

#include "../ops/norm.h"
#include "vec.h"

namespace deepinfer::cpu::DEEPINFER_ISA {

namespace {

// xhat times the weight, with the roundings of the model's own code.
template <typename T, WeightForm form>
inline F32 apply_weight(F32 normed, F32 weight) {
  if constexpr (form == WeightForm::cast_mul) return round_to<T>(normed) * weight;
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
    level_[0][0] += low * low;
    level_[0][1] += high * high;
    if ((++blocks_ & mask(0)) == 0) carry();
  }

  // `rest` is what remains of the row, fewer elements than a block.
  float finish(const float* rest, int64_t count) {
    for (int j = 1; j < kLevels; ++j)
      for (int half = 0; half < 2; ++half) level_[0][half] += level_[j][half];
    float partial[kBlock];
    std::memcpy(partial, level_[0], sizeof(partial));
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
    for (int j = 1; j < kLevels; ++j) {
      for (int half = 0; half < 2; ++half) {
        level_[j][half] += level_[j - 1][half];
        level_[j - 1][half] = F32{};
      }
      if (blocks_ & mask(j)) break;
    }
  }

  F32 level_[kLevels][2] = {};
  int64_t blocks_ = 0;
  int power_ = 4;
};

// The norm of n elements; with `add` that of x + residual, which is written to `sum`. Two passes: the second one reads the
// row out of the L1 cache.
template <typename T, typename W, typename Out, WeightForm form, bool add>
void norm_row(const T* x, const T* residual, const W* w, Out* out, T* sum, int64_t n, float eps) {
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
  for (i = 0; i + kLanes <= n; i += kLanes) {
    F32 weight = form == WeightForm::none ? F32{} : load(w + i);
    store(out + i, apply_weight<T, form>(load(x + i) * scale, weight));
  }
  if (i < n) {
    F32 weight = form == WeightForm::none ? F32{} : load_part(w + i, n - i);
    store_part(out + i, apply_weight<T, form>(load_part(x + i, n - i) * scale, weight), n - i);
  }
}

}  // namespace

}  // namespace deepinfer::cpu::DEEPINFER_ISA
