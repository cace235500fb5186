// The elements of a row that may be among its k greatest, found while the row streams through shared memory once.
//
// The copy engine fills a ring of stages; each thread looks at 64 bytes of a stage. While the first stages are all
// there, every thread takes the greatest elements of a few groups of theirs. The k-th greatest of these is a threshold:
// k elements reach it. For each stage a thread compares its elements with the threshold, two of 16 bits in an
// instruction, and appends those that reach it to a list, a warp at a time; few do. Elements come in the order of their
// indices, so that after the first stages only those above the threshold count: what equals it comes after k others. If
// the list is full, it is cut to the k greatest and the threshold rises.
//
// The blocks of a cluster share a row. They tell each other a few quantiles of their groups and derive one threshold,
// and the first block gathers the lists of all.
#pragma once

#include "entries.cuh"
#include "hopper.cuh"

namespace deepinfer {

constexpr int kVectorsPerThread = 4;  // of a stage, 64 bytes
constexpr int kGroupsPerThread = 8;
constexpr int kMostBlocks = 16;       // of a cluster
constexpr int kQuantiles = 5;
constexpr int kMostStages = 8;

// ---- elements by words: one float, or two of 16 bits ----

// Thresholds are keys of elements: integers in the order of the values, and the next one up is the next key.
template <typename T> struct Words;

template <> struct Words<float> {
  static constexpr int kPerWord = 1;
  static constexpr uint32_t kLowest = 0xff800000;    // -inf
  static constexpr uint32_t kInfinity = kInfinityKey;
  static DEVICE uint32_t key_at_most(uint32_t key) { return key; }
  static DEVICE uint32_t threshold(uint32_t key) { return __float_as_uint(value_of(key)); }
  static DEVICE uint32_t at_least(uint32_t word, uint32_t threshold) {
    return __uint_as_float(word) < __uint_as_float(threshold) ? 0 : 0xffffffff;
  }
  static DEVICE uint32_t most(uint32_t a, uint32_t b) {
    float y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(__uint_as_float(a)), "f"(__uint_as_float(b)));
    return __float_as_uint(y);
  }
  static DEVICE uint32_t nans(uint32_t word) {
    const float x = __uint_as_float(word);
    return x != x ? 0xffffffff : 0;
  }
  static DEVICE float value(uint32_t word, int) { return __uint_as_float(word); }
};

// The greatest 16-bit key of a value of at most `key`.
template <typename T> DEVICE uint32_t short_key_at_most(uint32_t key);
template <> DEVICE uint32_t short_key_at_most<bf16>(uint32_t key) { return key >> 16; }
template <> DEVICE uint32_t short_key_at_most<f16>(uint32_t key) {
  uint16_t bits;
  asm("cvt.rm.f16.f32 %0, %1;" : "=h"(bits) : "f"(value_of(key)));
  return uint16_t(bits ^ (bits & 0x8000 ? 0xffff : 0x8000));
}

