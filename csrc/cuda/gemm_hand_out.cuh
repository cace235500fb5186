// Tiles that are handed out one by one, because those of groups take unequal time. The thread that loads for the first
// block of a cluster fetches their numbers from device memory and tells them to all who work on them, through a short
// queue in shared memory.
#pragma once

#include "gemm_config.h"
#include "hopper.cuh"

namespace deepinfer {

template <GemmConfig c>
class TileQueue {
 public:
  static constexpr int places = 4;
  struct Shared {
    uint64_t full[places], empty[places];
    int32_t tiles[places];
  };

  DEVICE explicit TileQueue(Shared& shared) : shared_(shared) {}

  // By one thread. The readers are the warps that multiply and the threads that load for the other blocks.
  DEVICE void init() {
    for (int i = 0; i < places; ++i) {
      init_barrier(&shared_.full[i], 1);
      init_barrier(&shared_.empty[i], c.cluster * (c.warpgroups * 4 + 1) - 1);
    }
  }

  DEVICE void tell(int tile) {
    const int place = turn_ % places;
    wait_barrier(&shared_.empty[place], turn_ / places % 2 ^ 1);
    if constexpr (c.cluster > 1) {
      expect_bytes(&shared_.full[place], sizeof(tile));
      for (int block = 0; block < c.cluster; ++block)
        send_to_cluster(&shared_.tiles[place], &shared_.full[place], block, tile);
    } else {
      shared_.tiles[place] = tile;
      arrive(&shared_.full[place]);
    }
  }

  // `loads`: one thread, the one that loads, otherwise all threads of a warp together.
  DEVICE int hear(bool loads) {
    const int place = turn_ % places;
    if (loads) expect_bytes(&shared_.full[place], sizeof(int32_t));
    wait_barrier(&shared_.full[place], turn_ / places % 2);
    const int tile = *const_cast<const volatile int32_t*>(&shared_.tiles[place]);
    if (!loads) __syncwarp();
    if (loads || threadIdx.x % 32 == 0) {
      if constexpr (c.cluster > 1) arrive_at(&shared_.empty[place], 0);
      else arrive(&shared_.empty[place]);
    }
    return tile;
  }

  // Whether this is not the first tile, which is known without the queue. Before each tile.
  DEVICE bool used() { return ++turn_ >= 0; }

 private:
  Shared& shared_;
  int turn_ = -2;
};

}  // namespace deepinfer
