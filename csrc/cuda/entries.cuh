// Lists of a row's elements in shared memory: finding the k greatest of a list, and putting those in order.
//
// An element is one integer of 64 bits, its entry: greater is better, and no two of a row are equal. A histogram over
// the keys, of a bin for each thread, finds the bin in which the k-th lies; the few entries in it are compared with
// each other. Only if there are many, or if equal keys are to be told apart by their indices, more histograms follow.
#pragma once

#include "device.cuh"

namespace deepinfer {

constexpr uint32_t kNanKey = 0xffffffff, kInfinityKey = 0xff800000, kLowestKey = 0x007fffff;  // NaN, inf, -inf

// An integer in the order of the floats: -0 equals +0, and NaN of either sign is the greatest. Never 0.
DEVICE uint32_t key_of(float x) {
  if (x != x) return kNanKey;
  const uint32_t bits = __float_as_uint(x + 0.f);  // -0 + 0 is +0
  return bits ^ (uint32_t(int32_t(bits) >> 31) | 0x80000000);
}

DEVICE float value_of(uint32_t key) { return __uint_as_float(key ^ (key >> 31 ? 0x80000000 : 0xffffffff)); }

DEVICE int power_of_two_from(int x) { return x <= 1 ? 1 : 1 << (32 - __clz(x - 1)); }

DEVICE uint64_t entry_of(uint32_t key, uint32_t index) { return uint64_t(key) << 32 | ~index; }
DEVICE uint32_t key_in(uint64_t entry) { return uint32_t(entry >> 32); }
DEVICE uint32_t index_in(uint64_t entry) { return ~uint32_t(entry); }

struct Digit {
  int digit, wanted, size;  // a bin, how many are wanted of it, how many are in it
};

// Shared memory of a block. The bins are 0 between the functions below.
template <int bin_count>
struct SelectState {
  uint32_t bins[bin_count];
  uint64_t few[128];
  uint64_t cut;
  uint32_t warp_totals[32], warp_least[32], warp_most[32];
  Digit found;
  int count, kept;
};

template <int threads, int bins>
DEVICE void clear_bins(SelectState<bins>& state) {
#pragma unroll
  for (int i = 0; i < bins / threads; ++i) state.bins[threadIdx.x + i * threads] = 0;
}

DEVICE uint32_t lanes_below() { return (1u << threadIdx.x % 32) - 1; }

// The sum over the threads of the warp up to this one.
DEVICE uint32_t sum_upto(uint32_t x) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint32_t other = __shfl_up_sync(0xffffffff, x, step);
    if (threadIdx.x % 32 >= step) x += other;
  }
  return x;
}

// The sum over the threads of the block before this one.
template <int threads, int bins>
DEVICE uint32_t sum_before(uint32_t x, SelectState<bins>& state) {
  const uint32_t upto = sum_upto(x), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (lane == 31) state.warp_totals[warp] = upto;
  __syncthreads();
  return upto - x + __reduce_add_sync(0xffffffff, lane < warp ? state.warp_totals[lane] : 0);
}

// Reads and empties the bins. `visit(bin, above, size)` is called for each of this thread's that is not empty, `above`
// the number of entries in greater bins.
template <int threads, int bins, typename Visit>
DEVICE void visit_bins(SelectState<bins>& state, Visit&& visit) {
  constexpr int per = bins / threads;
  const int first = bins - per * (int(threadIdx.x) + 1);
  uint32_t own[per], total = 0;
#pragma unroll
  for (int i = 0; i < per; ++i) {
    total += own[i] = state.bins[first + i];
    state.bins[first + i] = 0;
  }
  uint32_t above = sum_before<threads>(total, state);
#pragma unroll
  for (int i = per - 1; i >= 0; --i) {
    if (own[i] > 0) visit(first + i, int(above), int(own[i]));
    above += own[i];
  }
  __syncthreads();
}

// The least and the greatest of the words that the threads hold.
template <int threads, int bins>
DEVICE void find_range(uint32_t& least, uint32_t& most, SelectState<bins>& state) {
  const uint32_t lane = threadIdx.x % 32;
  least = __reduce_min_sync(0xffffffff, least);
  most = __reduce_max_sync(0xffffffff, most);
  if (lane == 0) {
    state.warp_least[threadIdx.x / 32] = least;
    state.warp_most[threadIdx.x / 32] = most;
  }
  __syncthreads();
  const bool there = lane < threads / 32;
  least = __reduce_min_sync(0xffffffff, there ? state.warp_least[lane] : 0xffffffff);
  most = __reduce_max_sync(0xffffffff, there ? state.warp_most[lane] : 0);
}

