// Matrix products on Hopper, dense and grouped by expert.
//
// Blocks stay and take one tile of the result after the other. One thread drives the copy engine: it fills a ring of
// stages, each 128 bytes of k of the weight's rows and of the tokens, and runs ahead across tiles. One or two
// warpgroups multiply, with one stage's products in flight while the next are issued, and write their tile while the
// ring fills again. Clusters of two load the tokens once for both blocks. With many tokens the matrix unit is the
// bound, or the power that it draws.
//
// With few tokens reading the weight is the bound. Narrow tiles leave room for a deep ring, and where there are too few
// tiles the blocks of a cluster share out the k of one tile and add up their sums, always in the same order, through
// each other's shared memory.
#pragma once

#include "gemm_hand_out.cuh"
#include "gemm_multiply.cuh"
#include "gemm_parts.cuh"

namespace deepinfer {

// What this block works on, in this order: all of k of its tiles, a part of k where the blocks of a cluster share a
// tile, or, after whole tiles, an equal share of the stages of the tiles that are left, which may belong to two of
// them. The tiles follow each other at equal distances, or are handed out.
template <GemmConfig c>
class GemmWork {
 public:
  GemmTile tile;
  int begin, end;  // stages of k
  int part = 0;    // the number of this part among the block's

  DEVICE GemmWork(const GemmKernelArgs& args, const GemmTiles<c>& tiles, uint32_t rank, bool loads,
                  TileQueue<c> queue)
      : tiles_(tiles), queue_(queue), rank_(rank), loads_(loads),
        stages_(int((args.problem.depth + GemmShape<c>::depth - 1) / GemmShape<c>::depth)),
        next_(tiles.first()), count_(c.streamed ? args.whole : tiles.count) {
    begin = c.split ? int(rank * stages_ / c.cluster) : 0;
    end = c.split ? int((rank + 1) * stages_ / c.cluster) : stages_;
    if constexpr (c.streamed) {
      left_ = share_begin(args, tiles.first());
      left_end_ = share_begin(args, tiles.first() + 1);
    }
  }

  // The next tile of which the block does all that it does of any.
  DEVICE bool next() {
    if constexpr (c.handed_out) {
      tile = queue_.hear(loads_, rank_);
      return tile.expert >= 0;
    }
    if (next_ >= count_) return false;
    place(next_);
    next_ += tiles_.step();
    return true;
  }

  // Then the next part of a tile that is left.
  DEVICE bool next_part() {
    if (!c.streamed || left_ >= left_end_) return false;
    place(count_ + left_ / stages_);
    begin = left_ % stages_;
    end = stages_ - begin < left_end_ - left_ ? stages_ : begin + left_end_ - left_;
    left_ += end - begin;
    part = parts_++;
    return true;
  }

 private:
  DEVICE void place(int i) {
    tile = tiles_.at(i, rank_);
    if constexpr (c.groups == RowGroups::depth)  // the stages are those of the tile
      end = (tile.k_end - tile.k + GemmShape<c>::depth - 1) / GemmShape<c>::depth;
  }

