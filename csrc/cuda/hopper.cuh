// What compute capability 9.0 brought: the bulk copy engine and its barriers, which move whole runs of bytes between
// device memory and shared memory, started by one thread (addresses and sizes are multiples of 16); and clusters,
// blocks that see each other's shared memory.
#pragma once

#include "device.cuh"
#include "tensor_map.h"

namespace deepinfer {

DEVICE uint32_t shared_address(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }

// One thread initialises the barrier and makes that visible to the copy engine.
DEVICE void init_barrier(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrives, and adds the bytes that copies are going to report.
DEVICE void expect_bytes(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

// Until the phase of this parity is complete.
DEVICE void wait_barrier(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(shared_address(barrier)), "r"(parity) : "memory");
}

DEVICE void bulk_load(void* shared, const void* global, uint32_t bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
                   "r"(shared_address(shared)), "l"(global), "r"(bytes), "r"(shared_address(barrier)) : "memory");
}

DEVICE void bulk_store(void* global, const void* shared, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::
                   "l"(global), "r"(shared_address(shared)), "r"(bytes) : "memory");
}

// Until the stores of this thread have read their shared memory.
DEVICE void wait_bulk_stores_read() {
  asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;" ::: "memory");
}

// The place in a ring of stages between who loads and who reads, and the parity of its barriers.
template <int stages>
struct RingPlace {
  int stage = 0;
  uint32_t parity = 0;

  DEVICE void advance() {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
  DEVICE void skip(int count) {
    stage += count;
    parity ^= stage / stages % 2;
    stage %= stages;
  }
};

// ---- boxes of tensors ----

// So that the first copy does not wait for the map. Kernel arguments may be read while the kernel before still runs.
DEVICE void prefetch_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// A box of the tensor into shared memory, from the given element on, innermost dimension first; what lies outside reads
// as zero.
DEVICE void tensor_load(void* shared, const TensorMap& map, int x, int y, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::
          "r"(shared_address(shared)), "l"(&map), "r"(x), "r"(y), "r"(shared_address(barrier)) : "memory");
}
DEVICE void tensor_load(void* shared, const TensorMap& map, int x, int y, int z, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::
          "r"(shared_address(shared)), "l"(&map), "r"(x), "r"(y), "r"(z), "r"(shared_address(barrier)) : "memory");
}
DEVICE void tensor_load(void* shared, const TensorMap& map, int x, int y, int z, int u, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %4, %5}], [%6];" ::
          "r"(shared_address(shared)), "l"(&map), "r"(x), "r"(y), "r"(z), "r"(u), "r"(shared_address(barrier))
      : "memory");
}
// `policy`: what becomes of the data in the L2 cache.
DEVICE void tensor_load(void* shared, const TensorMap& map, int x, int y, int z, uint64_t* barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%2, %3, %4}], [%5], %6;" ::
          "r"(shared_address(shared)), "l"(&map), "r"(x), "r"(y), "r"(z), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}

DEVICE void tensor_load(void* shared, const TensorMap& map, int x, int y, int z, int u, int v, uint64_t* barrier,
                        uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%2, %3, %4, %5, %6}], [%7], %8;" ::
          "r"(shared_address(shared)), "l"(&map), "r"(x), "r"(y), "r"(z), "r"(u), "r"(v), "r"(shared_address(barrier)),
      "l"(policy) : "memory");
}

// Data that is read once goes first, before what other kernels wrote and will read.
DEVICE uint64_t cache_policy(bool read_once) {
  uint64_t first, normal;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(first));
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(normal));
  return read_once ? first : normal;
}

// A box out of shared memory; what lies outside of the tensor is not written. For shared memory that ordinary stores
// wrote: each thread of them calls publish_to_copies(), all pass a barrier, and one thread starts and commits the copy.
DEVICE void publish_to_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DEVICE void tensor_store(const TensorMap& map, int x, int y, const void* shared) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::
                   "l"(&map), "r"(x), "r"(y), "r"(shared_address(shared)) : "memory");
}
DEVICE void tensor_store(const TensorMap& map, int x, int y, int z, const void* shared) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%1, %2, %3}], [%4];" ::
                   "l"(&map), "r"(x), "r"(y), "r"(z), "r"(shared_address(shared)) : "memory");
}
DEVICE void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until no more than `pending` of this thread's committed stores still have to read their shared memory.
template <int pending> DEVICE void wait_stores_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
}

