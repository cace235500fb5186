// Sampling and speculative verification, a row at a time. Passes over a row: its maximum; the filters, by selection and
// not by sorting; the sum of the weights that are left; and as far as the element that the random number picks.

#include "sampling.h"

#include <cmath>

#include "distribution.h"

namespace deepinfer::cpu::DEEPINFER_ISA {

namespace {

// The first element up to which the weights, as `change` leaves them, sum to more than `target`.
template <typename T, typename Change>
int64_t pick(const RowDistribution<T>& row, uint64_t target, Change&& change) {
  uint64_t sum = 0;
  int64_t picked = 0;
  row.each([&](int64_t first, U64 weights) {
    weights = change(first, weights);
    const uint64_t here = sum_of(weights);
    if (sum + here <= target) {
      sum += here;
      return false;
    }
    for (int i = 0;; ++i) {
      sum += weights[i];
      if (sum > target) {
        picked = first + i;
        return true;
      }
    }
  });
  return picked;
}

template <typename T>
int64_t draw(const RowDistribution<T>& row, uint64_t random) {
  if (row.only >= 0) return row.only;
  return pick(row, portion(random, row.total), [](int64_t, U64 weights) { return weights; });
}

template <typename T>
void sample_rows(const SampleArgs& args, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    const RowDistribution<T> row(args.from, i);
    const Philox random(uint64_t(args.seeds[i]), args.offsets ? uint64_t(args.offsets[i]) : 0, 0);
    const int64_t id = draw(row, random.first());
    args.ids[i] = id;
    if (!args.log_probs) continue;
    if (row.only < 0) args.log_probs[i] = float(std::log(double(row.weight(id)) / double(row.total)));
    else args.log_probs[i] = row.greatest != row.greatest ? row.greatest : 0.f;
  }
}

// What the draft model gave to an element, in the units of the target's weights.
class DraftWeights {
 public:
  DraftWeights(const SpecVerifyArgs& args, int64_t row, int64_t position, int64_t id, uint64_t total)
      : probs_(args.draft_probs ? args.draft_probs + (row * args.drafted + position) * args.target.size : nullptr),
        id_(id), total_(double(total)) {}

  uint64_t at(int64_t i) const {
    if (!probs_) return i == id_ ? uint64_t(total_) : 0;
    const float p = probs_[i];
    return p > 0.f ? uint64_t(double(p < 1.f ? p : 1.f) * total_) : 0;
  }

  bool is_nan(int64_t i) const { return probs_ && probs_[i] != probs_[i]; }

 private:
  const float* probs_;
  int64_t id_;
  double total_;
};

template <typename T>
int64_t verify_row(const SpecVerifyArgs& args, int64_t row, int64_t* ids) {
  const int64_t size = args.target.size, positions = args.drafted + 1;
  int64_t drafted = args.num_drafted ? args.num_drafted[row] : args.drafted;
  drafted = drafted < 0 ? 0 : drafted < args.drafted ? drafted : args.drafted;
  for (int64_t position = 0;; ++position) {
    const RowDistribution<T> target(args.target, row * positions + position);
    const Philox random(uint64_t(args.seeds[row]), args.offsets ? uint64_t(args.offsets[row]) : 0,
                        uint32_t(1 + position));
    if (position == drafted) {
      ids[position] = draw(target, random.first());
      return position;
    }
    const int64_t id = args.draft_ids[row * args.drafted + position];
    const bool valid = id >= 0 && id < size;
    if (target.only >= 0) {
      ids[position] = target.only;
      if (id != target.only) return position;
      continue;
    }
    const DraftWeights draft(args, row, position, id, target.total);
    if (valid && !draft.is_nan(id) && portion(random.second(), draft.at(id)) < target.weight(id)) {
      ids[position] = id;
      continue;
    }
    // What the target gives more than the draft.
    const auto residual = [&](int64_t first, U64 weights) {
      for (int i = 0; i < kLanes; ++i) {
        const uint64_t given = weights[i] ? draft.at(first + i) : 0;
        weights[i] = weights[i] > given ? weights[i] - given : 0;
      }
      return weights;
    };
    uint64_t left = 0;
    target.each([&](int64_t first, U64 weights) {
      left += sum_of(residual(first, weights));
      return false;
    });
    ids[position] = double(left) > 1e-8 * double(target.total)
                        ? pick(target, portion(random.first(), left), residual)
                        : draw(target, random.first());
    return position;
  }
}

template <typename T>
void verify_rows(const SpecVerifyArgs& args, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    int64_t* ids = args.ids + row * (args.drafted + 1);
    const int64_t accepted = verify_row<T>(args, row, ids);
    args.accepted[row] = int32_t(accepted);
    for (int64_t i = accepted + 1; i <= args.drafted; ++i) ids[i] = -1;
  }
}

}  // namespace

void sample(const SampleArgs& args, int64_t begin, int64_t end) {
  switch (args.from.dtype) {
    case DType::f32: return sample_rows<float>(args, begin, end);
    case DType::bf16: return sample_rows<bf16>(args, begin, end);
    case DType::f16: return sample_rows<f16>(args, begin, end);
  }
}

void spec_verify(const SpecVerifyArgs& args, int64_t begin, int64_t end) {
  switch (args.target.dtype) {
    case DType::f32: return verify_rows<float>(args, begin, end);
    case DType::bf16: return verify_rows<bf16>(args, begin, end);
    case DType::f16: return verify_rows<f16>(args, begin, end);
  }
}

}  // namespace deepinfer::cpu::DEEPINFER_ISA
