// Selection of the greatest elements of a row by the threads of a block, without sorting the row.
//
// The row is read once, in order, 16 bytes a thread and access, the next accesses under way while these are looked at.
// A list in shared memory takes what exceeds the k-th greatest so far, the threshold; most elements cost a conversion
// and a comparison. When the list is full, a radix selection over the bits of its keys cuts it to k and raises the
// threshold. What equals the threshold comes after k others, so it is never among the first of equals. Rows in ascending
// order are the worst case: a cut after every round.
#pragma once

#include "device.cuh"
#include "hopper.cuh"

namespace deepinfer {

constexpr int kPerThread = 16;  // elements of a thread in one round
constexpr int kBins = 2048;     // of a radix pass: 11 bits
constexpr uint32_t kInfinityKey = 0xff800000;

// An integer in the order of the floats: -0 equals +0, and NaN of either sign is the greatest. Never 0.
DEVICE uint32_t key_of(float x) {
  if (x != x) return 0xffffffff;
  const uint32_t bits = __float_as_uint(x + 0.f);  // -0 + 0 is +0
  return bits ^ (uint32_t(int32_t(bits) >> 31) | 0x80000000);
}

DEVICE float value_of(uint32_t key) { return __uint_as_float(key ^ (key >> 31 ? 0x80000000 : 0xffffffff)); }

// What stays of a list: keys above `key`, and of the equal ones those up to `index`.
struct Cut {
  uint32_t key;
  int32_t index;
};

DEVICE bool stays(const Cut& cut, uint32_t key, int32_t index) {
  return key > cut.key || (key == cut.key && index <= cut.index);
}

struct Digit {
  int digit, wanted, size;
};

// Shared memory of a block.
struct Lists {
  uint32_t* keys;     // the list, [capacity]
  int32_t* indices;
  uint32_t* kept_keys;  // what a cut leaves, [k and some slack]
  int32_t* kept_indices;
  uint32_t* bins;  // [kBins]
};

template <typename Config>
DEVICE Lists lists_in(uint64_t* shared, const Config& c) {
  Lists lists;
  lists.keys = reinterpret_cast<uint32_t*>(shared);
  lists.indices = reinterpret_cast<int32_t*>(lists.keys + c.capacity);
  lists.kept_keys = lists.keys + 2 * c.capacity;
  lists.kept_indices = reinterpret_cast<int32_t*>(lists.kept_keys + c.most + c.slack);
  lists.bins = lists.kept_keys + 2 * (c.most + c.slack);
  return lists;
}

struct SelectState {
  int count, kept;
  Digit found;
  uint32_t warp_totals[32];
};

// The bin, counted from the greatest, in which the `wanted`-th entry lies; how many are wanted of it; its size.
template <int threads>
DEVICE Digit find_digit(const uint32_t* bins, int wanted, SelectState& state) {
  constexpr int per = kBins / threads, warps = threads / 32;
  const int first = kBins - 1 - int(threadIdx.x) * per;
  uint32_t total = 0;
#pragma unroll
  for (int i = 0; i < per; ++i) total += bins[first - i];
  uint32_t upto = total;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint32_t other = __shfl_up_sync(0xffffffff, upto, step);
    if (threadIdx.x % 32 >= step) upto += other;
  }
  if (threadIdx.x % 32 == 31) state.warp_totals[threadIdx.x / 32] = upto;
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < warps; ++warp)
    if (warp < threadIdx.x / 32) upto += state.warp_totals[warp];
  uint32_t above = upto - total;
  if (above < wanted && wanted <= upto) {
#pragma unroll 1
    for (int bin = first;; --bin) {
      if (above + bins[bin] >= wanted) {
        state.found = {bin, wanted - int(above), int(bins[bin])};
        break;
      }
      above += bins[bin];
    }
  }
  __syncthreads();
  return state.found;
}

template <int threads>
DEVICE void clear_bins(uint32_t* bins) {
#pragma unroll
  for (int i = 0; i < kBins / threads; ++i) bins[threadIdx.x + i * threads] = 0;
  __syncthreads();
}

