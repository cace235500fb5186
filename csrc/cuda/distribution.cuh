// Distributions over a vocabulary, as weights that are integers: sums of them are exact, whatever their order, and so
// is the choice that a random number makes. The same sequences of roundings as on the CPU.
//
// One selection (filter.cuh) gives a row's maximum, or all that top_k leaves, in one pass over the row. Without top_k
// the row is read again, now out of the L2 cache, for the sum of the weights and as far as the element that is drawn. A
// nucleus that does not fit in the list is found by bisection, at 55 passes over the row.
#pragma once

#include "../ops/sampling.h"
#include "filter.cuh"

namespace deepinfer {

struct Philox {
  uint32_t words[4];

  DEVICE Philox(uint64_t key, uint64_t counter, uint32_t stream)
      : words{uint32_t(counter), uint32_t(counter >> 32), stream, 0} {
    uint32_t low = uint32_t(key), high = uint32_t(key >> 32);
#pragma unroll
    for (int round = 0; round < 10; ++round) {
      const uint32_t a = __umulhi(0xD2511F53u, words[0]), b = __umulhi(0xCD9E8D57u, words[2]);
      const uint32_t a_low = 0xD2511F53u * words[0], b_low = 0xCD9E8D57u * words[2];
      words[0] = b ^ words[1] ^ low;
      words[1] = b_low;
      words[2] = a ^ words[3] ^ high;
      words[3] = a_low;
      low += 0x9E3779B9u;
      high += 0xBB67AE85u;
    }
  }

  DEVICE uint64_t first() const { return uint64_t(words[1]) << 32 | words[0]; }
  DEVICE uint64_t second() const { return uint64_t(words[3]) << 32 | words[2]; }
};

struct Distribution {
  int64_t only;  // the one element that may be taken, if not -1
  float greatest, inverse;
  uint64_t last;  // the least entry that is kept
  uint64_t floor, total;
  int listed;  // entries in the list, in the order of their indices; -1: only the row has them

  // exp((x - greatest) / temperature) in units of 2^-40; 0 below the floor.
  DEVICE uint64_t weight(float x) const {
    const float d = (x - greatest) * inverse;
    if (!(d > -28.f) || !(x > -__int_as_float(0x7f800000))) return 0;
    const float magic = 12582912.f;
    const float n = (d * 1.44269504088896341f + magic) - magic;
    float r = fmaf(n, -0.693359375f, d);
    r = fmaf(n, 2.12194440e-4f, r);
    float p = 1.3888889e-3f;
    p = fmaf(p, r, 8.3333333e-3f);
    p = fmaf(p, r, 4.1666667e-2f);
    p = fmaf(p, r, 1.6666667e-1f);
    p = fmaf(p, r, 0.5f);
    p = fmaf(p * r, r, r) + 1.f;
    const uint64_t weight = __float2ull_rz(p * __int_as_float((int(n) + 127 + 40) << 23));
    return weight >= floor ? weight : 0;
  }
};

struct Filter {
  float temperature, top_p, min_p;
  int64_t top_k;
  bool keep_ties;

  DEVICE Filter(const Distributions& from, int64_t row)
      : temperature(from.temperature ? from.temperature[row] : from.all.temperature),
        top_p(from.top_p ? from.top_p[row] : from.all.top_p),
        min_p(from.min_p ? from.min_p[row] : from.all.min_p),
        top_k(from.top_k ? from.top_k[row] : from.all.top_k),
        keep_ties(from.keep_ties) {
    if (top_k <= 0 || top_k > from.size) top_k = from.size;
  }

  DEVICE bool greedy() const { return !(temperature >= kLeastTemperature); }
};

DEVICE uint64_t nucleus_mass(float top_p, uint64_t total) {
  if (!(top_p < 1.f)) return total;
  const double mass = ceil(double(top_p) * double(total));
  return mass < 1 ? 1 : mass < double(total) ? uint64_t(mass) : total;
}

DEVICE uint64_t portion(uint64_t random, uint64_t total) { return __umul64hi(random, total); }

// ---- sums over the block; `Sums` is in shared memory ----

struct Sums {
  uint64_t warps[32];
  uint64_t target;
  int64_t picked;
  int chunk;
};

// The sum over all threads before this one; `total` is that of all. May be called again and again.
template <int threads>
DEVICE uint64_t sum_before(uint64_t x, uint64_t& total, Sums& sums) {
  uint64_t upto = x;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint64_t other = __shfl_up_sync(0xffffffff, upto, step);
    if (threadIdx.x % 32 >= step) upto += other;
  }
  __syncthreads();
  if (threadIdx.x % 32 == 31) sums.warps[threadIdx.x / 32] = upto;
  __syncthreads();
  total = 0;
  uint64_t before = upto - x;
#pragma unroll
  for (int warp = 0; warp < threads / 32; ++warp) {
    if (warp < threadIdx.x / 32) before += sums.warps[warp];
    total += sums.warps[warp];
  }
  return before;
}

