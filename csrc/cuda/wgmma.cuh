// The matrix unit of Hopper: asynchronous products of two tiles of shared memory, added to sums in registers.
//
// The sums of a warpgroup are a tile of 64 rows and n columns. Warp w holds the rows 16 w to 16 w + 15; its lane
// 4 g + t holds, for every 8 columns j, the elements (g, 8 j + 2 t), (g, 8 j + 2 t + 1), (g + 8, 8 j + 2 t) and
// (g + 8, 8 j + 2 t + 1), in this order.
#pragma once

#include "gemm_config.h"
#include "hopper.cuh"

namespace deepinfer {

// Where a tile lies. Both layouts are what the copy engine makes of a box that is 128 bytes wide with a swizzle of 128
// bytes. k dense: a row of 128 bytes for each row of the operand. Otherwise blocks of 64 rows of the operand, one after
// the other, with a row of 128 bytes for each k.
template <bool dense_k>
DEVICE uint64_t matrix_descriptor(const void* shared, int block_bytes) {
  constexpr uint64_t eight_rows = 8 * 128, swizzle_128 = 1;
  const uint64_t leading = dense_k ? 16 : block_bytes;
  const uint32_t address = shared_address(shared) & 0x3ffff;  // above: which block of the cluster
  return uint64_t(address >> 4) | leading >> 4 << 16 | eight_rows >> 4 << 32 | swizzle_128 << 62;
}

// Before the first product that reads registers or shared memory written by this warpgroup.
DEVICE void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until no more than `pending` of the committed groups are under way.
template <int pending> DEVICE void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

#define SUMS_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define SUMS_16 SUMS_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define SUMS_24 SUMS_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define SUMS_32 SUMS_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define SUMS_40 SUMS_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define SUMS_48 SUMS_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define SUMS_56 SUMS_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define SUMS_64 SUMS_56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define SUMS_72 SUMS_64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define SUMS_80 SUMS_72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define SUMS_88 SUMS_80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define SUMS_96 SUMS_88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define SUMS_104 SUMS_96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define SUMS_112 SUMS_104 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define SUMS_120 SUMS_112 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define SUMS_128 SUMS_120 ", %120, %121, %122, %123, %124, %125, %126, %127"

#define EIGHT(d, i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
  "+f"(d[i + 7])
#define HOLD_8(d) EIGHT(d, 0)
#define HOLD_16(d) HOLD_8(d), EIGHT(d, 8)
#define HOLD_24(d) HOLD_16(d), EIGHT(d, 16)
#define HOLD_32(d) HOLD_24(d), EIGHT(d, 24)
#define HOLD_40(d) HOLD_32(d), EIGHT(d, 32)
#define HOLD_48(d) HOLD_40(d), EIGHT(d, 40)
#define HOLD_56(d) HOLD_48(d), EIGHT(d, 48)
#define HOLD_64(d) HOLD_56(d), EIGHT(d, 56)
#define HOLD_72(d) HOLD_64(d), EIGHT(d, 64)
#define HOLD_80(d) HOLD_72(d), EIGHT(d, 72)
#define HOLD_88(d) HOLD_80(d), EIGHT(d, 80)
#define HOLD_96(d) HOLD_88(d), EIGHT(d, 88)
#define HOLD_104(d) HOLD_96(d), EIGHT(d, 96)
#define HOLD_112(d) HOLD_104(d), EIGHT(d, 104)
#define HOLD_120(d) HOLD_112(d), EIGHT(d, 112)
#define HOLD_128(d) HOLD_120(d), EIGHT(d, 120)

// Of `sums` registers, whose numbers a, b, ta, tb and s follow.
#define PRODUCT(n, sums, a, b, ta, tb, s)                                                                            \
  if constexpr (columns == n) {                                                                                       \
    if constexpr (type == Operand::bf16)                                                                              \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" SUMS_##sums "}, " a ", " b ", " s     \
                   ", 1, 1, " ta ", " tb ";" : HOLD_##sums(d) : "l"(rows_at), "l"(columns_at),                        \
                   "n"(rows_dense_k ? 0 : 1), "n"(columns_dense_k ? 0 : 1), "n"(add ? 1 : 0));                        \
    if constexpr (type == Operand::f16)                                                                               \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.f16.f16 {" SUMS_##sums "}, " a ", " b ", " s       \
                   ", 1, 1, " ta ", " tb ";" : HOLD_##sums(d) : "l"(rows_at), "l"(columns_at),                        \
                   "n"(rows_dense_k ? 0 : 1), "n"(columns_dense_k ? 0 : 1), "n"(add ? 1 : 0));                        \
    if constexpr (type == Operand::e4m3)                                                                              \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k32.f32.e4m3.e4m3 {" SUMS_##sums "}, " a ", " b ", " ta     \
                   ", 1, 1;" : HOLD_##sums(d) : "l"(rows_at), "l"(columns_at), "n"(add ? 1 : 0));                      \
  }

