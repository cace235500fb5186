#include "isa.h"

#include <cstdlib>
#include <cstring>

namespace deepinfer::cpu {

namespace {

Isa detect() {
  Isa best = Isa::generic;
#if defined(__x86_64__)
  __builtin_cpu_init();
  auto has = [](auto... features) { return (features && ...); };
  if (has(__builtin_cpu_supports("avx2"), __builtin_cpu_supports("fma"), __builtin_cpu_supports("bmi2"),
          __builtin_cpu_supports("f16c")))
    best = Isa::avx2;
  if (best == Isa::avx2 &&
      has(__builtin_cpu_supports("avx512f"), __builtin_cpu_supports("avx512bw"), __builtin_cpu_supports("avx512dq"),
          __builtin_cpu_supports("avx512vl"), __builtin_cpu_supports("avx512bf16"),
          __builtin_cpu_supports("avx512vnni")))
    best = Isa::avx512;
  if (const char* wanted = std::getenv("DEEPINFER_CPU_ISA")) {
    if (!std::strcmp(wanted, "generic")) best = Isa::generic;
    if (!std::strcmp(wanted, "avx2") && best == Isa::avx512) best = Isa::avx2;
  }
#endif
  return best;
}

}  // namespace

Isa isa() {
  static const Isa best = detect();
  return best;
}

}  // namespace deepinfer::cpu