// A range of words, cut in as many bins of 2^shift as there are threads. What is above goes to the last bin.
template <int bins>
struct Scale {
  uint32_t least;
  int shift;

  DEVICE Scale(uint32_t least, uint32_t most) : least(least) {
    const int bits = 32 - __clz((most - least) / bins);
    shift = most > least ? bits : 0;
  }
  DEVICE int bin(uint32_t word) const {
    const uint32_t at = (word - least) >> shift;
    return int(at < bins ? at : bins - 1);
  }
  DEVICE uint32_t first(int bin) const { return least + (uint32_t(bin) << shift); }
  // Of a bin, if no word exceeds `most`.
  DEVICE uint32_t last(int bin, uint32_t most) const {
    const uint32_t width = (1u << shift) - 1;
    return bin == bins - 1 || most - first(bin) < width ? most : first(bin) + width;
  }
};

// The k-th greatest of `count` >= k >= 1 entries whose keys are at least `least` and mostly at most `most`. All threads
// get it, or an integer below it and above all lower entries; with some slack one above which up to `slack` more lie.
template <int threads>
DEVICE uint64_t find_cut(const uint64_t* list, int count, int k, int slack, uint32_t least, uint32_t most,
                         SelectState<threads>& state) {
  constexpr int few = int(sizeof(state.few) / sizeof(uint64_t));
  static_assert(threads >= few);
  // The words in which the entries differ: their keys, or the lower half of entries of one key.
  bool by_index = false;
  uint32_t key = 0, low = 0, high = 0xffffffff;
  int wanted = k;
  const auto is_member = [&](uint64_t entry) {
    const uint32_t word = by_index ? uint32_t(entry) : key_in(entry);
    return (!by_index || key_in(entry) == key) && word >= low && word <= high;
  };
  for (;;) {
    const Scale<threads> scale(least, most);
#pragma unroll 2
    for (int i = threadIdx.x; i < count; i += threads) {
      const uint64_t entry = list[i];
      if (is_member(entry)) atomicAdd(&state.bins[scale.bin(by_index ? uint32_t(entry) : key_in(entry))], 1);
    }
    __syncthreads();
    visit_bins<threads>(state, [&](int bin, int above, int size) {
      if (above < wanted && wanted <= above + size) state.found = {bin, wanted - above, size};
    });
    const Digit found = state.found;
    high = scale.last(found.digit, high);
    low = scale.first(found.digit);
    wanted = found.wanted;
    if (found.size <= wanted + slack) return by_index ? uint64_t(key) << 32 | low : uint64_t(low) << 32;
    if (found.size <= few) break;

    // Many: the range of the words that are left.
    least = 0xffffffff, most = 0;
#pragma unroll 1
    for (int i = threadIdx.x; i < count; i += threads) {
      const uint64_t entry = list[i];
      if (!is_member(entry)) continue;
      const uint32_t word = by_index ? uint32_t(entry) : key_in(entry);
      least = least < word ? least : word;
      most = most > word ? most : word;
    }
    find_range<threads>(least, most, state);
    if (least == most) {
      by_index = true;
      key = least;
      least = low = 0;
      most = high = 0xffffffff;
    }
  }
  if (threadIdx.x == 0) state.kept = 0;
  __syncthreads();
#pragma unroll 2
  for (int i = threadIdx.x; i < count; i += threads) {
    const uint64_t entry = list[i];
    if (is_member(entry)) state.few[atomicAdd(&state.kept, 1)] = entry;
  }
  __syncthreads();
  const int members = state.kept;
  if (threadIdx.x < members) {
    const uint64_t own = state.few[threadIdx.x];
    int rank = 0;
#pragma unroll 2
    for (int j = 0; j < members; ++j) rank += state.few[j] > own;
    if (rank == wanted - 1) state.cut = own;
  }
  __syncthreads();
  return state.cut;
}

// Leaves the entries from `cut` on at the head of the list, in no order; `capacity` entries at most.
template <int threads, int capacity>
DEVICE void keep(uint64_t* list, int count, uint64_t cut, SelectState<threads>& state) {
  constexpr int per = (capacity + threads - 1) / threads;
  uint64_t own[per];
#pragma unroll
  for (int i = 0; i < per; ++i) {
    const int at = i * threads + int(threadIdx.x);
    own[i] = at < count ? list[at] : 0;
  }
  if (threadIdx.x == 0) state.kept = 0;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < per; ++i) {
    const bool stays = own[i] >= cut;  // no cut is 0
    const uint32_t ballot = __ballot_sync(0xffffffff, stays);
    int at = 0;
    if (threadIdx.x % 32 == 0 && ballot) at = atomicAdd(&state.kept, __popc(ballot));
    at = __shfl_sync(0xffffffff, at, 0) + __popc(ballot & lanes_below());
    if (stays) list[at] = own[i];
  }
  __syncthreads();
}