// The digits of 32 bits, from the top: 11, 11 and 10 bits.
DEVICE int shift_of(int pass) { return pass == 0 ? 21 : pass == 1 ? 10 : 0; }
DEVICE uint32_t mask_of(int pass) { return pass == 2 ? 1023 : 2047; }

// The cut that leaves the k greatest of `count` > k entries, and no more than `slack` others; of equal ones those of the
// least indices. All threads get it. Keys of 16-bit types are told apart by two digits.
template <int threads, int digits>
DEVICE Cut find_cut(const uint32_t* keys, const int32_t* indices, int count, int k, int slack, uint32_t* bins,
                    SelectState& state) {
  uint32_t prefix = 0, known = 0;
  int wanted = k, equal = 0;
#pragma unroll 1
  for (int pass = 0; pass < digits; ++pass) {
    const int shift = shift_of(pass);
    const uint32_t mask = mask_of(pass);
    clear_bins<threads>(bins);
#pragma unroll 4
    for (int i = threadIdx.x; i < count; i += threads) {
      const uint32_t key = keys[i];
      if ((key & known) == prefix) atomicAdd(&bins[key >> shift & mask], 1);
    }
    __syncthreads();
    const Digit found = find_digit<threads>(bins, wanted, state);
    prefix |= uint32_t(found.digit) << shift;
    known |= mask << shift;
    wanted = found.wanted;
    equal = found.size;
    if (equal <= wanted + slack) return {prefix - 1, -1};
  }
  // The bits of a key below its second digit follow from the sign, and from being NaN.
  if (digits == 2 && (prefix >> 31 == 0 || prefix == 0xfffffc00)) prefix |= 1023;

  // More entries share the key than are wanted. A few are ranked by comparing each with each.
  constexpr int kFew = 512;
  if (equal <= kFew) {
    if (threadIdx.x == 0) state.kept = 0;
    __syncthreads();
#pragma unroll 4
    for (int i = threadIdx.x; i < count; i += threads)
      if (keys[i] == prefix) bins[atomicAdd(&state.kept, 1)] = uint32_t(indices[i]);
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < equal; i += threads) {
      const uint32_t own = bins[i];
      int rank = 0;
#pragma unroll 4
      for (int j = 0; j < equal; ++j) rank += bins[j] < own;
      if (rank == wanted - 1) state.found.digit = int(own);
    }
    __syncthreads();
    return {prefix, state.found.digit};
  }
  // Many: by the digits of their indices, the least ones first.
  uint32_t index_prefix = 0, index_known = 0;
#pragma unroll 1
  for (int pass = 0; pass < 3; ++pass) {
    const int shift = shift_of(pass);
    const uint32_t mask = mask_of(pass);
    clear_bins<threads>(bins);
#pragma unroll 4
    for (int i = threadIdx.x; i < count; i += threads) {
      const uint32_t reversed = ~uint32_t(indices[i]);
      if (keys[i] == prefix && (reversed & index_known) == index_prefix)
        atomicAdd(&bins[reversed >> shift & mask], 1);
    }
    __syncthreads();
    const Digit found = find_digit<threads>(bins, wanted, state);
    index_prefix |= uint32_t(found.digit) << shift;
    index_known |= mask << shift;
    wanted = found.wanted;
    if (found.size == wanted) break;
  }
  return {prefix, int32_t(~index_prefix)};
}

// Cuts the list to the k greatest of its `count` > k entries and at most `slack` others, which end up in `kept`;
// state.kept is their number.
template <int threads, int digits>
DEVICE Cut cut_list(const Lists& lists, int count, int k, int slack, SelectState& state) {
  const Cut cut = find_cut<threads, digits>(lists.keys, lists.indices, count, k, slack, lists.bins, state);
  __syncthreads();
  if (threadIdx.x == 0) state.kept = 0;
  __syncthreads();
#pragma unroll 4
  for (int i = threadIdx.x; i < count; i += threads) {
    const uint32_t key = lists.keys[i];
    const int32_t index = lists.indices[i];
    if (stays(cut, key, index)) {
      const int at = atomicAdd(&state.kept, 1);
      lists.kept_keys[at] = key;
      lists.kept_indices[at] = index;
    }
  }
  __syncthreads();
  return cut;
}