// ---- passes over the row ----

constexpr int kBatch = 4;  // vectors that a thread reads at a time; a chunk is as much of every thread

// Calls visit(index, x) for each element of a chunk that this thread reads.
template <int threads, typename T, typename Visit>
DEVICE void visit_chunk(const Vectors<T>& vectors, int chunk, Visit& visit) {
  constexpr int n = Vectors<T>::kElements;
  Vec<T, n> batch[kBatch];
  const int first = chunk * kBatch * threads + int(threadIdx.x);
#pragma unroll
  for (int j = 0; j < kBatch; ++j) {
    const int vector = first + j * threads;
    batch[j] = load_access<T, n>(vectors.start + int64_t(vector) * n, vector < vectors.count);
  }
#pragma unroll
  for (int j = 0; j < kBatch; ++j) {
    const int64_t index = vectors.index(first + j * threads);
#pragma unroll
    for (int i = 0; i < n; ++i)
      if (index + i >= 0 && index + i < vectors.size) visit(index + i, to_float(batch[j].at[i]));
  }
}

template <int threads, typename T>
DEVICE int chunks_of(const Vectors<T>& vectors) {
  return (vectors.count + kBatch * threads - 1) / (kBatch * threads);
}

template <typename Weight>
struct Adder {
  const Weight& weight;
  uint64_t sum = 0;
  DEVICE void operator()(int64_t index, float x) { sum += weight(index, x); }
};

// The sum of weight(index, x) over the row; that of each chunk in `chunk_sums`.
template <int threads, typename T, typename Weight>
DEVICE uint64_t sum_row(const Vectors<T>& vectors, const Weight& weight, uint64_t* chunk_sums, Sums& sums) {
  uint64_t total = 0;
#pragma unroll 1
  for (int chunk = 0; chunk < chunks_of<threads>(vectors); ++chunk) {
    Adder<Weight> adder{weight};
    visit_chunk<threads>(vectors, chunk, adder);
    uint64_t here;
    sum_before<threads>(adder.sum, here, sums);
    if (threadIdx.x == 0) chunk_sums[chunk] = here;
    total += here;
  }
  __syncthreads();
  return total;
}

// The first element up to which the weights sum to more than `target`, given the sums of the chunks.
template <int threads, typename T, typename Weight>
DEVICE int64_t pick_from_row(const Vectors<T>& vectors, const Weight& weight, uint64_t target,
                             const uint64_t* chunk_sums, Sums& sums) {
  constexpr int n = Vectors<T>::kElements;
  int chunk = 0;
#pragma unroll 1
  while (target >= chunk_sums[chunk]) target -= chunk_sums[chunk++];
#pragma unroll 1
  for (int j = 0; j < kBatch; ++j) {
    const int vector = (chunk * kBatch + j) * threads + int(threadIdx.x);
    const auto v = load_access<T, n>(vectors.start + int64_t(vector) * n, vector < vectors.count);
    const int64_t index = vectors.index(vector);
    uint64_t own = 0, total;
#pragma unroll
    for (int i = 0; i < n; ++i)
      if (index + i >= 0 && index + i < vectors.size) own += weight(index + i, to_float(v.at[i]));
    uint64_t before = sum_before<threads>(own, total, sums);
    if (before <= target && target < before + own) {
#pragma unroll
      for (int i = 0; i < n; ++i) {
        if (index + i < 0 || index + i >= vectors.size) continue;
        const uint64_t here = weight(index + i, to_float(v.at[i]));
        if (before <= target && target < before + here) sums.picked = index + i;
        before += here;
      }
    }
    if (target < total) break;
    target -= total;
  }
  __syncthreads();
  return sums.picked;
}

// The same over the list, which is sorted by index.
template <int threads, typename Weight>
DEVICE uint64_t sum_list(const uint64_t* list, int count, const Weight& weight, Sums& sums) {
  uint64_t own = 0, total;
#pragma unroll 1
  for (int i = threadIdx.x; i < count; i += threads) own += weight(index_in(list[i]), value_of(key_in(list[i])));
  sum_before<threads>(own, total, sums);
  return total;
}