  const GemmTiles<c>& tiles_;
  TileQueue<c> queue_;
  uint32_t rank_;
  bool loads_;
  int stages_, next_, count_;
  int left_ = 0, left_end_ = 0, parts_ = 0;
};

template <GemmConfig c>
DEVICE int token_boxes(const GemmTile& tile) {
  using Shape = GemmShape<c>;
  return Shape::ragged ? (tile.rows<c.tile_m>() + Shape::box - 1) / Shape::box : c.tile_m / Shape::box;
}

// The weight of a stage, and what the stage is going to hold in all.
template <GemmConfig c>
DEVICE void load_weight(const GemmKernelArgs& args, const GemmRing<c>& ring, int stage, const GemmTile& tile, int k,
                        uint64_t policy) {
  using Shape = GemmShape<c>;
  uint64_t* full = &ring.full[stage];
  expect_bytes(full, Shape::weight_bytes + token_boxes<c>(tile) * (Shape::box * 128) + Shape::scales * 4);
  const bool shared = c.shared && tile.expert == int(args.problem.experts);
  const TensorMap& weight = shared ? args.shared_weight : args.weight;
  const int expert = c.groups == RowGroups::depth || shared ? 0 : tile.expert;
  if constexpr (c.gates == GatePairs::eight_apart) {
    tensor_load(ring.weight(stage), weight, k, 0, 0, tile.n / 16, expert, full, policy);
  } else if constexpr (c.weight_dense_k) {
    tensor_load(ring.weight(stage), weight, k, tile.n, expert, full, policy);
  } else {
#pragma unroll 1
    for (int i = 0; i < c.tile_n / 64; ++i)
      tensor_load(ring.weight(stage) + i * Shape::block_bytes, args.weight, tile.n + i * 64, k, expert, full, policy);
  }
}

// The tokens of a stage. The blocks that need the same ones load them in turn, each for all.
template <GemmConfig c>
DEVICE void load_tokens(const GemmKernelArgs& args, const GemmRing<c>& ring, int stage, const GemmTile& tile, int k,
                        uint32_t rank) {
  using Shape = GemmShape<c>;
  uint64_t* full = &ring.full[stage];
  if constexpr (Shape::scaled) {
    const int block = args.problem.x_scale_depth_stride != 0 ? k / Shape::depth : 0;
    tensor_load(ring.scales(stage), args.x_scale, tile.m / 4 * 4, block, full);
  }
  const int boxes = token_boxes<c>(tile);
  const bool elsewhere = c.shared && args.problem.shared_x && tile.expert == int(args.problem.experts);
  const TensorMap& x = elsewhere ? args.shared_x : args.x;
  const int first = tile.m - (elsewhere ? int(args.problem.rows) : 0);
#pragma unroll 1
  for (int i = Shape::sharing > 1 ? int(rank) : 0; i < boxes; i += Shape::sharing) {
    char* to = ring.x(stage) + i * (Shape::box * 128);
    const int m = first + i * Shape::box, inner = c.x_dense_k ? k : m, outer = c.x_dense_k ? m : k;
    if constexpr (c.groups == RowGroups::batch) tensor_load(to, x, inner, outer, tile.expert, full);
    else if constexpr (Shape::sharing > 1) tensor_load_to((1 << c.cluster) - 1, to, x, inner, outer, full);
    else tensor_load(to, x, inner, outer, full);
  }
}

// By the thread that loads. Where tiles are handed out, the weight of the first one is on its way before the tokens are
// there.
template <GemmConfig c>
DEVICE void load_tiles(const GemmKernelArgs& args, const GemmRing<c>& ring, const GemmTiles<c>& tiles, uint32_t rank,
                       TileQueue<c> queue) {
  constexpr int depth = GemmShape<c>::depth;
  const uint64_t policy = cache_policy(args.weight_read_once);
  RingPlace<c.stages> place;
  bool waits = c.handed_out && args.problem.settled;
  for (GemmWork<c> work(args, tiles, rank, true, queue); work.next() || work.next_part();) {
    const GemmTile& tile = work.tile;
    const int early = !waits ? 0 : work.end - work.begin < c.stages ? work.end - work.begin : c.stages;
    for (int i = 0; i < early; ++i) load_weight<c>(args, ring, i, tile, tile.k + (work.begin + i) * depth, policy);
    if (waits && !args.problem.awaited) wait_for_previous_kernel();
    waits = false;
    if constexpr (c.handed_out)
      if (args.problem.awaited) tiles.await_rows(tile.expert);
    for (int step = work.begin; step < work.end; ++step, place.advance()) {
      const int k = tile.k + step * depth;
      if (step - work.begin >= early) {
        wait_barrier(&ring.empty[place.stage], place.parity ^ 1);
        load_weight<c>(args, ring, place.stage, tile, k, policy);
      }
      load_tokens<c>(args, ring, place.stage, tile, k, rank);
    }
  }
  if (waits) wait_for_previous_kernel();
}

template <GemmConfig c>
DEVICE void gemm(const GemmKernelArgs& args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)  // no other chip has these instructions, and none is asked to run this
  using Shape = GemmShape<c>;
  extern __shared__ char dynamic_shared[];
  __shared__ uint64_t full[c.stages], empty[c.stages];
  __shared__ typename TileQueue<c>::Shared queued;
  const MatmulArgs& problem = args.problem;
  char* shared = dynamic_shared + (0u - shared_address(dynamic_shared)) % 1024;
  char* staging = shared + c.stages * (Shape::stage_bytes + Shape::scale_bytes);
  staging += (0u - shared_address(staging)) % 1024;
  const GemmRing<c> ring{shared, full, empty};
  const bool loads = threadIdx.x >= c.warpgroups * 128;
  TileQueue<c> queue(queued);
  if (c.handed_out && threadIdx.x == 32) queue.init();
  if (threadIdx.x == 0)
    for (int i = 0; i < c.stages; ++i) {
      init_barrier(&full[i], 1);
      init_barrier(&empty[i], Shape::sharers * 4 * Shape::sharing);
    }
  if (threadIdx.x == c.warpgroups * 128) {
    prefetch_map(args.weight);
    prefetch_map(args.x);
  }
  if constexpr (c.cluster > 1) cluster_sync();
  else __syncthreads();
  GemmTiles<c> tiles;
  if (!problem.settled) wait_for_previous_kernel();
  tiles.prepare(problem);
  const bool loads_all = threadIdx.x == c.warpgroups * 128;
  if constexpr (c.handed_out) {
    if (!loads_all) {  // who loads waits later
      if (!problem.awaited) wait_for_previous_kernel();
      let_next_kernel_start();
    }
  } else {
    wait_for_previous_kernel();
    let_next_kernel_start();
  }
  const uint32_t rank = c.cluster > 1 ? block_in_cluster() : 0;

