// What every CUDA kernel builds on: element types and their conversions, wide memory accesses, sums over the threads of
// a row, and the hand-over between kernels. Device code only; includes nothing of CUDA, so that NVRTC needs no headers.
//
// Compiled with --fmad=false: a product and a sum are rounded apart, as on the CPU. Write fmaf() where one is meant.
#pragma once

#include "../cpu/types.h"

#define DEVICE __device__ __forceinline__

namespace deepinfer {

struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };

template <DType> struct ElementOf;
template <> struct ElementOf<DType::f32> { using type = float; };
template <> struct ElementOf<DType::bf16> { using type = bf16; };
template <> struct ElementOf<DType::f16> { using type = f16; };
template <DType dtype> using Element = typename ElementOf<dtype>::type;

// ---- conversions, to nearest even ----

DEVICE float to_float(float x) { return x; }
DEVICE float to_float(bf16 x) { return __uint_as_float(uint32_t(x.bits) << 16); }
DEVICE float to_float(f16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}

template <typename T> DEVICE T from_float(float x);
template <> DEVICE float from_float<float>(float x) { return x; }
template <> DEVICE bf16 from_float<bf16>(float x) {
  bf16 y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}
template <> DEVICE f16 from_float<f16>(float x) {
  f16 y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}

// x as it is after being stored as a T.
template <typename T> DEVICE float round_to(float x) { return to_float(from_float<T>(x)); }
template <> DEVICE float round_to<bf16>(float x) {  // in one instruction; a cvt to bf16 runs at a quarter of the rate
  uint32_t y;
  asm("cvt.rn.bf16x2.f32 %0, %1, 0f00000000;" : "=r"(y) : "f"(x));
  return __uint_as_float(y);
}

// ---- two elements of 16 bits in one word, the first one low ----

// Each result is rounded once: what float32 arithmetic and a conversion give, except for bf16 products below 2^-126,
// which float32 rounds as well.
template <typename T> struct Pair;
template <> struct Pair<bf16> {
  static DEVICE uint32_t from_floats(float low, float high) {
    uint32_t y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
  }
  static DEVICE uint32_t product(uint32_t a, uint32_t b) {  // a * b - 0
    uint32_t y;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(0x80008000u));
    return y;
  }
  static DEVICE uint32_t sum(uint32_t a, uint32_t b) {  // a * 1 + b
    uint32_t y;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(0x3f803f80u), "r"(b));
    return y;
  }
};
template <> struct Pair<f16> {
  static DEVICE uint32_t from_floats(float low, float high) {
    uint32_t y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
  }
  static DEVICE uint32_t product(uint32_t a, uint32_t b) {
    uint32_t y;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
  }
  static DEVICE uint32_t sum(uint32_t a, uint32_t b) {
    uint32_t y;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
  }
};

template <bool first, typename A, typename B> struct ChooseOf { using type = A; };
template <typename A, typename B> struct ChooseOf<false, A, B> { using type = B; };
template <bool first, typename A, typename B> using Choose = typename ChooseOf<first, A, B>::type;

template <typename A, typename B> constexpr bool is_same = false;
template <typename A> constexpr bool is_same<A, A> = true;

// ---- memory ----

constexpr int kVectorBytes = 16;  // the widest access of one thread

template <typename T, int n>
struct alignas(n * sizeof(T) < kVectorBytes ? n * sizeof(T) : kVectorBytes) Vec {
  T at[n];
};

template <typename T, int n>
DEVICE uint32_t& word(Vec<T, n>& v, int i) { return reinterpret_cast<uint32_t*>(&v)[i]; }
template <typename T, int n>
DEVICE const uint32_t& word(const Vec<T, n>& v, int i) { return reinterpret_cast<const uint32_t*>(&v)[i]; }

// The elements as floats; bf16 out of their words, with one instruction each.
template <typename T, int n>
DEVICE float value(const Vec<T, n>& v, int i) { return to_float(v.at[i]); }
template <int n>
  requires(n % 2 == 0)
DEVICE float value(const Vec<bf16, n>& v, int i) {
  return __uint_as_float(i % 2 == 0 ? word(v, i / 2) << 16 : word(v, i / 2) & 0xffff0000u);
}

template <typename T, int n>
DEVICE Vec<T, 2 * n> joined(const Vec<T, n>& a, const Vec<T, n>& b) {
  Vec<T, 2 * n> y;
#pragma unroll
  for (int i = 0; i < n; ++i) {
    y.at[i] = a.at[i];
    y.at[n + i] = b.at[i];
  }
  return y;
}