// The elements of a row as 16-byte pieces at aligned addresses. The first piece may begin before the row and the last
// one end after it: a piece lies in one unit of memory with some of the row's own bytes.
template <typename T>
struct Pieces {
  static constexpr int kElements = kVectorBytes / sizeof(T);
  const T* start;  // of piece 0
  int before;      // elements of piece 0 that are not the row's
  int count;
  int64_t size;    // of the row

  DEVICE Pieces(const T* row, int64_t size) : size(size) {
    before = int(reinterpret_cast<uint64_t>(row) % kVectorBytes / sizeof(T));
    start = row - before;
    count = int((size + before + kElements - 1) / kElements);
  }

  DEVICE int64_t index(int piece) const { return int64_t(piece) * kElements - before; }
};

// The k greatest elements of pieces [first, last), or all if there are fewer, in `kept` and in no order. Returns their
// number. `limit` entries, more than k and the slack, may be in the list before a round; it holds threads * kPerThread
// more. `kept` holds k and the slack.
template <int threads, typename T>
DEVICE int select_pieces(const Pieces<T>& pieces, int first, int last, int k, int slack, int limit, const Lists& lists,
                         SelectState& state) {
  constexpr int n = Pieces<T>::kElements, vectors = kPerThread / n, round = threads * vectors;
  constexpr int digits = sizeof(T) == 4 ? 3 : 2;
  constexpr int rounds_ahead = sizeof(T) == 4 ? 1 : 2;  // 64 bytes of a thread are under way
  Vec<T, n> now[vectors] = {}, ahead[rounds_ahead][vectors] = {};
  // The next round, and the loads of a later one.
  const auto advance = [&](int base) {
#pragma unroll
    for (int j = 0; j < vectors; ++j) now[j] = ahead[0][j];
#pragma unroll
    for (int r = 0; r + 1 < rounds_ahead; ++r)
#pragma unroll
      for (int j = 0; j < vectors; ++j) ahead[r][j] = ahead[r + 1][j];
#pragma unroll
    for (int j = 0; j < vectors; ++j) {
      const int piece = base + j * threads + int(threadIdx.x);
      ahead[rounds_ahead - 1][j] = load_access<Reuse::once, T, n>(pieces.start + int64_t(piece) * n, piece < last);
    }
  };
#pragma unroll
  for (int r = 0; r < rounds_ahead; ++r) advance(first + r * round);

  // The first round is taken whole: its elements have their places.
  const int64_t begin = first == 0 ? 0 : pieces.index(first);
  const int64_t stop = last == pieces.count ? pieces.size : pieces.index(last);
  const int64_t taken = first + round < last ? pieces.index(first + round) : stop;
  int count = taken > begin ? int(taken - begin) : 0;
  advance(first + rounds_ahead * round);
#pragma unroll
  for (int j = 0; j < vectors; ++j) {
    const int64_t index = pieces.index(first + j * threads + int(threadIdx.x));
#pragma unroll
    for (int i = 0; i < n; ++i)
      if (index + i >= begin && index + i < taken) {
        lists.keys[index + i - begin] = key_of(to_float(now[j].at[i]));
        lists.indices[index + i - begin] = int32_t(index + i);
      }
  }
  __syncthreads();

  float threshold = __int_as_float(0x7fffffff);  // NaN: nothing is below it
  // Cuts the list; what is kept goes back to its head.
  const auto cut = [&] {
    const Cut at = cut_list<threads, digits>(lists, count, k, slack, state);
    threshold = value_of(at.key < kInfinityKey ? at.key : kInfinityKey);
    const int kept = state.kept;
#pragma unroll 1
    for (int i = threadIdx.x; i < kept; i += threads) {
      lists.keys[i] = lists.kept_keys[i];
      lists.indices[i] = lists.kept_indices[i];
    }
    if (threadIdx.x == 0) state.count = kept;
    __syncthreads();
  };

  if (first + round < last) {
    if (count > k) {
      cut();
    } else {
      if (threadIdx.x == 0) state.count = count;
      __syncthreads();
    }
#pragma unroll 1
    for (int base = first + round; base < last; base += round) {
      advance(base + rounds_ahead * round);
      uint32_t above = 0;
#pragma unroll
      for (int j = 0; j < vectors; ++j)
#pragma unroll
        for (int i = 0; i < n; ++i)
          if (!(to_float(now[j].at[i]) <= threshold)) above |= 1u << (j * n + i);
      if (base + round >= last) {  // the row may end here
#pragma unroll
        for (int j = 0; j < vectors; ++j) {
          const int64_t left = stop - pieces.index(base + j * threads + int(threadIdx.x));
          const uint32_t valid = left >= n ? (1u << n) - 1 : left <= 0 ? 0 : (1u << left) - 1;
          above &= ~(((1u << n) - 1) << j * n) | valid << j * n;
        }
      }
      int end = 0;
      if (above) {
        int at = atomicAdd(&state.count, __popc(above));
        end = at + __popc(above);
#pragma unroll
        for (int j = 0; j < vectors; ++j) {
          const int32_t index = int32_t(pieces.index(base + j * threads + int(threadIdx.x)));
#pragma unroll
          for (int i = 0; i < n; ++i)
            if (above >> (j * n + i) & 1) {
              lists.keys[at] = key_of(to_float(now[j].at[i]));
              lists.indices[at++] = index + i;
            }
        }
      }
      if (__syncthreads_or(end > limit)) {
        count = state.count;
        cut();
      }
    }
    __syncthreads();
    count = state.count;
  }
  if (count > k) {
    cut_list<threads, digits>(lists, count, k, 0, state);
    return k;
  }
#pragma unroll 1
  for (int i = threadIdx.x; i < count; i += threads) {
    lists.kept_keys[i] = lists.keys[i];
    lists.kept_indices[i] = lists.indices[i];
  }
  __syncthreads();
  return count;
}

