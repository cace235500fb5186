// Run-time choice of the instruction set. Kernel files are compiled once per set with DEEPINFER_ISA naming the
// namespace that holds the result; DEEPINFER_KERNEL declares the kernel in each and `kernel(args...)` calls the best
// one.
//
// A kernel is a plain function over a range of work: void name(const Args&, int64_t begin, int64_t end).
#pragma once

#include <cstdint>

namespace deepinfer::cpu {

enum class Isa : int { generic, avx2, avx512 };

// The best set of this processor; the environment variable DEEPINFER_CPU_ISA=generic|avx2|avx512 can lower it.
Isa isa();

#if defined(__x86_64__)
#define DEEPINFER_KERNEL(name, Args)                                               \
  namespace generic { void name(const Args&, int64_t begin, int64_t end); }        \
  namespace avx2 { void name(const Args&, int64_t begin, int64_t end); }           \
  namespace avx512 { void name(const Args&, int64_t begin, int64_t end); }         \
  inline void name(const Args& args, int64_t begin, int64_t end) {                 \
    switch (isa()) {                                                               \
      case Isa::avx512: return avx512::name(args, begin, end);                     \
      case Isa::avx2: return avx2::name(args, begin, end);                         \
      default: return generic::name(args, begin, end);                             \
    }                                                                              \
  }
#else
#define DEEPINFER_KERNEL(name, Args)                                               \
  namespace generic { void name(const Args&, int64_t begin, int64_t end); }        \
  inline void name(const Args& args, int64_t begin, int64_t end) { generic::name(args, begin, end); }
#endif

}  // namespace deepinfer::cpu