// Sums and products of the elements, rounded to T.
template <typename T, int n>
DEVICE Vec<T, n> sum(const Vec<T, n>& a, const Vec<T, n>& b) {
  Vec<T, n> y;
  if constexpr (sizeof(T) == 2) {
#pragma unroll
    for (int i = 0; i < n / 2; ++i) word(y, i) = Pair<T>::sum(word(a, i), word(b, i));
  } else {
#pragma unroll
    for (int i = 0; i < n; ++i) y.at[i] = a.at[i] + b.at[i];
  }
  return y;
}
template <typename T, int n>
DEVICE Vec<T, n> product(const Vec<T, n>& a, const Vec<T, n>& b) {
  Vec<T, n> y;
  if constexpr (sizeof(T) == 2) {
#pragma unroll
    for (int i = 0; i < n / 2; ++i) word(y, i) = Pair<T>::product(word(a, i), word(b, i));
  } else {
#pragma unroll
    for (int i = 0; i < n; ++i) y.at[i] = a.at[i] * b.at[i];
  }
  return y;
}

// f(i) for all elements, rounded to T.
template <typename T, int n, typename F>
DEVICE Vec<T, n> rounded(F&& f) {
  Vec<T, n> y;
  if constexpr (sizeof(T) == 2) {
#pragma unroll
    for (int i = 0; i < n; i += 2) word(y, i / 2) = Pair<T>::from_floats(f(i), f(i + 1));
  } else {
#pragma unroll
    for (int i = 0; i < n; ++i) y.at[i] = f(i);
  }
  return y;
}

// The compiler takes the elements for new ones. It would keep what it has converted once, in twice the registers.
template <typename T, int n>
DEVICE void forget_conversions(Vec<T, n>& v) {
#pragma unroll
  for (int i = 0; i < int(n * sizeof(T) / 4); ++i) asm("" : "+r"(word(v, i)));
}

// No load here has a hint to a cache: on an H200, loads that do not stay in L1 or leave it first (no_allocate,
// evict_first, cs) made SwiGLU 10 % slower, 207 instead of 187 us for 800 MB, and a norm 5 %.
//
// None uses the read-only path (ld.global.nc): with programmatic dependent launch a kernel is running, though
// waiting, while the kernel before it writes. The volatile assembly stays behind wait_for_previous_kernel().
//
// Zeros if the data is not `wanted`. That is a predicate and no branch: the compiler would move what is done with the
// data into the branch, and the next load would wait for this one.
template <typename T, int n>
DEVICE Vec<T, n> load_access(const T* p, bool wanted = true) {
  constexpr int bytes = n * sizeof(T);
  static_assert(bytes == 1 || bytes == 2 || bytes == 4 || bytes == 8 || bytes == 16, "no such access");
  Vec<T, n> v{};
  if constexpr (bytes == 16) {
    auto* words = reinterpret_cast<uint32_t*>(&v);
    asm volatile("{\n.reg .pred wanted;\nsetp.ne.u32 wanted, %5, 0;\n"
                 "@wanted ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
                 : "+r"(words[0]), "+r"(words[1]), "+r"(words[2]), "+r"(words[3]) : "l"(p), "r"(int(wanted)));
  } else if constexpr (bytes == 8) {
    auto* words = reinterpret_cast<uint32_t*>(&v);
    asm volatile("{\n.reg .pred wanted;\nsetp.ne.u32 wanted, %3, 0;\n@wanted ld.global.v2.u32 {%0, %1}, [%2];\n}"
                 : "+r"(words[0]), "+r"(words[1]) : "l"(p), "r"(int(wanted)));
  } else if constexpr (bytes == 4) {
    asm volatile("{\n.reg .pred wanted;\nsetp.ne.u32 wanted, %2, 0;\n@wanted ld.global.u32 %0, [%1];\n}"
                 : "+r"(*reinterpret_cast<uint32_t*>(&v)) : "l"(p), "r"(int(wanted)));
  } else if constexpr (bytes == 2) {
    asm volatile("{\n.reg .pred wanted;\nsetp.ne.u32 wanted, %2, 0;\n@wanted ld.global.u16 %0, [%1];\n}"
                 : "+h"(*reinterpret_cast<uint16_t*>(&v)) : "l"(p), "r"(int(wanted)));
  } else {
    uint32_t byte = 0;
    asm volatile("{\n.reg .pred wanted;\nsetp.ne.u32 wanted, %2, 0;\n@wanted ld.global.u8 %0, [%1];\n}"
                 : "+r"(byte) : "l"(p), "r"(int(wanted)));
    *reinterpret_cast<uint8_t*>(&v) = uint8_t(byte);
  }
  return v;
}

