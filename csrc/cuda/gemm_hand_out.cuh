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
    wait_barrier_in_cluster(&shared_.empty[place], turn_ / places % 2 ^ 1);
    for (int block = 0; block < c.cluster; ++block) {
      store_to_cluster(reinterpret_cast<uint32_t*>(&shared_.tiles[place]), block, uint32_t(tile));
      publish_at(&shared_.full[place], block);
    }
  }

  // `warp`: all threads of a warp call this together, otherwise one thread.
  DEVICE int hear(bool warp) {
    const int place = turn_ % places;
    wait_barrier_in_cluster(&shared_.full[place], turn_ / places % 2);
    const int tile = *const_cast<const volatile int32_t*>(&shared_.tiles[place]);
    if (warp) __syncwarp();
    if (!warp || threadIdx.x % 32 == 0) publish_at(&shared_.empty[place], 0);
    return tile;
  }

  // Whether this is not the first tile, which is known without the queue. Before each tile.
  DEVICE bool used() { return ++turn_ >= 0; }

 private:
  Shared& shared_;
  int turn_ = -2;
};

}  // namespace deepinfer
