#include "gemm_plan.h"

#include <algorithm>
#include <limits>

#include "launch.h"

namespace deepinfer::cuda {

namespace {

constexpr int kSharedBytes = 227 * 1024, kReservedBytes = 1024;  // of a processor; that the system takes of each block
constexpr int kTableBytes = 4096, kBarrierBytes = 512, kMostStages = 16, kLeastStages = 3;
constexpr int kAlignment = 2 * 1024;  // of the ring, and of what is staged behind it

// As in gemm.cuh.
int stage_bytes(const GemmTiling& t, const GemmResult& result) {
  return (t.tile_n + t.tile_m) * 128 + (result.scaled ? (t.tile_m * 4 + 16 + 127) / 128 * 128 : 0);
}

int staging_bytes(const GemmTiling& t, const GemmResult& result, bool grouped) {
  const int buffers = !result.bulk ? 2 : t.tokens_as_rows ? 3 : grouped ? 2 : 4;
  return t.split ? 0 : t.warpgroups * buffers * gemm_chunk(t) * 64 * result.staged_bytes;
}

}  // namespace

int gemm_chunk(const GemmTiling& t) { return t.tokens_as_rows ? 64 : std::min(t.tile_m, 32); }

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

// A scale for 128 columns of the weight, not for each.
bool has_block_scales(const GemmShapeFacts& f) { return f.result.scaled && !f.result.column_scales; }

int64_t stages_of(const GemmShapeFacts& f) { return ceil_div(f.depth, f.result.scaled ? 128 : 64); }

// Up to 128 rows: reading the weight is the bound. One tile of rows, and as many blocks as there is room for.
GemmTiling few_rows(const GemmShapeFacts& f, int multiprocessors) {
  GemmTiling t{.tile_n = 64, .tile_m = f.x_dense_k ? 16 : 64, .warpgroups = 1, .stages = 0, .cluster = 1, .split = 0,
               .streamed = 0, .blocks = 1};
  while (t.tile_m < f.rows) t.tile_m *= 2;
  if (has_block_scales(f) && t.tile_m >= 64) {
    t.tokens_as_rows = 1;
    t.warpgroups = t.tile_m / 64;
  }
  int64_t tiles = ceil_div(f.columns, t.tile_n);
  const int64_t wide_tiles = ceil_div(f.columns, 128), fours = most_clusters(4, multiprocessors);
  const int64_t many = (t.tokens_as_rows ? 3 : 4) * multiprocessors;
  if (t.tile_m == 128 && (tiles > many || (tiles > fours && wide_tiles <= fours))) {
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

// Cycles of the processor that has most to do. A stage takes as long as its products, its loads, or what both do to
// shared memory; a tile some time to begin and to be written, a shared or streamed one the exchange of the sums. The
// constants are fitted to measurements.
double cycles(const GemmTiling& t, const GemmShapeFacts& f, int multiprocessors) {
  constexpr double kLoadBytes = 40, kSharedBytes = 118, kScratchBytes = 3000;  // a cycle: of one processor, and of all
  constexpr double kUnpaired = 1.2;  // products of e4m3 that wait until those before are added up
  const double area = double(t.tile_n) * t.tile_m, stages = double(stages_of(f));
  const int sharing = t.split ? 1 : t.cluster;
  const int tall = t.tokens_as_rows ? t.tile_m : t.tile_n, across = t.tokens_as_rows ? t.tile_n : t.tile_m;
  const double written = 128.0 * (t.tile_n + t.tile_m), read = 2.0 * tall * (64 + across);
  // e4m3 was never seen to wait for its loads.
  const double loaded = f.result.scaled ? 0 : (t.tile_n + double(t.tile_m) / sharing) * 128;
  const double stage = std::max({area / 32, (written + read) / kSharedBytes, loaded / kLoadBytes}) *
                       (f.result.scaled && across > 128 ? kUnpaired : 1);
  const double tile = t.in_turn ? 0 : 1200 + area * 0.15;
  const int64_t tiles = ceil_div(f.rows, t.tile_m) * ceil_div(f.columns, t.tile_n * sharing);
  const int64_t clusters = most_clusters(t.cluster, multiprocessors);
  if (t.split) return double(ceil_div(tiles, clusters)) * (stages / t.cluster * stage + 1000 + area * 0.1);
  if (!t.streamed) return double(ceil_div(tiles, clusters)) * (stages * stage + tile);
  const int64_t left = tiles % clusters;
  return double(tiles / clusters) * (stages * stage + tile) + double(left) * stages / double(clusters) * stage + 12000 +
         double(clusters + left) * t.cluster * area * 8 / kScratchBytes;
}

// The fastest of the tilings that it is offered.
class Choice {
 public:
  Choice(const GemmShapeFacts& facts, int multiprocessors) : facts_(facts), multiprocessors_(multiprocessors) {}

  void offer(const GemmTiling& t) {
    const double needed = suits(t) ? cycles(t, facts_, multiprocessors_) : std::numeric_limits<double>::infinity();
    if (needed < least_) {
      least_ = needed;
      best_ = t;
    }
  }
  const GemmTiling& best() const { return best_; }

 private:
  bool suits(const GemmTiling& t) const {
    const GemmShapeFacts& f = facts_;
    const int sharing = t.split ? 1 : t.cluster;
    // Too few tiles share their tokens, or follow each other in a block.
    if ((sharing > 1 || t.in_turn || t.warpgroups == 3) && f.rows < 1024) return false;
    if (!f.x_dense_k && t.tile_m / sharing % 64 != 0) return false;
    if (!f.weight_dense_k && t.tile_n % 64 != 0) return false;
    if (gemm_stages(t, f.result, false) < kLeastStages) return false;
    if (t.streamed) {  // worth it after several turns, if what is left would leave many processors idle
      const int64_t tiles = ceil_div(f.rows, t.tile_m) * ceil_div(f.columns, t.tile_n * t.cluster);
      const int64_t clusters = most_clusters(t.cluster, multiprocessors_), left = tiles % clusters;
      if (tiles < 4 * clusters || left == 0 || left > clusters * 3 / 5) return false;
    }
    if (!f.result.scaled) return true;
    // The products of e4m3 need registers beside the sums.
    if (has_block_scales(f))
      return t.tokens_as_rows && t.tile_n <= 192 && t.warpgroups == 2 && sharing == 1 && !t.in_turn;
    return !t.tokens_as_rows && t.tile_m <= 128 && !t.in_turn;
  }

  const GemmShapeFacts& facts_;
  int multiprocessors_;
  double least_ = std::numeric_limits<double>::infinity();
  GemmTiling best_{};
};

GemmTiling many_rows(const GemmShapeFacts& f, int multiprocessors) {
  // tile_n, tile_m, warpgroups, stages, cluster, split, streamed, blocks, tokens_as_rows, in_turn
  static constexpr GemmTiling kTilings[] = {
      {128, 256, 2, 0, 2, 0, 0, 1},       {128, 256, 2, 0, 1, 0, 0, 1},       {128, 192, 2, 0, 1, 0, 0, 1},
      {128, 128, 2, 0, 2, 0, 0, 1},       {128, 128, 2, 0, 1, 0, 0, 1},       {64, 256, 1, 0, 1, 0, 0, 1},
      {64, 128, 1, 0, 1, 0, 0, 1},        {128, 128, 2, 0, 4, 1, 0, 1},       {128, 128, 2, 0, 2, 1, 0, 1},
      {64, 128, 1, 0, 4, 1, 0, 1},        {64, 128, 1, 0, 2, 1, 0, 1},        {128, 256, 2, 0, 2, 0, 1, 1},
      {128, 256, 2, 0, 1, 0, 1, 1},       {64, 256, 1, 0, 1, 0, 1, 1},        {128, 128, 2, 0, 1, 0, 0, 1, 0, 1},
      {128, 192, 2, 0, 2, 0, 0, 1, 0, 1}, {192, 128, 2, 0, 2, 0, 0, 1, 1, 1}, {192, 192, 3, 0, 1, 0, 0, 1, 1},
      {192, 192, 3, 0, 2, 1, 0, 1, 1},    {128, 128, 2, 0, 4, 1, 0, 1, 1},    {128, 128, 2, 0, 2, 1, 0, 1, 1},
  };
  Choice choice(f, multiprocessors);
  for (const GemmTiling& t : kTilings) choice.offer(t);
  // Columns cut to any multiple of 16, so that the last turn of the processors is nearly full.
  for (int cluster : {1, 2})
    for (int tile_n = 64; tile_n <= 256; tile_n += 16) choice.offer({tile_n, 128, 2, 0, cluster, 0, 0, 1, 1});
  return choice.best();
}

// Experts have a few rows more or less than their share; a tile that is not full costs less.
GemmTiling grouped_rows(const GemmShapeFacts& f) {
  const int64_t rows = ceil_div(f.rows, f.experts);
  if (rows <= 8 && f.x_dense_k) return {64, 16, 1, 0, 1, 0, 0, 2};
  if (rows <= 24 && f.x_dense_k) return {64, 32, 1, 0, 1, 0, 0, 2};
  if (rows <= 64) return {128, 64, 2, 0, 1, 0, 0, 1};
  if (has_block_scales(f)) return {128, 128, 2, 0, rows > 256 ? 2 : 1, 0, 0, 1, 1};
  if (f.result.scaled) return {128, 128, 2, 0, rows > 512 ? 2 : 1, 0, 0, 1};
  // Long sums make up for the time to write a tile that is larger.
  if (f.x_dense_k && f.result.bulk && (rows < 256 || f.depth < 8192)) return {128, 192, 2, 0, 2, 0, 0, 1, 0, 1};
  return {128, 256, 2, 0, 2, 0, 0, 1};
}

// The results of all experts are of one size, and large where that matters.
GemmTiling whole_depth(const GemmShapeFacts& f) {
  if (f.rows <= 512 || f.columns <= 512) return {128, 128, 2, 0, 1, 0, 0, 1};
  return {128, 256, 2, 0, 2, 0, 0, 1};
}

}  // namespace

GemmTiling choose_tiling(const GemmShapeFacts& f, int multiprocessors) {
  GemmTiling t = f.groups == RowGroups::depth  ? whole_depth(f)
                 : f.groups != RowGroups::none ? grouped_rows(f)
                 : f.rows <= 128               ? few_rows(f, multiprocessors)
                                               : many_rows(f, multiprocessors);
  if (f.groups == RowGroups::batch) t.cluster = 1;
  t.stages = gemm_stages(t, f.result, f.groups == RowGroups::ends || f.groups == RowGroups::counts);
  return t;
}

}  // namespace deepinfer::cuda
