// sample: a block or a cluster draws from one row. spec_verify: the same for every position of a drafted block, as if
// it were the last one; spec_accept puts them together.
#pragma once

#include "distribution.cuh"
#include "sampling_config.h"

namespace deepinfer {

template <SamplingConfig c>
DEVICE void sample(const SampleArgs& args) {
  using T = Element<c.x>;
  extern __shared__ uint64_t shared[];
  __shared__ SamplingShared<c.threads> state;
  const SamplingMemory memory(shared, c);
  const int64_t row = blockIdx.x / c.cluster;
  const T* x = static_cast<const T*>(args.from.logits) + row_offset<c.strided>(args.from.rows, row);
  wait_for_previous_kernel();
  const Filter filter(args.from, row);
  const Vectors<T> vectors(x, args.from.size);
  Distribution found;
  if (!find_distribution<c>(vectors, filter, memory, found, state)) return;
  int64_t id = found.only;
  if (id < 0) {
    const Philox random(uint64_t(args.seeds[row]), args.offsets ? uint64_t(args.offsets[row]) : 0, 0);
    id = pick<c.threads>(vectors, found, Kept{found}, portion(random.first(), found.total), memory.entries,
                         memory.sums, state.sums);
  }
  if (threadIdx.x != 0) return;
  args.ids[row] = id;
  if (!args.log_probs) return;
  if (found.only < 0) args.log_probs[row] = float(log(double(found.weight(to_float(x[id]))) / double(found.total)));
  else args.log_probs[row] = found.greatest != found.greatest ? found.greatest : 0.f;
}

// What the draft model gave to an element, in the units of the target's weights.
struct DraftWeight {
  const float* probs;  // null: all to `id`
  int64_t id;
  double total;

  DEVICE uint64_t operator()(int64_t i) const {
    if (!probs) return i == id ? uint64_t(total) : 0;
    const float p = probs[i];
    return p > 0.f ? uint64_t(double(p < 1.f ? p : 1.f) * total) : 0;
  }
};

// What the target gives more than the draft.
struct Residual {
  const Distribution& target;
  const DraftWeight& draft;
  DEVICE uint64_t operator()(int64_t index, float x) const {
    const uint64_t weight = Kept{target}(index, x);
    if (weight == 0) return 0;
    const uint64_t given = draft(index);
    return weight > given ? weight - given : 0;
  }
};

template <SamplingConfig c>
DEVICE void spec_verify(const SpecVerifyArgs& args) {
  using T = Element<c.x>;
  extern __shared__ uint64_t shared[];
  __shared__ SamplingShared<c.threads> state;
  const SamplingMemory memory(shared, c);
  const int64_t job = blockIdx.x / c.cluster, positions = args.drafted + 1;
  const int64_t row = job / positions, position = job % positions, size = args.target.size;
  const T* x = static_cast<const T*>(args.target.logits) + row_offset<c.strided>(args.target.rows, job);
  wait_for_previous_kernel();
  int64_t drafted = args.num_drafted ? args.num_drafted[row] : args.drafted;
  drafted = drafted < 0 ? 0 : drafted < args.drafted ? drafted : args.drafted;
  if (position > drafted) return;
  const Filter filter(args.target, job);
  const Vectors<T> vectors(x, size);
  Distribution target;
  if (!find_distribution<c>(vectors, filter, memory, target, state)) return;
  uint64_t* chunk_sums = memory.sums;
  const Philox random(uint64_t(args.seeds[row]), args.offsets ? uint64_t(args.offsets[row]) : 0,
                      uint32_t(1 + position));
  const int64_t draft_id = position < drafted ? args.draft_ids[row * args.drafted + position] : -1;
  int64_t choice = target.only;
  bool accepted = false;
  if (target.only >= 0) {
    accepted = draft_id == target.only;
  } else {
    const float* probs =
        args.draft_probs && position < drafted ? args.draft_probs + (row * args.drafted + position) * size : nullptr;
    const DraftWeight draft{probs, draft_id, double(target.total)};
    if (draft_id >= 0 && draft_id < size && !(probs && probs[draft_id] != probs[draft_id]))
      accepted = portion(random.second(), draft(draft_id)) < Kept{target}(draft_id, to_float(x[draft_id]));
    if (accepted) {
      choice = draft_id;
    } else {
      const Residual residual{target, draft};
      uint64_t left = 0;
      if (position < drafted)
        left = target.listed >= 0 ? sum_list<c.threads>(memory.entries, target.listed, residual, state.sums)
                                  : sum_row<c.threads>(vectors, residual, chunk_sums, state.sums);
      if (position < drafted && double(left) > 1e-8 * double(target.total)) {
        choice = pick<c.threads>(vectors, target, residual, portion(random.first(), left), memory.entries, chunk_sums,
                                 state.sums);
      } else {
        if (target.listed < 0) sum_row<c.threads>(vectors, Kept{target}, chunk_sums, state.sums);
        choice = pick<c.threads>(vectors, target, Kept{target}, portion(random.first(), target.total), memory.entries,
                                 chunk_sums, state.sums);
      }
    }
  }
  if (threadIdx.x != 0) return;
  args.choices[job] = choice;
  args.verdicts[job] = accepted;
}

// A thread for each row of the batch.
template <SpecAcceptConfig c>
DEVICE void spec_accept(const SpecVerifyArgs& args) {
  const int64_t positions = args.drafted + 1, batch = args.target.rows.count / positions;
  const int64_t row = int64_t(blockIdx.x) * c.threads + threadIdx.x;
  wait_for_previous_kernel();
  if (row >= batch) return;
  int64_t drafted = args.num_drafted ? args.num_drafted[row] : args.drafted;
  drafted = drafted < 0 ? 0 : drafted < args.drafted ? drafted : args.drafted;
  int64_t accepted = 0;
  while (accepted < drafted && args.verdicts[row * positions + accepted]) ++accepted;
  for (int64_t i = 0; i < positions; ++i)
    args.ids[row * positions + i] = i <= accepted ? args.choices[row * positions + i] : -1;
  args.accepted[row] = int32_t(accepted);
}

}  // namespace deepinfer