// What every block of a cluster kept comes to the first one, and is cut to the k greatest. Returns their number there;
// in other blocks 0. `size`: of the row. The list holds cluster * k entries.
template <int threads, int cluster, int digits>
DEVICE int merge_cluster(const Lists& lists, int count, int k, int64_t size, SelectState& state) {
  if constexpr (cluster == 1) return count;
  const int rank = int(blockIdx.x % cluster);
  cluster_sync();  // the first block needs its list no more
#pragma unroll 1
  for (int i = threadIdx.x; i < k; i += threads) {
    const bool real = i < count;
    store_to_cluster(lists.keys + rank * k + i, 0, real ? lists.kept_keys[i] : 0);
    store_to_cluster(reinterpret_cast<uint32_t*>(lists.indices) + rank * k + i, 0,
                     real ? uint32_t(lists.kept_indices[i]) : 0);
  }
  cluster_sync();
  if (rank != 0) return 0;
  const int wanted = size < k ? int(size) : k;
  if (wanted > 0) cut_list<threads, digits>(lists, cluster * k, wanted, 0, state);
  return wanted;
}

// Sorts entries[0, count) in ascending order, count a power of two: a bitonic network. Steps within 64 entries stay
// within a warp.
template <int threads>
DEVICE void sort_ascending(uint64_t* entries, int count) {
#pragma unroll 1
  for (int run = 2; run <= count; run *= 2) {
#pragma unroll 1
    for (int step = run / 2; step > 0; step /= 2) {
#pragma unroll 1
      for (int pair = threadIdx.x; pair < count / 2; pair += threads) {
        const int low = 2 * pair - (pair & (step - 1));
        const uint64_t a = entries[low], b = entries[low + step];
        if ((a > b) == ((low & run) == 0)) {
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

}  // namespace deepinfer
