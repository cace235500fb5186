// Large results. Included by csrc/ops only.
#pragma once

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <cstdint>

namespace deepinfer::cpu {

// Asks for huge pages under fresh memory. Writing to a large result for the first time costs more in page faults than
// in bandwidth. From 32 MB on, malloc maps memory that nothing else shares and that goes back as a whole.
inline void prefer_huge_pages(void* memory, int64_t bytes) {
#if defined(__linux__)
  constexpr uintptr_t kPage = uintptr_t(1) << 21;
  if (bytes < (int64_t(32) << 20)) return;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(memory) + kPage - 1) / kPage * kPage;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(memory) + bytes) / kPage * kPage;
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // a hint: it may fail
#endif
}

}  // namespace deepinfer::cpu
