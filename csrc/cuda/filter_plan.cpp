#include "filter_plan.h"

#include <algorithm>
#include <bit>

namespace deepinfer::cuda {

namespace {

constexpr int kStageBytes = 64;  // of a thread

// Few rows: a cluster each, as long as every block has some stages of work and the first one room for the lists of all.
int blocks_of_row(int64_t rows, int64_t row_bytes, int64_t k, int64_t ring_bytes, int multiprocessors) {
  constexpr int kMostBlocks = 16;
  constexpr int64_t kLeastShare = 65536;
  if (row_bytes <= 2 * kLeastShare) return 1;  // a cluster takes longer to start
  int cluster = 1;
  while (cluster < kMostBlocks && rows * cluster * 2 <= multiprocessors && row_bytes >= cluster * kLeastShare &&
         cluster * 2 * k * 8 <= ring_bytes)
    cluster *= 2;
  return cluster;
}

// Many rows: blocks of which four fit on a processor, so that some read while others select. If no more than two are
// there for each, deeper rings; and for the longest rows longer lists, which are cut less often.
FilterPlan plan_row(int64_t rows, int64_t row_bytes, int64_t k, int multiprocessors, int capability) {
  constexpr int kRoom = 1024, kLeastList = 2048, kLongList = 3072;
  constexpr int64_t kLongRow = 131072, kLongestRow = int64_t(1) << 21;
  FilterPlan plan{};
  plan.bulk = capability >= 90;
  plan.most = std::max(256, int(std::bit_ceil(uint64_t(k))));
  plan.threads = 512;
  plan.stages = 4;
  plan.cluster = 1;
  plan.capacity = std::max(kLeastList, plan.most + plan.most / 8 + kRoom);
  const int waves = int(std::min<int64_t>(rows / std::max(multiprocessors, 1), 64));  // of one block on each processor
  if (rows <= multiprocessors || k > 1024) {
    if (capability >= 90)
      plan.cluster =
          blocks_of_row(rows, row_bytes, k, int64_t(plan.threads) * kStageBytes * plan.stages, multiprocessors);
    return plan;
  }
  const bool few = waves < 2 && row_bytes >= kLongRow;
  if (few && k > 512) {
    plan.stages = 2;
    return plan;
  }
  plan.threads = 256;
  const bool deep = few || (waves < 8 && row_bytes >= kLongestRow);
  plan.stages = deep ? 4 : 2;
  if (deep) plan.capacity = std::max(plan.capacity, kLongList);
  return plan;
}

}  // namespace

FilterPlan plan_filter(int64_t rows, int64_t row_bytes, int64_t k, const jit::DeviceFacts& facts) {
  constexpr int kStaticBytes = 8192;
  FilterPlan plan = plan_row(rows, row_bytes, k, facts.multiprocessors, facts.capability);
  while (plan.stages > 1 &&
         filter_bytes(plan.threads, plan.stages, plan.capacity) + kStaticBytes > facts.shared_bytes_per_block)
    --plan.stages;
  while (plan.cluster > 1 && plan.cluster * k * 8 > int64_t(plan.threads) * kStageBytes * plan.stages)
    plan.cluster /= 2;
  return plan;
}

jit::DeviceFacts typical_device() {
  jit::DeviceFacts facts;
  facts.capability = 90;
  facts.multiprocessors = 132;
  facts.shared_bytes_per_block = 232448;
  return facts;
}

int filter_bytes(int threads, int stages, int capacity) { return threads * kStageBytes * stages + capacity * 8; }

}  // namespace deepinfer::cuda