// ---- order ----

// How entries are put in order: by rank, and in buckets that rise with it.
template <int buckets>
struct ByIndex {
  int shift;
  DEVICE ByIndex(uint32_t size) { shift = size > buckets ? 32 - __clz((size - 1) / buckets) : 0; }
  DEVICE int bucket(uint64_t entry) const { return int(index_in(entry) >> shift); }
  static DEVICE uint64_t rank(uint64_t entry) { return index_in(entry); }
};
template <int buckets>
struct ByValue {
  Scale<buckets> scale;
  // Of entries from the key `least` on, mostly up to `most`.
  DEVICE ByValue(uint32_t least, uint32_t most) : scale(least, most) {}
  DEVICE int bucket(uint64_t entry) const { return buckets - 1 - scale.bin(key_in(entry)); }
  static DEVICE uint64_t rank(uint64_t entry) { return ~entry; }
};

// Sorts entries[0, count) so that their ranks rise, count a power of two: a bitonic network. Steps within 64 entries
// stay within a warp.
template <int threads, typename Order>
DEVICE void sort_entries(uint64_t* entries, int count) {
#pragma unroll 1
  for (int run = 2; run <= count; run *= 2) {
#pragma unroll 1
    for (int step = run / 2; step > 0; step /= 2) {
#pragma unroll 1
      for (int pair = threadIdx.x; pair < count / 2; pair += threads) {
        const int low = 2 * pair - (pair & (step - 1));
        const uint64_t a = entries[low], b = entries[low + step];
        if ((Order::rank(a) > Order::rank(b)) == ((low & run) == 0)) {
          entries[low] = b;
          entries[low + step] = a;
        }
      }
      if (step > 32 || (step == 1 && run >= 64)) __syncthreads();
      else __syncwarp();
    }
  }
  __syncthreads();
}

// Calls place(i, entry) for each of the `k` entries from `cut` on, i its place in the order. A counting sort with a
// bucket for each thread, and comparisons within buckets; if one is full, a bitonic sort. `kept` holds k entries,
// rounded up to a power of two.
template <int threads, typename Order, typename Place>
DEVICE void put_in_order(const uint64_t* list, int count, uint64_t cut, int k, const Order& order, uint64_t* kept,
                         SelectState<threads>& state, Place&& place) {
  constexpr uint32_t kFullBucket = 64;
#pragma unroll 2
  for (int i = threadIdx.x; i < count; i += threads) {
    const uint64_t entry = list[i];
    if (entry >= cut) atomicAdd(&state.bins[order.bucket(entry)], 1);
  }
  __syncthreads();
  const uint32_t own = state.bins[threadIdx.x];
  state.bins[threadIdx.x] = sum_before<threads>(own, state);
  const bool full = __syncthreads_or(own > kFullBucket);
#pragma unroll 2
  for (int i = threadIdx.x; i < count; i += threads) {
    const uint64_t entry = list[i];
    if (entry >= cut) kept[atomicAdd(&state.bins[order.bucket(entry)], 1)] = entry;
  }
  __syncthreads();
  if (full) {
    const int padded = power_of_two_from(k);
    for (int i = k + int(threadIdx.x); i < padded; i += threads) kept[i] = 0;
    __syncthreads();
    sort_entries<threads, Order>(kept, padded);
#pragma unroll 1
    for (int i = threadIdx.x; i < k; i += threads) place(i, kept[i]);
  } else {
#pragma unroll 1
    for (int i = threadIdx.x; i < k; i += threads) {
      const uint64_t entry = kept[i];
      const int bucket = order.bucket(entry);
      const int begin = bucket == 0 ? 0 : int(state.bins[bucket - 1]), end = int(state.bins[bucket]);
      int rank = begin;
#pragma unroll 1
      for (int j = begin; j < end; ++j) rank += Order::rank(kept[j]) < Order::rank(entry);
      place(rank, entry);
    }
  }
  __syncthreads();
  clear_bins<threads>(state);
}

}  // namespace deepinfer