template <int threads, typename Weight>
DEVICE int64_t pick_from_list(const uint64_t* list, int count, const Weight& weight, uint64_t target, Sums& sums) {
#pragma unroll 1
  for (int base = 0; base < count; base += threads) {
    const int i = base + int(threadIdx.x);
    const uint64_t own = i < count ? weight(index_in(list[i]), value_of(key_in(list[i]))) : 0;
    uint64_t total;
    const uint64_t before = sum_before<threads>(own, total, sums);
    if (before <= target && target < before + own) sums.picked = index_in(list[i]);
    if (target < total) break;
    target -= total;
  }
  __syncthreads();
  return sums.picked;
}

// What a distribution keeps.
struct Kept {
  const Distribution& of;
  DEVICE uint64_t operator()(int64_t index, float x) const {
    return entry_of(key_of(x), uint32_t(index)) >= of.last ? of.weight(x) : 0;
  }
};

// ---- the cut by bisection ----

// The measure of elements from a key on: their number or their weight.
struct Beyond {
  const Distribution& of;
  uint32_t key;
  bool counted;
  DEVICE uint64_t operator()(int64_t index, float x) const {
    const uint32_t own = key_of(x);
    if (own < key || entry_of(own, uint32_t(index)) < of.last) return 0;
    return counted ? 1 : of.weight(x);
  }
};

struct EqualBefore {
  uint32_t key;
  int64_t end;
  DEVICE uint64_t operator()(int64_t index, float x) const { return index < end && key_of(x) == key; }
};

// Makes the last element that is kept the one with which their measure, in descending order, reaches `wanted`, or with
// ties the last one that equals it.
template <int threads, typename T>
DEVICE void bisect(const Vectors<T>& vectors, Distribution& to, bool counted, bool ties, uint64_t wanted,
                   uint64_t* chunk_sums, Sums& sums) {
  uint32_t key = 0;
#pragma unroll 1
  for (uint32_t bit = 1u << 31; bit; bit >>= 1)
    if (sum_row<threads>(vectors, Beyond{to, key | bit, counted}, chunk_sums, sums) >= wanted) key |= bit;
  const uint64_t above =
      key == 0xffffffff ? 0 : sum_row<threads>(vectors, Beyond{to, key + 1, counted}, chunk_sums, sums);
  const uint64_t each = counted ? 1 : to.weight(value_of(key));
  const uint64_t equal = (wanted - above + each - 1) / each;
  // Mostly all that equal it stay.
  if (ties || sum_row<threads>(vectors, EqualBefore{key, vectors.size}, chunk_sums, sums) == equal) {
    to.last = entry_of(key, 0xffffffff);
    return;
  }
  int64_t index = 0;
#pragma unroll 1
  for (int64_t bit = 1 << 22; bit; bit >>= 1)
    if (sum_row<threads>(vectors, EqualBefore{key, index | bit}, chunk_sums, sums) < equal) index |= bit;
  to.last = entry_of(key, uint32_t(index));
}

// ---- a row's distribution ----

template <int threads>
struct SamplingShared {
  SelectState<threads> select;
  FilterState filter;
  Sums sums;
};

// The memory of a block: the ring and the list of the filter, which later hold the entries that a distribution may keep
// and the sums of the row's chunks. What a cluster gathers is in the ring.
struct SamplingMemory {
  uint64_t *ring, *list, *entries, *sums;

  template <typename Config>
  DEVICE SamplingMemory(uint64_t* shared, const Config& c)
      : ring(shared), list(ring + c.threads * kVectorsPerThread * kVectorBytes / 8 * c.stages),
        entries(c.cluster > 1 ? ring : list), sums(c.cluster > 1 ? list : ring) {}
};

