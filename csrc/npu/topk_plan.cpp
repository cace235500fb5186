#include "topk_plan.h"

#include <algorithm>

#include "tiling.h"

namespace deepinfer::npu {

namespace {

constexpr int64_t kUnit = TopkTiling::kUnit;

// What the buffers of topk_kernel.h take.
int64_t bytes_on_core(const TopkArgs& args, int64_t window, int64_t chunk, int64_t room) {
  const int64_t item = size_of(args.dtype), index = args.wide_index ? 8 : 4;
  constexpr int64_t kKeys = 4, kPlaces = 4, kIndices = 2 * 4, kPairs = 2 * 8, kMasks = 3;
  const int64_t list = room * (kKeys + kPlaces + kIndices + 2 * item) + kMasks * room / 8;
  const int64_t staged = args.wide_index || args.page_table ? std::max(window, chunk) * index : 0;
  const int64_t sorted = args.order == TopkOrder::by_value ? window * kPairs : 0;
  return list + 2 * chunk * item + staged + sorted + kRounding;
}

}  // namespace

TopkTiling tile_topk(const TopkArgs& args, const Chip& chip) {
  constexpr int64_t kLongestWindow = 4096, kLeastChunk = 512, kLongestChunk = 4096, kMostChunks = 4;
  const int64_t item = size_of(args.dtype), rows = args.x_rows.count;
  TopkTiling tiling{};
  tiling.rows = args.x_rows;
  tiling.row_size = args.row_size;
  tiling.k = args.k;
  tiling.pages = args.pages;
  tiling.page_size = args.page_size;
  tiling.fill_index = args.fill_index;
  tiling.fill_value = args.fill_value;
  tiling.x_bytes = bytes_of(args.x_rows, args.row_size, item);
  tiling.values_bytes = args.values ? rows * args.k * item : 0;
  tiling.indices_bytes = rows * args.k * (args.wide_index ? 8 : 4);
  tiling.row_bytes = rows * 4;
  tiling.lengths = args.lengths != nullptr;
  tiling.offsets = args.offsets != nullptr;
  tiling.table_bytes = args.page_table ? rows * args.pages * 4 : 0;

  const auto fits = [&](int64_t window, int64_t chunk, int64_t room) {
    return bytes_on_core(args, window, chunk, room) <= chip.buffer_bytes;
  };
  const int64_t wanted = std::max(kUnit, round_up(std::min(args.k, args.row_size), kUnit));
  int64_t window = std::min(wanted, kLongestWindow);
  while (!fits(window, kLeastChunk, window + kLeastChunk)) window -= kUnit;
  const int64_t whole = std::max(kUnit, round_up(args.row_size, kUnit));
  int64_t chunk = std::min({kLeastChunk, whole});
  while (2 * chunk <= kLongestChunk && chunk < whole && fits(window, 2 * chunk, window + 2 * chunk)) chunk *= 2;
  int64_t room = window + chunk;
  while (room < window + kMostChunks * chunk && fits(window, chunk, room + kUnit)) room += kUnit;
  tiling.window = int32_t(window);
  tiling.chunk = int32_t(chunk);
  tiling.room = int32_t(room);
  return tiling;
}

int64_t blocks_of(const TopkTiling& tiling, const Chip& chip) {
  return std::min<int64_t>(chip.cores, tiling.rows.count);
}

}  // namespace deepinfer::npu