  if (loads) {
    if constexpr (c.warpgroups > 1) give_registers_back<Shape::loader_registers>();
    if (loads_all) load_tiles<c>(args, ring, tiles, rank, queue);
    if constexpr (c.handed_out)
      if (threadIdx.x == c.warpgroups * 128 + 32 && rank == 0) queue.hand_out(tiles);
  } else {
    if constexpr (c.warpgroups > 1) take_registers<Shape::registers>();
    RingPlace<c.stages> place;
    int turn = 0;
    GemmSums<c> sums;
    GemmWork<c> work(args, tiles, rank, false, queue);
    if constexpr (c.in_turn || Shape::staggered)
      if (threadIdx.x >= 128) pass_turn();
    for (int i = 0; work.next(); ++i) {
      if (c.in_turn && i % 2 != int(threadIdx.x / 128)) {
        place.skip(work.end - work.begin);
        continue;
      }
      multiply_rows<c>(sums, problem, ring, place, work.tile, work.begin, work.end);
      if constexpr (c.split) share_sums<c>(sums, shared);
      else write_tile<c>(sums, args, work.tile, staging, turn);
      if constexpr (c.gates != GatePairs::none)
        if (problem.finished) report_written<c>(problem, work.tile);
    }
    if constexpr (c.streamed)
      while (work.next_part()) {
        multiply_rows<c>(sums, problem, ring, place, work.tile, work.begin, work.end);
        keep_sums<c>(sums, args, int(blockIdx.x) * 2 + work.part);
      }
    if constexpr (c.bulk) wait_stores_read<0>();
  }
  if constexpr (c.cluster > 1) {  // no block may go while another uses its shared memory
    __syncwarp();
    cluster_sync();
    if constexpr (c.split) {
      if (!loads) write_shared_tile<c>(problem, tiles.at(tiles.first(), rank), shared, rank);
      __syncwarp();
      cluster_sync();
    }
  }
  if constexpr (GemmTiles<c>::counted) {
    if (problem.fill) tiles.fill_other_rows(problem);
  }
  if (c.handed_out && problem.awaited) wait_for_previous_kernel();  // so that who waits for this kernel has waited for that one
#endif
}

}  // namespace deepinfer