template <typename T> struct ShortWords {
  static constexpr int kPerWord = 2;
  static constexpr uint32_t kInfinityBits = is_same<T, bf16> ? 0x7f80 : 0x7c00;
  static constexpr uint32_t kLowest = (0x8000u | kInfinityBits) * 0x10001u;
  static constexpr uint32_t kInfinity = 0x8000u | kInfinityBits;
  static DEVICE uint32_t key_at_most(uint32_t key) { return short_key_at_most<T>(key); }
  static DEVICE uint32_t threshold(uint32_t key) {
    return ((key & 0x8000 ? key ^ 0x8000 : ~key) & 0xffff) * 0x10001u;
  }
  static DEVICE uint32_t at_least(uint32_t word, uint32_t threshold) {
    uint32_t y;
    if constexpr (is_same<T, bf16>) {
#if __CUDA_ARCH__ >= 900
      asm("set.geu.u32.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(word), "r"(threshold));
#else
      const float limit = __uint_as_float(threshold << 16);
      y = (__uint_as_float(word << 16) < limit ? 0 : 0xffff) |
          (__uint_as_float(word & 0xffff0000) < limit ? 0 : 0xffff0000);
#endif
    } else {
      asm("set.geu.u32.f16x2 %0, %1, %2;" : "=r"(y) : "r"(word), "r"(threshold));
    }
    return y;
  }
  static DEVICE uint32_t most(uint32_t a, uint32_t b) {
    uint32_t y;
    if constexpr (is_same<T, bf16>) asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    else asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
  }
  static DEVICE uint32_t nans(uint32_t word) {
    const float low = value(word, 0), high = value(word, 1);
    return (low != low ? 0xffff : 0) | (high != high ? 0xffff0000 : 0);
  }
  static DEVICE float value(uint32_t word, int half) { return to_float(T{uint16_t(half ? word >> 16 : word)}); }
};
template <> struct Words<bf16> : ShortWords<bf16> {};
template <> struct Words<f16> : ShortWords<f16> {};

// ---- a row as the copy engine reads it ----

// The elements of a row as 16-byte vectors at aligned addresses. The first may begin before the row and the last end
// after it: a vector lies in one unit of memory with some of the row's own bytes.
template <typename T>
struct Vectors {
  static constexpr int kElements = kVectorBytes / sizeof(T);
  const T* start;  // of vector 0
  int before;      // elements of vector 0 that are not the row's
  int count;
  int64_t size;    // of the row

  DEVICE Vectors(const T* row, int64_t size) : size(size) {
    before = int(reinterpret_cast<uint64_t>(row) % kVectorBytes / sizeof(T));
    start = row - before;
    count = size == 0 ? 0 : int((size + before + kElements - 1) / kElements);
  }

  // Of a vector's first element.
  DEVICE int64_t index(int vector) const { return int64_t(vector) * kElements - before; }
};

struct FilterState {
  uint64_t full[kMostStages];                         // barriers: a stage is there
  uint32_t quantiles[kMostBlocks * kQuantiles];       // of each block
  uint32_t own_quantiles[kQuantiles];
  int counts[kMostBlocks];                            // of each block's list
  uint32_t complete;                                  // the list has all elements from this Words<T> key on
  uint32_t completes[kMostBlocks];                    // of each block
};

// What a block reads of a row: vectors [first, last) through a ring of stages.
template <typename T, int threads, int stages, bool bulk>
struct Ring {
  static constexpr int kStageVectors = threads * kVectorsPerThread;
  static constexpr int n = Vectors<T>::kElements;
  const Vectors<T>& row;
  int first, last, count;  // count: stages in all
  uint64_t* memory;
  FilterState& state;

  DEVICE Ring(const Vectors<T>& row, int first, int last, uint64_t* memory, FilterState& state)
      : row(row), first(first), last(last), count((last - first + kStageVectors - 1) / kStageVectors), memory(memory),
        state(state) {
    if (bulk) {
      if (threadIdx.x == 0)
#pragma unroll
        for (int i = 0; i < stages; ++i) init_barrier(&state.full[i], 1);
      __syncthreads();
    }
  }

  DEVICE Vec<T, n>* vectors(int stage) const {
    return reinterpret_cast<Vec<T, n>*>(memory) + stage % stages * kStageVectors;
  }

  DEVICE int vectors_of(int stage) const {
    const int left = last - first - stage * kStageVectors;
    return left < kStageVectors ? left : kStageVectors;
  }

  // Starts the loads of a stage, if the row has it. By all threads.
  DEVICE void load(int stage) {
    if (stage >= count) return;
    const T* from = row.start + int64_t(first + stage * kStageVectors) * n;
    const int wanted = vectors_of(stage);
    if constexpr (bulk) {
      if (threadIdx.x != 0) return;
      expect_bytes(&state.full[stage % stages], wanted * kVectorBytes);
      bulk_load(vectors(stage), from, wanted * kVectorBytes, &state.full[stage % stages]);
    } else {
#pragma unroll
      for (int j = 0; j < kVectorsPerThread; ++j) {
        const int i = j * threads + int(threadIdx.x);
        if (i < wanted) vectors(stage)[i] = load_access<T, n>(from + int64_t(i) * n);
      }
    }
  }

  // Until a stage is there; what is not the row's reads as -inf.
  DEVICE void wait(int stage) {
    if constexpr (bulk) wait_barrier(&state.full[stage % stages], stage / stages & 1);
    else __syncthreads();
    if (is_whole(stage)) return;
    T* elements = reinterpret_cast<T*>(vectors(stage));
    const int begin = begin_of(stage), end = end_of(stage);
    if (threadIdx.x < begin) elements[threadIdx.x] = lowest();
#pragma unroll 1
    for (int i = end + int(threadIdx.x); i < kStageVectors * n; i += threads) elements[i] = lowest();
    if constexpr (bulk) publish_to_copies();
    __syncthreads();
  }

  // The elements of a stage that are the row's.
  DEVICE int begin_of(int stage) const { return first == 0 && stage == 0 ? row.before : 0; }
  DEVICE int end_of(int stage) const {
    const int end = vectors_of(stage) * n;
    const int64_t left = row.size - index(stage, 0);
    return left < end ? int(left) : end;
  }
  DEVICE bool is_whole(int stage) const { return begin_of(stage) == 0 && end_of(stage) == kStageVectors * n; }

  static DEVICE T lowest() {
    if constexpr (sizeof(T) == 4) return __uint_as_float(Words<T>::kLowest);
    else return T{uint16_t(Words<T>::kLowest)};
  }

  // Of an element of a stage.
  DEVICE int64_t index(int stage, int element) const {
    return int64_t(first + stage * kStageVectors) * n - row.before + element;
  }
};

// ---- the threshold ----

// The keys of the greatest elements of groups of the first stages.
template <typename T, int threads, typename Stages>
DEVICE void find_groups(Stages& ring, int warm, uint32_t (&keys)[kGroupsPerThread]) {
  using W = Words<T>;
  constexpr int words = kGroupsPerThread / W::kPerWord;  // that hold the groups
  uint32_t best[words];
#pragma unroll
  for (int i = 0; i < words; ++i) best[i] = W::kLowest;
#pragma unroll 1
  for (int stage = 0; stage < warm; ++stage) {
    ring.wait(stage);
#pragma unroll
    for (int j = 0; j < kVectorsPerThread; ++j) {
      const auto v = ring.vectors(stage)[j * threads + threadIdx.x];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        uint32_t& group = best[(j * 4 + w) * words / 16];
        group = W::most(group, word(v, w));
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kGroupsPerThread; ++i) keys[i] = key_of(W::value(best[i / W::kPerWord], i % W::kPerWord));
}

// A key that k of the groups' greatest reach, and not many more; `most`: the greatest.
template <int threads>
DEVICE uint32_t find_threshold(const uint32_t (&keys)[kGroupsPerThread], int k, uint32_t& most,
                               SelectState<threads>& select) {
  uint32_t least = 0xffffffff;
  most = 0;
#pragma unroll
  for (int i = 0; i < kGroupsPerThread; ++i) {
    least = least < keys[i] ? least : keys[i];
    most = most > keys[i] ? most : keys[i];
  }
  find_range<threads>(least, most, select);
  int wanted = k;
  uint32_t high = most;
  for (;;) {
    const Scale<threads> scale(least, high);
#pragma unroll
    for (int i = 0; i < kGroupsPerThread; ++i)
      if (keys[i] >= least && keys[i] <= high) atomicAdd(&select.bins[scale.bin(keys[i])], 1);
    __syncthreads();
    visit_bins<threads>(select, [&](int bin, int above, int size) {
      if (above < wanted && wanted <= above + size) select.found = {bin, wanted - above, size};
    });
    const Digit found = select.found;
    high = scale.last(found.digit, high);
    least = scale.first(found.digit);
    wanted = found.wanted;
    if (found.size <= wanted + k / 8 || least == high) return least;
  }
}

// What k elements of the row reach, from the ranks k / cluster, twice that, ... and k among the groups of each block.
// If great elements are spread evenly it is about the k-th of all groups.
template <int threads, int cluster>
DEVICE uint32_t find_cluster_threshold(const uint32_t (&keys)[kGroupsPerThread], int k, uint32_t& most,
                                       SelectState<threads>& select, FilterState& state) {
  static_assert(cluster <= kMostBlocks && cluster * kQuantiles <= threads);
  int ranks[kQuantiles];
#pragma unroll
  for (int q = 0; q < kQuantiles; ++q) {
    const int rank = (k + cluster - 1) / cluster << q;
    ranks[q] = q == kQuantiles - 1 || rank > k ? k : rank;
  }
  uint32_t least = 0xffffffff;
  most = 0;
#pragma unroll
  for (int i = 0; i < kGroupsPerThread; ++i) {
    least = least < keys[i] ? least : keys[i];
    most = most > keys[i] ? most : keys[i];
  }
  if (threadIdx.x < kQuantiles) state.own_quantiles[threadIdx.x] = 0;
  find_range<threads>(least, most, select);
  const Scale<threads> scale(least, most);
#pragma unroll
  for (int i = 0; i < kGroupsPerThread; ++i) atomicAdd(&select.bins[scale.bin(keys[i])], 1);
  __syncthreads();
  visit_bins<threads>(select, [&](int bin, int above, int size) {
#pragma unroll
    for (int q = 0; q < kQuantiles; ++q)
      if (above < ranks[q] && ranks[q] <= above + size) state.own_quantiles[q] = scale.first(bin);
  });

  const int rank = int(blockIdx.x % cluster);
  cluster_wait();  // for the other blocks to have begun
  if (threadIdx.x < cluster * kQuantiles)
    store_to_cluster(state.quantiles + rank * kQuantiles + threadIdx.x % kQuantiles, threadIdx.x / kQuantiles,
                     state.own_quantiles[threadIdx.x % kQuantiles]);
  cluster_sync();
  // Each quantile is tried: how many elements are sure to reach it?
  uint32_t best = 0;
  if (threadIdx.x < cluster * kQuantiles) {
    const uint32_t key = state.quantiles[threadIdx.x];
    int reach = 0;
#pragma unroll 1
    for (int block = 0; block < cluster; ++block) {
      int most_here = 0;
#pragma unroll
      for (int q = 0; q < kQuantiles; ++q)
        if (state.quantiles[block * kQuantiles + q] >= key) most_here = ranks[q];
      reach += most_here;
    }
    if (reach >= k) best = key;
  }
  uint32_t unused = 0;
  find_range<threads>(unused, best, select);
  return best;
}

// ---- the pass over the row ----

template <typename T, int threads, typename Stages>
DEVICE uint32_t hits(const Stages& ring, int stage, uint32_t threshold) {
  using W = Words<T>;
  uint32_t mask = 0;
#pragma unroll
  for (int j = 0; j < kVectorsPerThread; ++j) {
    const auto v = ring.vectors(stage)[j * threads + threadIdx.x];
#pragma unroll
    for (int w = 0; w < 4; ++w)
      mask |= W::at_least(word(v, w), threshold) & ((W::kPerWord == 2 ? 0x10001u : 1u) << (j * 4 + w));
  }
  return mask;
}

// The element of a stage that a bit of the mask of a thread stands for.
template <typename T, int threads>
DEVICE int element_of(int bit, int thread) {
  const int w = bit % 16, vector = w / 4 * threads + thread;
  return (vector * 4 + w % 4) * Words<T>::kPerWord + bit / 16;
}

// Appends the elements of the masks of a warp to its part of the list. First each thread writes down which they are, a
// few of its own; then the threads share the elements evenly.
template <typename T, int threads, typename Stages>
DEVICE void append(const Stages& ring, int stage, uint32_t mask, int before, int count, uint64_t* list) {
  const int lane = threadIdx.x % 32;
  uint32_t* noted = reinterpret_cast<uint32_t*>(list + before);
#pragma unroll 1
  for (; mask; noted += 2) {
    const int bit = 31 - __clz(mask);
    mask ^= 1u << bit;
    *noted = bit << 5 | lane;
  }
  __syncwarp();
  const T* elements = reinterpret_cast<const T*>(ring.vectors(stage));
  const uint32_t begin = uint32_t(ring.index(stage, 0));
#pragma unroll 1
  for (int i = lane; i < count; i += 32) {
    const uint32_t note = *reinterpret_cast<const uint32_t*>(list + i);
    const int element = element_of<T, threads>(note >> 5, int(threadIdx.x - lane + note % 32));
    list[i] = entry_of(key_of(to_float(elements[element])), begin + element);
  }
}

// A list of elements in shared memory. Most keys lie between these two; none below the first.
struct Filtered {
  int count;
  uint32_t least, most;
};

// The list of vectors [first, last) of a row. `capacity` is 1024 more than 9 / 8 k, and k no more than groups
// there are. The k
// greatest of those vectors are in it, or all, or in a cluster those that are among the k greatest of the row.
template <typename T, int threads, int stages, int cluster, int capacity, bool bulk>
DEVICE Filtered filter(const Vectors<T>& row, int first, int last, int k, uint64_t* ring_memory, uint64_t* list,
                       SelectState<threads>& select, FilterState& state) {
  using W = Words<T>;
  if constexpr (cluster > 1) cluster_arrive();
  clear_bins<threads>(select);
  Ring<T, threads, stages, bulk> ring(row, first, last, ring_memory, state);
#pragma unroll
  for (int i = 0; i < stages; ++i) ring.load(i);
  const int warm = ring.count < stages ? ring.count : stages;
  uint32_t keys[kGroupsPerThread], key, most;
  find_groups<T, threads>(ring, warm, keys);
  if constexpr (cluster > 1) key = find_cluster_threshold<threads, cluster>(keys, k, most, select, state);
  else key = find_threshold<threads>(keys, k, most, select);
  const auto limit_of = [](uint32_t key) {
    return W::key_at_most(key < kLowestKey ? kLowestKey : key > kInfinityKey ? kInfinityKey : key);
  };
  uint32_t limit = limit_of(key);
  const auto key_of_limit = [&] { return key_of(W::value(W::threshold(limit), 0)); };
  uint32_t least = key_of_limit();
  int exceed = cluster > 1 ? 0x7fffffff : warm;  // from that stage on, elements must exceed the limit
  if (threadIdx.x == 0) {
    select.count = 0;
    state.complete = limit;
  }
  __syncthreads();

#pragma unroll 1
  for (int stage = 0; stage < ring.count; ++stage) {
    if (stage >= warm) ring.wait(stage);
    const bool above = stage >= exceed && limit < W::kInfinity;
    uint32_t pending = hits<T, threads>(ring, stage, W::threshold(limit + above));
    if (above && threadIdx.x == 0) state.complete = limit + 1;
    if (!ring.is_whole(stage)) {
      const int begin = ring.begin_of(stage), end = ring.end_of(stage);
#pragma unroll 1
      for (uint32_t rest = pending; rest; rest &= rest - 1) {
        const int element = element_of<T, threads>(31 - __clz(rest & -rest), threadIdx.x);
        if (element < begin || element >= end) pending ^= rest & -rest;
      }
    }
    for (;;) {
      const int mine = __popc(pending), upto = int(sum_upto(mine)), all = __shfl_sync(0xffffffff, upto, 31);
      int at = 0;
      if (all > 0) {
        if (threadIdx.x % 32 == 0) at = atomicAdd(&select.count, all);
        at = __shfl_sync(0xffffffff, at, 0);
      }
      const bool fits = at + all <= capacity;
      if (fits) {
        append<T, threads>(ring, stage, pending, upto - mine, all, list + at);
        pending = 0;
      } else if (threadIdx.x % 32 == 0 && at <= capacity) {
        select.kept = at;  // the first that did not fit
      }
      if (!__syncthreads_or(!fits)) break;
      const int count = select.kept;
      __syncthreads();
      const uint64_t cut = find_cut<threads>(list, count, k, k / 8, least, most, select);
      keep<threads, capacity>(list, count, cut, select);
      limit = limit_of(key_in(cut));
      if constexpr (cluster == 1) least = key_of_limit();
      if (threadIdx.x == 0) {
        select.count = select.kept;
        state.complete = limit + 1;
      }
      __syncthreads();
      exceed = stage + 1;
      if (pending) pending &= hits<T, threads>(ring, stage, W::threshold(limit));
    }
    ring.load(stage + stages);
  }
  __syncthreads();
  return {select.count, least, most};
}

// The lists of all blocks, at most k entries of each, come to `gathered` of the first. Its length there, in others 0.
template <typename T, int threads, int cluster, int capacity>
DEVICE int gather(uint64_t* list, const Filtered& filtered, int k, uint64_t* gathered,
                  SelectState<threads>& select, FilterState& state) {
  int count = filtered.count;
  if (count > k) {
    const uint64_t cut = find_cut<threads>(list, count, k, 0, filtered.least, filtered.most, select);
    keep<threads, capacity>(list, count, cut, select);
    count = k;
    if (threadIdx.x == 0) state.complete = Words<T>::key_at_most(key_in(cut)) + 1;
    __syncthreads();
  }
  const int rank = int(blockIdx.x % cluster);
  if (threadIdx.x < cluster) {
    store_to_cluster(reinterpret_cast<uint32_t*>(state.counts + rank), threadIdx.x, uint32_t(count));
    store_to_cluster(state.completes + rank, threadIdx.x, state.complete);
  }
  cluster_sync();  // the counts are there, and nobody reads its ring any more
  int before = 0, total = 0;
#pragma unroll
  for (int block = 0; block < cluster; ++block) {
    before += block < rank ? state.counts[block] : 0;
    total += state.counts[block];
  }
#pragma unroll 1
  for (int i = threadIdx.x; i < count; i += threads) store_to_cluster(gathered + before + i, 0, list[i]);
  cluster_sync();
  if (threadIdx.x == 0)
#pragma unroll 1
    for (int block = 0; block < cluster; ++block)
      state.complete = state.complete > state.completes[block] ? state.complete : state.completes[block];
  __syncthreads();
  return rank == 0 ? total : 0;
}

}  // namespace deepinfer
