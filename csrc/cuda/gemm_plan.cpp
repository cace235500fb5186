#include "gemm_plan.h"

#include <algorithm>
#include <limits>

#include "launch.h"

namespace deepinfer::cuda {

namespace {

constexpr int kSharedBytes = 227 * 1024, kReservedBytes = 1024;  // of a processor; that the system takes of each block
constexpr int kTableBytes = 4096, kBarrierBytes = 512, kMostStages = 16;
constexpr int kAlignment = 2 * 1024;  // of the ring, and of what is staged behind it

// As in gemm.cuh.
int stage_bytes(const GemmTiling& t, const GemmResult& result) {
  return (t.tile_n + t.tile_m) * 128 + (result.scaled ? (t.tile_m * 4 + 16 + 127) / 128 * 128 : 0);
}

int staging_bytes(const GemmTiling& t, const GemmResult& result, bool grouped) {
  const int buffers = result.bulk && !grouped ? 4 : 2;
  return t.split ? 0 : t.warpgroups * buffers * std::min(t.tile_m, 32) * 64 * result.staged_bytes;
}

}  // namespace

int gemm_shared_bytes(const GemmTiling& t, const GemmResult& result, bool grouped) {
  return kAlignment + t.stages * stage_bytes(t, result) + staging_bytes(t, result, grouped);
}

int gemm_stages(const GemmTiling& t, const GemmResult& result, bool grouped) {
  const int fixed = kAlignment + kBarrierBytes + (grouped ? kTableBytes : 0) + staging_bytes(t, result, grouped);
  const int room = t.blocks > 1 ? (kSharedBytes + kReservedBytes) / t.blocks - kReservedBytes : kSharedBytes;
  return std::min((room - fixed) / stage_bytes(t, result), kMostStages);
}

GemmShares share_out(const GemmTiling& t, int64_t rows, int64_t columns, int64_t stages, int multiprocessors) {
  GemmShares shares{};
  const int64_t tiles = ceil_div(rows, t.tile_m) * ceil_div(columns, t.tile_n * t.cluster);
  shares.clusters = multiprocessors / t.cluster;
  shares.left = int(tiles % shares.clusters);
  shares.whole = int(tiles) - shares.left;
  const int64_t total = shares.left * stages;
  shares.share = int(total / shares.clusters);
  shares.longer = int(total % shares.clusters);
  shares.partial_bytes = int64_t(2) * shares.clusters * t.cluster * t.tile_n * t.tile_m * 4;
  return shares;
}

namespace {

// The most clusters that run at once: processors come in groups, of which some are left over.
int64_t most_clusters(int cluster, int multiprocessors) {
  return cluster <= 2 ? multiprocessors / cluster : multiprocessors / cluster * 10 / 11;
}

int64_t stages_of(const GemmShapeFacts& f) { return ceil_div(f.depth, f.result.scaled ? 128 : 64); }

// Up to 128 rows: reading the weight is the bound. One tile of rows, and as many blocks as there is room for.
GemmTiling few_rows(const GemmShapeFacts& f, int multiprocessors) {
  GemmTiling t{.tile_n = 64, .tile_m = f.x_dense_k ? 16 : 64, .warpgroups = 1, .stages = 0, .cluster = 1, .split = 0,
               .streamed = 0, .blocks = 1};
  while (t.tile_m < f.rows) t.tile_m *= 2;
  int64_t tiles = ceil_div(f.columns, t.tile_n);
  const int64_t wide_tiles = ceil_div(f.columns, 128), fours = most_clusters(4, multiprocessors);
  if (t.tile_m == 128 && (tiles > 4 * multiprocessors || (tiles > fours && wide_tiles <= fours))) {
    t.tile_n = 128;
    t.warpgroups = 2;
    tiles = wide_tiles;
  }
  for (int cluster : {8, 4, 2})
    if (tiles <= most_clusters(cluster, multiprocessors) && stages_of(f) >= cluster * 8) {
      t.cluster = cluster;
      t.split = 1;
      break;
    }
  // A second block fills the gaps of the first, where each has little to do.
  if (t.tile_m <= 64 && tiles > (t.tile_m == 16 ? 1 : 3) * multiprocessors) t.blocks = 2;
  return t;
}

// Cycles of the processor that has most to do. A stage takes as long as its products or its loads, a tile some time to
// begin and to be written, a shared or streamed one the exchange of the sums.
double cycles(const GemmTiling& t, const GemmShapeFacts& f, int multiprocessors) {
  constexpr double kLoadBytes = 52, kScratchBytes = 3000;  // a cycle: of one processor, and of all
  const double area = double(t.tile_n) * t.tile_m, stages = double(stages_of(f));
  const int sharing = t.split ? 1 : t.cluster;
  const double stage = 20 + std::max(area / 32, (t.tile_n + double(t.tile_m) / sharing) * 128 / kLoadBytes);
  const double tile = 700 + area * 0.05;
  const int64_t tiles = ceil_div(f.rows, t.tile_m) * ceil_div(f.columns, t.tile_n * sharing);
  const int64_t clusters = most_clusters(t.cluster, multiprocessors);
  if (t.split) return double(ceil_div(tiles, clusters)) * (stages / t.cluster * stage + 1000 + area * 0.3);
  if (!t.streamed) return double(ceil_div(tiles, clusters)) * (stages * stage + tile);
  const int64_t left = tiles % clusters;
  if (left == 0 || left > clusters * 3 / 5) return std::numeric_limits<double>::infinity();
  return double(tiles / clusters) * (stages * stage + tile) + double(left) * stages / double(clusters) * stage + 12000 +
         double(clusters + left) * t.cluster * area * 8 / kScratchBytes;
}

GemmTiling many_rows(const GemmShapeFacts& f, int multiprocessors) {
  // tile_n, tile_m, warpgroups, stages, cluster, split, streamed, blocks
  static constexpr GemmTiling kTilings[] = {
      {128, 256, 2, 0, 2, 0, 0, 1}, {128, 256, 2, 0, 1, 0, 0, 1}, {128, 192, 2, 0, 1, 0, 0, 1},
      {128, 224, 2, 0, 1, 0, 0, 1}, {128, 128, 2, 0, 2, 0, 0, 1}, {128, 128, 2, 0, 1, 0, 0, 1},
      {64, 256, 1, 0, 1, 0, 0, 1},  {128, 128, 2, 0, 4, 1, 0, 1}, {64, 256, 1, 0, 2, 1, 0, 1},
      {64, 128, 1, 0, 4, 1, 0, 1},  {64, 128, 1, 0, 2, 1, 0, 1},  {128, 256, 2, 0, 2, 0, 1, 1},
      {128, 256, 2, 0, 1, 0, 1, 1}, {64, 256, 1, 0, 1, 0, 1, 1},  {64, 128, 1, 0, 1, 0, 1, 1},
  };
  const int most_tokens = f.result.scaled ? 128 : 256;  // the products of e4m3 need registers beside the sums
  const GemmTiling* best = nullptr;
  for (const GemmTiling& t : kTilings) {
    if (t.cluster == 2 && !t.split && f.rows < 1024) continue;  // too few tiles share their tokens
    if (t.tile_m > most_tokens || (!f.x_dense_k && t.tile_m / (t.split ? 1 : t.cluster) % 64 != 0)) continue;
    if (!best || cycles(t, f, multiprocessors) < cycles(*best, f, multiprocessors)) best = &t;
  }
  return *best;
}

// Experts have a few rows more or less than their share; a tile that is not full costs less.
GemmTiling grouped_rows(const GemmShapeFacts& f) {
  const int64_t rows = ceil_div(f.rows, f.experts);
  if (rows <= 8 && f.x_dense_k) return {64, 16, 1, 0, 1, 0, 0, 2};
  if (rows <= 24 && f.x_dense_k) return {64, 32, 1, 0, 1, 0, 0, 2};
  if (rows <= 64 || f.result.scaled) return {128, rows <= 64 ? 64 : 128, 2, 0, rows > 512 ? 2 : 1, 0, 0, 1};
  if (rows <= 96) return {128, 128, 2, 0, 1, 0, 0, 1};
  if (rows <= 144 && f.x_dense_k) return {128, 160, 2, 0, 1, 0, 0, 1};
  return {128, 256, 2, 0, 2, 0, 0, 1};
}

}  // namespace

GemmTiling choose_tiling(const GemmShapeFacts& f, int multiprocessors) {
  GemmTiling t = f.experts > 0      ? grouped_rows(f)
                 : f.rows <= 128 ? few_rows(f, multiprocessors)
                                 : many_rows(f, multiprocessors);
  t.stages = gemm_stages(t, f.result, f.experts > 0);
  return t;
}

}  // namespace deepinfer::cuda
