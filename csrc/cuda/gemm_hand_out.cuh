// Tiles that are handed out one by one, because those of groups take unequal time. One thread of each cluster draws
// their numbers from device memory, finds where they are and tells it to all who work on them, through a short queue in
// shared memory: while they work on one tile, the next is known.
#pragma once

#include "gemm_tiles.cuh"

namespace deepinfer {

template <GemmConfig c>
class TileQueue {
 public:
  static constexpr int places = 2;  // who draws tiles too early takes them from clusters that are ready
  using Words = Vec<int32_t, 4>;    // expert, or -1 for the end; n, m, end
  struct Shared {
    Words tiles[places];
    uint64_t full[places], empty[places];
  };

  DEVICE explicit TileQueue(Shared& shared) : shared_(shared) {}

  // By one thread. The readers are the warps that multiply and the threads that load.
  DEVICE void init() {
    for (int i = 0; i < places; ++i) {
      init_barrier(&shared_.full[i], 1);
      init_barrier(&shared_.empty[i], c.cluster * (c.warpgroups * 4 + 1));
    }
  }

  // By one thread of the first block. The first tiles need not be drawn.
  DEVICE void hand_out(const GemmTiles<c>& tiles) {
    for (int next = tiles.first(), end = 0; end == 0; ++turn_) {
      Words words{-1};
      if (next < tiles.count) {
        const GemmTile tile = tiles.at(next, 0);
        words = {tile.expert, tile.n, tile.m, tile.end};
        next = atomicAdd(tiles.problem->handed_out, 1) + tiles.step();
      } else {
        end = 1;
      }
      const int place = turn_ % places;
      wait_barrier(&shared_.empty[place], turn_ / places % 2 ^ 1);
      expect_bytes(&shared_.full[place], sizeof(Words));
      for (int block = 0; block < c.cluster; ++block, words.at[1] += c.tile_n)
        send_to_cluster(&shared_.tiles[place], &shared_.full[place], block, words);
    }
  }

  // The next tile. `loads`: one thread, the one that loads for block `rank`, otherwise all threads of a warp together.
  DEVICE GemmTile hear(bool loads, uint32_t rank) {
    const int place = turn_ % places;
    if (loads && rank > 0) expect_bytes(&shared_.full[place], sizeof(Words));
    wait_barrier(&shared_.full[place], turn_++ / places % 2);
    const Words words = shared_.tiles[place];
    if (!loads) __syncwarp();
    if (loads || threadIdx.x % 32 == 0) arrive_at(&shared_.empty[place], 0);
    return {words.at[0], words.at[1], words.at[2], words.at[3], 0, 0};
  }

 private:
  Shared& shared_;
  int turn_ = 0;
};

}  // namespace deepinfer