// Until they are written, and this thread may tell others so.
DEVICE void wait_stores_written() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// For data in device memory that other blocks wrote before what this thread has acquired.
DEVICE void publish_to_copies_of_memory() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// The same box into the blocks of the cluster whose bits `blocks` has, each time at this address and barrier.
DEVICE void tensor_load_to(uint16_t blocks, void* shared, const TensorMap& map, int x, int y, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%2, %3}], [%4], %5;" ::
          "r"(shared_address(shared)), "l"(&map), "r"(x), "r"(y), "r"(shared_address(barrier)), "h"(blocks) : "memory");
}

// ---- clusters ----

DEVICE uint32_t block_in_cluster() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

DEVICE void arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// At the barrier of this address in another block.
DEVICE void arrive_at(uint64_t* barrier, uint32_t block) {
  asm volatile(
      "{\n"
      ".reg .u32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
      "}\n" ::"r"(shared_address(barrier)), "r"(block) : "memory");
}

// Four words to another block of the cluster, whose barrier there counts the bytes as those of a copy: no fence is
// needed, neither here nor by those who wait for the barrier. Only in kernels with clusters.
DEVICE void send_to_cluster(Vec<int32_t, 4>* to, uint64_t* barrier, uint32_t block, const Vec<int32_t, 4>& x) {
  asm volatile(
      "{\n"
      ".reg .u32 remote, remote_barrier;\n"
      "mapa.shared::cluster.u32 remote, %0, %2;\n"
      "mapa.shared::cluster.u32 remote_barrier, %1, %2;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.s32 [remote], {%3, %4, %5, %6}, [remote_barrier];\n"
      "}\n" ::"r"(shared_address(to)), "r"(shared_address(barrier)), "r"(block), "r"(x.at[0]), "r"(x.at[1]),
      "r"(x.at[2]), "r"(x.at[3]) : "memory");
}

DEVICE void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The same in two steps, every thread arrives once and waits once; for blocks to have begun, and not for what they
// wrote.
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// A word of another block's shared memory, at the address that it has in this one.
DEVICE int32_t load_from_cluster(const int32_t* p, int block) {
  int32_t x;
  asm volatile(
      "{\n"
      ".reg .u32 remote;\n"
      "mapa.shared::cluster.u32 remote, %1, %2;\n"
      "ld.shared::cluster.s32 %0, [remote];\n"
      "}\n" : "=r"(x) : "r"(shared_address(p)), "r"(block) : "memory");
  return x;
}

DEVICE void store_to_cluster(uint32_t* p, int block, uint32_t x) {
  asm volatile(
      "{\n"
      ".reg .u32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "st.shared::cluster.u32 [remote], %2;\n"
      "}\n" ::"r"(shared_address(p)), "r"(block), "r"(x) : "memory");
}

DEVICE void store_to_cluster(uint64_t* p, int block, uint64_t x) {
  asm volatile(
      "{\n"
      ".reg .u32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "st.shared::cluster.u64 [remote], %2;\n"
      "}\n" ::"r"(shared_address(p)), "r"(block), "l"(x) : "memory");
}

DEVICE Vec<float, 4> load_from_cluster(const float* p, uint32_t block) {
  Vec<float, 4> v;
  asm volatile(
      "{\n"
      ".reg .u32 remote;\n"
      "mapa.shared::cluster.u32 remote, %4, %5;\n"
      "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [remote];\n"
      "}\n"
      : "=f"(v.at[0]), "=f"(v.at[1]), "=f"(v.at[2]), "=f"(v.at[3]) : "r"(shared_address(p)), "r"(block) : "memory");
  return v;
}

// ---- warpgroups: 128 threads whose first is a multiple of 128 ----

// Among the threads of one warpgroup, or of the first `count`; id 0 is __syncthreads().
DEVICE void warpgroup_sync(int id) { asm volatile("bar.sync %0, 128;" ::"r"(id) : "memory"); }
template <int count> DEVICE void warpgroups_sync(int id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(count * 128) : "memory");
}

// Two warpgroups that take turns. The second one passes the first turn.
DEVICE void await_turn() { asm volatile("bar.sync %0, 256;" ::"r"(4 + threadIdx.x / 128) : "memory"); }
DEVICE void pass_turn() { asm volatile("bar.arrive %0, 256;" ::"r"(5 - threadIdx.x / 128) : "memory"); }

// The registers of each thread of the warpgroup from here on.
template <int registers> DEVICE void give_registers_back() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}
template <int registers> DEVICE void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}

}  // namespace deepinfer
