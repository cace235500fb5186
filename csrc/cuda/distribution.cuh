// Distributions over a vocabulary, as weights that are integers: sums of them are exact, whatever their order, and so is
// the choice that a random number makes. The same sequences of roundings as on the CPU.
//
// One selection (select.cuh) gives a row's maximum, or all that top_k leaves, in one pass over the row. Without top_k
// the row is read again, now out of the L2 cache, for the sum of the weights and as far as the element that is drawn. A
// nucleus that does not fit in the list is found by bisection, at 55 passes over the row.
#pragma once

#include "../ops/sampling.h"
#include "select.cuh"

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
  uint32_t last_key;  // of the last element that is kept, in descending order; 0: all are
  int32_t last_index;
  uint64_t floor, total;
  int listed;  // elements in the sorted list, index above key; -1: only the row has them

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

  DEVICE bool keeps(uint32_t key, int64_t index) const {
    return key > last_key || (key == last_key && index <= last_index);
  }
};

struct Filter {
  float temperature, top_p, min_p;
  int64_t top_k;

  DEVICE Filter(const Distributions& from, int64_t row)
      : temperature(from.temperature ? from.temperature[row] : 1.f),
        top_p(from.top_p ? from.top_p[row] : 1.f),
        min_p(from.min_p ? from.min_p[row] : 0.f),
        top_k(from.top_k ? from.top_k[row] : 0) {
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

constexpr int kBatch = 4;  // pieces that a thread reads at a time; a chunk is as much of every thread

// Calls visit(index, x) for each element of a chunk that this thread reads.
template <int threads, typename T, typename Visit>
DEVICE void visit_chunk(const Pieces<T>& pieces, int chunk, Visit& visit) {
  constexpr int n = Pieces<T>::kElements;
  Vec<T, n> batch[kBatch];
  const int first = chunk * kBatch * threads + int(threadIdx.x);
#pragma unroll
  for (int j = 0; j < kBatch; ++j) {
    const int piece = first + j * threads;
    batch[j] = load_access<Reuse::often, T, n>(pieces.start + int64_t(piece) * n, piece < pieces.count);
  }
#pragma unroll
  for (int j = 0; j < kBatch; ++j) {
    const int64_t index = pieces.index(first + j * threads);
#pragma unroll
    for (int i = 0; i < n; ++i)
      if (index + i >= 0 && index + i < pieces.size) visit(index + i, to_float(batch[j].at[i]));
  }
}

template <int threads, typename T>
DEVICE int chunks_of(const Pieces<T>& pieces) {
  return (pieces.count + kBatch * threads - 1) / (kBatch * threads);
}

template <typename Weight>
struct Adder {
  const Weight& weight;
  uint64_t sum = 0;
  DEVICE void operator()(int64_t index, float x) { sum += weight(index, x); }
};

// The sum of weight(index, x) over the row; that of each chunk in `chunk_sums`.
template <int threads, typename T, typename Weight>
DEVICE uint64_t sum_row(const Pieces<T>& pieces, const Weight& weight, uint64_t* chunk_sums, Sums& sums) {
  uint64_t total = 0;
#pragma unroll 1
  for (int chunk = 0; chunk < chunks_of<threads>(pieces); ++chunk) {
    Adder<Weight> adder{weight};
    visit_chunk<threads>(pieces, chunk, adder);
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
DEVICE int64_t pick_from_row(const Pieces<T>& pieces, const Weight& weight, uint64_t target,
                             const uint64_t* chunk_sums, Sums& sums) {
  constexpr int n = Pieces<T>::kElements;
  int chunk = 0;
#pragma unroll 1
  while (target >= chunk_sums[chunk]) target -= chunk_sums[chunk++];
#pragma unroll 1
  for (int j = 0; j < kBatch; ++j) {
    const int piece = (chunk * kBatch + j) * threads + int(threadIdx.x);
    const auto v = load_access<Reuse::often, T, n>(pieces.start + int64_t(piece) * n, piece < pieces.count);
    const int64_t index = pieces.index(piece);
    uint64_t own = 0, total;
#pragma unroll
    for (int i = 0; i < n; ++i)
      if (index + i >= 0 && index + i < pieces.size) own += weight(index + i, to_float(v.at[i]));
    uint64_t before = sum_before<threads>(own, total, sums);
    if (before <= target && target < before + own) {
#pragma unroll
      for (int i = 0; i < n; ++i) {
        if (index + i < 0 || index + i >= pieces.size) continue;
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
  for (int i = threadIdx.x; i < count; i += threads) own += weight(list[i] >> 32, value_of(uint32_t(list[i])));
  sum_before<threads>(own, total, sums);
  return total;
}

template <int threads, typename Weight>
DEVICE int64_t pick_from_list(const uint64_t* list, int count, const Weight& weight, uint64_t target, Sums& sums) {
#pragma unroll 1
  for (int base = 0; base < count; base += threads) {
    const int i = base + int(threadIdx.x);
    const uint64_t own = i < count ? weight(list[i] >> 32, value_of(uint32_t(list[i]))) : 0;
    uint64_t total;
    const uint64_t before = sum_before<threads>(own, total, sums);
    if (before <= target && target < before + own) sums.picked = int64_t(list[i] >> 32);
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
    return of.keeps(key_of(x), index) ? of.weight(x) : 0;
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
    if (own < key || !of.keeps(own, index)) return 0;
    return counted ? 1 : of.weight(x);
  }
};

struct EqualBefore {
  uint32_t key;
  int64_t end;
  DEVICE uint64_t operator()(int64_t index, float x) const { return index < end && key_of(x) == key; }
};

// Makes the last element that is kept the one with which their measure, in descending order, reaches `wanted`.
template <int threads, typename T>
DEVICE void bisect(const Pieces<T>& pieces, Distribution& to, bool counted, uint64_t wanted, uint64_t* chunk_sums,
                   Sums& sums) {
  uint32_t key = 0;
#pragma unroll 1
  for (uint32_t bit = 1u << 31; bit; bit >>= 1)
    if (sum_row<threads>(pieces, Beyond{to, key | bit, counted}, chunk_sums, sums) >= wanted) key |= bit;
  const uint64_t above =
      key == 0xffffffff ? 0 : sum_row<threads>(pieces, Beyond{to, key + 1, counted}, chunk_sums, sums);
  const uint64_t each = counted ? 1 : to.weight(value_of(key));
  const uint64_t equal = (wanted - above + each - 1) / each;
  int64_t index = 0;
#pragma unroll 1
  for (int64_t bit = 1 << 22; bit; bit >>= 1)
    if (sum_row<threads>(pieces, EqualBefore{key, index | bit}, chunk_sums, sums) < equal) index |= bit;
  to.last_key = key;
  to.last_index = int32_t(index);
}

// ---- a row's distribution ----

struct SamplingShared {
  SelectState select;
  Sums sums;
  Distribution distribution;
};

// By all blocks of a cluster; the first one gets the distribution, the others false. `list` is the memory of the lists.
template <int threads, int cluster, int most, typename T>
DEVICE bool find_distribution(const Pieces<T>& pieces, const Filter& filter, int slack, int limit,
                              const Lists& lists, uint64_t* list, Distribution& found, SamplingShared& shared) {
  const bool listed = filter.top_k <= most && filter.top_k < pieces.size;
  const bool whole = filter.top_k == pieces.size && !(filter.top_p < 1.f);
  const int k = filter.greedy() || whole ? 1 : listed ? int(filter.top_k) : most;
  const int rank = int(blockIdx.x % cluster);
  const int share = (pieces.count + cluster - 1) / cluster;
  const int first = share * rank < pieces.count ? share * rank : pieces.count;
  const int last = first + share < pieces.count ? first + share : pieces.count;
  int count = select_pieces<threads>(pieces, first, last, k, slack, limit, lists, shared.select);
  count = merge_cluster<threads, cluster, sizeof(T) == 4 ? 3 : 2>(lists, count, k, pieces.size, shared.select);
  if (rank != 0) return false;
  uint64_t* chunk_sums = reinterpret_cast<uint64_t*>(lists.bins);

  const auto sort_list = [&](bool by_index, int padded) {
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < padded; i += threads) {
      const uint64_t key = lists.kept_keys[i], index = uint32_t(lists.kept_indices[i]);
      list[i] = i >= count ? ~uint64_t(0) : by_index ? index << 32 | key : (key ^ 0xffffffff) << 32 | index;
    }
    __syncthreads();
    sort_ascending<threads>(list, padded);
  };
  int padded = 1;
  while (padded < count) padded *= 2;
  sort_list(false, padded);
  found = Distribution{};
  found.greatest = value_of(~uint32_t(list[0] >> 32));
  found.only = -1;
  found.inverse = 1.f / filter.temperature;
  found.last_key = 0;
  found.floor = 1;
  found.listed = -1;
  if (filter.greedy() || !(fabsf(found.greatest) < __int_as_float(0x7f800000))) {
    found.only = uint32_t(list[0]);
    return true;
  }
  if (!whole) {
    // Weights in descending order, as far as the list goes.
    uint64_t own = 0, in_list, mass;
#pragma unroll 1
    for (int i = threadIdx.x; i < count; i += threads) own += found.weight(value_of(~uint32_t(list[i] >> 32)));
    sum_before<threads>(own, in_list, shared.sums);
    if (listed) {
      mass = nucleus_mass(filter.top_p, in_list);
    } else {
      if (filter.top_k < pieces.size) bisect<threads>(pieces, found, true, filter.top_k, chunk_sums, shared.sums);
      mass = nucleus_mass(filter.top_p, sum_row<threads>(pieces, Kept{found}, chunk_sums, shared.sums));
    }
    if (mass <= in_list) {
      uint64_t carried = 0;
#pragma unroll 1
      for (int base = 0; base < count; base += threads) {
        const int i = base + int(threadIdx.x);
        own = i < count ? found.weight(value_of(~uint32_t(list[i] >> 32))) : 0;
        uint64_t total;
        const uint64_t before = carried + sum_before<threads>(own, total, shared.sums);
        if (before < mass && mass <= before + own) shared.sums.picked = int64_t(list[i]);
        carried += total;
        if (carried >= mass) break;
      }
      __syncthreads();
      const uint64_t last_entry = uint64_t(shared.sums.picked);
      found.last_key = ~uint32_t(last_entry >> 32);
      found.last_index = int32_t(uint32_t(last_entry));
      sort_list(true, padded);
      found.listed = count;
    } else if (filter.top_p < 1.f) {
      bisect<threads>(pieces, found, false, mass, chunk_sums, shared.sums);
    }
  }
  if (filter.min_p > 0.f) {
    const double least = ceil(double(filter.min_p < 1.f ? filter.min_p : 1.f) * double(kWeightOne));
    found.floor = least > 1 ? uint64_t(least) : 1;
  }
  found.total = found.listed >= 0 ? sum_list<threads>(list, count, Kept{found}, shared.sums)
                                  : sum_row<threads>(pieces, Kept{found}, chunk_sums, shared.sums);
  return true;
}

// The element that a random number picks.
template <int threads, typename T, typename Weight>
DEVICE int64_t pick(const Pieces<T>& pieces, const Distribution& from, const Weight& weight, uint64_t target,
                    const uint64_t* list, const uint64_t* chunk_sums, Sums& sums) {
  if (from.listed >= 0) return pick_from_list<threads>(list, from.listed, weight, target, sums);
  return pick_from_row<threads>(pieces, weight, target, chunk_sums, sums);
}

}  // namespace deepinfer