// d[columns / 2] += rows x columns, over 32 bytes of k, or d = ... without `add`. k is dense or not; it is for e4m3.
template <Operand type, int columns, bool rows_dense_k, bool columns_dense_k, bool add = true>
DEVICE void multiply(float* d, uint64_t rows_at, uint64_t columns_at) {
  PRODUCT(16, 8, "%8", "%9", "%10", "%11", "%12")
  PRODUCT(32, 16, "%16", "%17", "%18", "%19", "%20")
  PRODUCT(48, 24, "%24", "%25", "%26", "%27", "%28")
  PRODUCT(64, 32, "%32", "%33", "%34", "%35", "%36")
  PRODUCT(80, 40, "%40", "%41", "%42", "%43", "%44")
  PRODUCT(96, 48, "%48", "%49", "%50", "%51", "%52")
  PRODUCT(112, 56, "%56", "%57", "%58", "%59", "%60")
  PRODUCT(128, 64, "%64", "%65", "%66", "%67", "%68")
  PRODUCT(144, 72, "%72", "%73", "%74", "%75", "%76")
  PRODUCT(160, 80, "%80", "%81", "%82", "%83", "%84")
  PRODUCT(176, 88, "%88", "%89", "%90", "%91", "%92")
  PRODUCT(192, 96, "%96", "%97", "%98", "%99", "%100")
  PRODUCT(208, 104, "%104", "%105", "%106", "%107", "%108")
  PRODUCT(224, 112, "%112", "%113", "%114", "%115", "%116")
  PRODUCT(240, 120, "%120", "%121", "%122", "%123", "%124")
  PRODUCT(256, 128, "%128", "%129", "%130", "%131", "%132")
}

#undef PRODUCT

// The same with rows in registers.
#define PRODUCT(n, sums, a0, a1, a2, a3, b, tb)                                                                      \
  if constexpr (columns == n) {                                                                                       \
    if constexpr (type == Operand::bf16)                                                                              \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" SUMS_##sums "}, {" a0 ", " a1 ", " a2  \
                   ", " a3 "}, " b ", 1, 1, 1, " tb ";" : HOLD_##sums(d) :                                            \
                   "r"(rows[0]), "r"(rows[1]), "r"(rows[2]), "r"(rows[3]), "l"(columns_at),                           \
                   "n"(columns_dense_k ? 0 : 1));                                                                     \
    if constexpr (type == Operand::f16)                                                                               \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.f16.f16 {" SUMS_##sums "}, {" a0 ", " a1 ", " a2    \
                   ", " a3 "}, " b ", 1, 1, 1, " tb ";" : HOLD_##sums(d) :                                            \
                   "r"(rows[0]), "r"(rows[1]), "r"(rows[2]), "r"(rows[3]), "l"(columns_at),                           \
                   "n"(columns_dense_k ? 0 : 1));                                                                     \
  }

// d[columns / 2] += rows x columns, over k of 16. The rows' elements are those that sums of 16 columns would have, two
// in each register. Neither they nor d may be touched before the product is done.
template <Operand type, int columns, bool columns_dense_k>
DEVICE void multiply_registers(float* d, const uint32_t* rows, uint64_t columns_at) {
  PRODUCT(64, 32, "%32", "%33", "%34", "%35", "%36", "%37")
  PRODUCT(128, 64, "%64", "%65", "%66", "%67", "%68", "%69")
}

#undef PRODUCT

}  // namespace deepinfer