// Elements [first, first + n) of a row of `size`, which is a multiple of `access`; zero past its end. `access` is the
// number of elements that the alignment of the row lets one instruction move.
template <int access, int n, typename T>
DEVICE Vec<T, n> load_vector(const T* row, int64_t first, int64_t size) {
  constexpr int widest = kVectorBytes / sizeof(T);
  constexpr int step = access < widest ? access : widest;
  Vec<T, n> v;
#pragma unroll
  for (int i = 0; i < n; i += step) {
    const Vec<T, step> part = load_access<T, step>(row + first + i, first + i < size);
#pragma unroll
    for (int j = 0; j < step; ++j) v.at[i + j] = part.at[j];
  }
  return v;
}

// In assembly too: the compiler cuts a store of a struct whose members it holds in registers of their own.
template <typename T, int n>
DEVICE void store_access(T* p, const Vec<T, n>& v) {
  constexpr int bytes = n * sizeof(T);
  static_assert(bytes == 1 || bytes == 2 || bytes == 4 || bytes == 8 || bytes == 16, "no such access");
  if constexpr (bytes >= 4) {
    const auto* words = reinterpret_cast<const uint32_t*>(&v);
    if constexpr (bytes == 16)
      asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::
                       "l"(p), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]) : "memory");
    else if constexpr (bytes == 8)
      asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(p), "r"(words[0]), "r"(words[1]) : "memory");
    else
      asm volatile("st.global.u32 [%0], %1;" ::"l"(p), "r"(words[0]) : "memory");
  } else {
    *reinterpret_cast<Vec<T, n>*>(p) = v;
  }
}

template <int access, int n, typename T>
DEVICE void store_vector(T* row, int64_t first, int64_t size, const Vec<T, n>& v) {
  constexpr int widest = kVectorBytes / sizeof(T);
  constexpr int step = access < widest ? access : widest;
#pragma unroll
  for (int i = 0; i < n; i += step) {
    Vec<T, step> part;
#pragma unroll
    for (int j = 0; j < step; ++j) part.at[j] = v.at[i + j];
    if (first + i < size) store_access(row + first + i, part);
  }
}

// The offset of a row in elements. `strided`: more than one stride describes the rows.
template <bool strided>
DEVICE int64_t row_offset(const Rows& rows, int64_t row) {
  if constexpr (!strided) return rows.dims == 0 ? 0 : row * rows.strides[0];
  int64_t offset = 0;
  if (row <= 0xffffffff) {  // a 64-bit division takes many times as long
    uint32_t rest = uint32_t(row);
#pragma unroll 1
    for (int d = rows.dims - 1; d > 0; --d) {
      const uint32_t size = uint32_t(rows.sizes[d]);
      offset += int64_t(rest % size) * rows.strides[d];
      rest /= size;
    }
    return offset + int64_t(rest) * rows.strides[0];
  }
#pragma unroll 1
  for (int d = rows.dims - 1; d > 0; --d) {
    offset += row % rows.sizes[d] * rows.strides[d];
    row /= rows.sizes[d];
  }
  return offset + row * rows.strides[0];
}

// ---- sums over threads ----

struct Addition {
  static DEVICE float of(float a, float b) { return a + b; }
};

// Combines 32 or fewer neighbouring threads, in every one of them.
template <typename Op, int width>
DEVICE float over_warp(float x) {
#pragma unroll
  for (int step = width / 2; step > 0; step /= 2) x = Op::of(x, __shfl_xor_sync(0xffffffff, x, step, 32));
  return x;
}

// Over groups of `lanes` neighbouring threads, in every one of them: a power of two up to 32, or all threads of the
// block, a multiple of 32. The order depends on `lanes` only; 0 must not change the result. The block form may be used
// once a kernel for each `scratch`.
template <typename Op, int lanes>
DEVICE float over_lanes(float x, float* scratch) {
  x = over_warp<Op, (lanes < 32 ? lanes : 32)>(x);
  if constexpr (lanes > 32) {
    constexpr int warps = lanes / 32;
    static_assert(lanes % 32 == 0 && warps <= 32);
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
    __syncthreads();
    x = over_warp<Op, 32>(threadIdx.x % 32 < warps ? scratch[threadIdx.x % 32] : 0.f);
  }
  return x;
}

template <int lanes>
DEVICE float sum_over(float x, float* scratch) {
  return over_lanes<Addition, lanes>(x, scratch);
}

// ---- between blocks ----

// What the thread, and those that passed a barrier with it, wrote before is there for whoever acquires the sum.
DEVICE void add_release(int32_t* p, int32_t x) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(p), "r"(x) : "memory");
}
DEVICE int32_t load_acquire(const int32_t* p) {
  int32_t x;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
  return x;
}

// ---- between kernels (programmatic dependent launch) ----

// Until everything that the stream's earlier kernels wrote is there. Nothing in device memory may be read or written
// before, the weights neither: the kernel before may have made them. A kernel behind one that waits before it lets
// others start may read what was there before that one.
DEVICE void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel of the stream take its place on the processors; it waits as above before it reads.
DEVICE void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace deepinfer