// By all blocks of a cluster; the first one gets the distribution, the others false. It may point to
// memory.entries.
template <auto c, typename T>
DEVICE bool find_distribution(const Vectors<T>& vectors, const Filter& filters, const SamplingMemory& memory,
                              Distribution& found, SamplingShared<c.threads>& shared) {
  constexpr int threads = c.threads;
  bool listed = filters.top_k <= c.most && filters.top_k < vectors.size;
  const bool whole = filters.top_k == vectors.size && !(filters.top_p < 1.f);
  const int k = filters.greedy() || whole ? 1 : listed ? int(filters.top_k) : c.most;
  const int rank = int(blockIdx.x % c.cluster);
  const int share = (vectors.count + c.cluster - 1) / c.cluster;
  const int first = share * rank < vectors.count ? share * rank : vectors.count;
  const int last = first + share < vectors.count ? first + share : vectors.count;
  const Filtered filtered = filter<T, threads, c.stages, c.cluster, c.capacity, c.bulk>(
      vectors, first, last, k, memory.ring, memory.list, shared.select, shared.filter);
  int count = filtered.count;
  if constexpr (c.cluster > 1) {
    count =
        gather<T, threads, c.cluster, c.capacity>(memory.list, filtered, k, memory.ring, shared.select, shared.filter);
    if (rank != 0) return false;
  }
  // The entries in descending order.
  uint64_t* list = memory.entries;
  int wanted = count < k ? count : k;
  uint64_t cut = find_cut<threads>(list, count, wanted, 0, filtered.least, filtered.most, shared.select);
  const uint64_t tied = entry_of(key_in(cut), 0xffffffff);
  const bool ties_stay = listed && filters.keep_ties;
  if (ties_stay) {
    uint64_t own = 0, reach;
    for (int i = threadIdx.x; i < count; i += threads) own += list[i] >= tied;
    sum_before<threads>(own, reach, shared.sums);
    listed = Words<T>::key_at_most(key_in(cut)) >= shared.filter.complete && reach <= c.most;
    if (listed) {
      cut = tied;
      wanted = int(reach);
    }
  }
  put_in_order<threads>(list, count, cut, wanted, ByValue<threads>(filtered.least, filtered.most), memory.sums,
                        shared.select, [&](int at, uint64_t entry) { list[at] = entry; });
  count = wanted;
  __syncthreads();
  uint64_t* chunk_sums = memory.sums;
  found = Distribution{};
  found.greatest = value_of(key_in(list[0]));
  found.only = -1;
  found.inverse = 1.f / filters.temperature;
  found.floor = 1;
  found.listed = -1;
  if (filters.greedy() || !(fabsf(found.greatest) < __int_as_float(0x7f800000))) {
    found.only = index_in(list[0]);
    return true;
  }
  if (!whole) {
    // Weights in descending order, as far as the list goes.
    uint64_t own = 0, in_list, mass;
#pragma unroll 1
    for (int i = threadIdx.x; i < count; i += threads) own += found.weight(value_of(key_in(list[i])));
    sum_before<threads>(own, in_list, shared.sums);
    if (listed) {
      mass = nucleus_mass(filters.top_p, in_list);
    } else {
      if (ties_stay) found.last = tied;
      else if (filters.top_k < vectors.size)
        bisect<threads>(vectors, found, true, filters.keep_ties, filters.top_k, chunk_sums, shared.sums);
      mass = nucleus_mass(filters.top_p, sum_row<threads>(vectors, Kept{found}, chunk_sums, shared.sums));
    }
    if (mass <= in_list) {
      uint64_t carried = 0;
#pragma unroll 1
      for (int base = 0; base < count; base += threads) {
        const int i = base + int(threadIdx.x);
        own = i < count ? found.weight(value_of(key_in(list[i]))) : 0;
        uint64_t total;
        const uint64_t before = carried + sum_before<threads>(own, total, shared.sums);
        if (before < mass && mass <= before + own) shared.sums.picked = int64_t(list[i]);
        carried += total;
        if (carried >= mass) break;
      }
      __syncthreads();
      found.last = uint64_t(shared.sums.picked);
      const int padded = power_of_two_from(count);
      for (int i = count + int(threadIdx.x); i < padded; i += threads) list[i] = 0;
      __syncthreads();
      sort_entries<threads, ByIndex<threads>>(list, padded);
      found.listed = count;
    } else if (filters.top_p < 1.f) {
      bisect<threads>(vectors, found, false, false, mass, chunk_sums, shared.sums);
    }
  }
  if (filters.min_p > 0.f) {
    const double least = ceil(double(filters.min_p < 1.f ? filters.min_p : 1.f) * double(kWeightOne));
    found.floor = least > 1 ? uint64_t(least) : 1;
  }
  found.total = found.listed >= 0 ? sum_list<threads>(list, count, Kept{found}, shared.sums)
                                  : sum_row<threads>(vectors, Kept{found}, chunk_sums, shared.sums);
  return true;
}

// The element that a random number picks.
template <int threads, typename T, typename Weight>
DEVICE int64_t pick(const Vectors<T>& vectors, const Distribution& from, const Weight& weight, uint64_t target,
                    const uint64_t* list, const uint64_t* chunk_sums, Sums& sums) {
  if (from.listed >= 0) return pick_from_list<threads>(list, from.listed, weight, target, sums);
  return pick_from_row<threads>(vectors, weight, target, chunk_sums, sums);
}

}  // namespace deepinfer
