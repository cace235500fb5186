// What compute capability 9.0 brought: the bulk copy engine and its barriers, which move whole runs of bytes between
// device memory and shared memory, started by one thread (addresses and sizes are multiples of 16); and clusters, blocks
// that see each other's shared memory.
#pragma once

#include "device.cuh"

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

// ---- clusters ----

DEVICE void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

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

}  // namespace deepinfer
