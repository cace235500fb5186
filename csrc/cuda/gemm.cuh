// Matrix products on Hopper, dense and grouped by expert.
//
// Blocks stay and take one tile of the result after the other. One thread drives the copy engine: it fills a ring of
// stages, each 128 bytes of k of the weight's rows and of the tokens, and runs ahead across tiles. One or two
// warpgroups multiply, with one stage's products in flight while the next are issued, and write their tile while the
// ring fills again. Clusters of two load the tokens once for both blocks. With many tokens the matrix unit is the bound,
// or the power that it draws.
//
// With few tokens reading the weight is the bound. Narrow tiles leave room for a deep ring, and where there are too few
// tiles the blocks of a cluster share out the k of one tile and add up their sums, always in the same order, through
// each other's shared memory.
#pragma once

#include "gemm_tiles.cuh"
#include "wgmma.cuh"

namespace deepinfer {

template <DType> constexpr int kElementBytes = 2;
template <> constexpr int kElementBytes<DType::f32> = 4;

template <GemmConfig c>
struct GemmShape {
  using Out = Element<c.out>;
  using Staged = Element<c.addend ? DType::f32 : c.out>;  // what is added to is not yet rounded

  static constexpr int depth = c.type == Operand::e4m3 ? 128 : 64;  // k of a stage
  static constexpr int steps = 4;                                   // of the matrix unit, 32 bytes of k each
  static constexpr int weight_bytes = c.tile_n * 128, x_bytes = c.tile_m * 128, stage_bytes = weight_bytes + x_bytes;
  static constexpr int columns = c.tile_n / c.warpgroups, parts = columns / 64;  // of a warpgroup
  static constexpr int sharing = c.split ? 1 : c.cluster;  // blocks that load tokens for each other
  static constexpr bool ragged = c.groups != RowGroups::none && c.tile_m > 32;  // tiles of fewer tokens cost less
  static constexpr int box = ragged || !c.x_dense_k ? 64 : c.tile_m / sharing;  // tokens that are loaded at once
  static constexpr int chunk = c.tile_m < 32 ? c.tile_m : 32;  // tokens that are written at once
  static constexpr int chunk_bytes = chunk * 64 * sizeof(Staged);
  static constexpr int buffers = c.bulk && c.groups == RowGroups::none ? 4 : 2;  // of a chunk
  static constexpr int block_bytes = depth * 128;  // of 64 rows of an operand whose k is not dense
  static constexpr bool scaled = c.type == Operand::e4m3;
  static constexpr int row_step = scaled ? c.tile_m : c.tile_m > 128 ? 64 : 32;  // registers allow e4m3 no other
  // The scales of the tokens of a stage, from a multiple of 16 bytes on.
  static constexpr int scales = !scaled ? 0 : c.tile_m + (c.groups == RowGroups::none ? 0 : 4);
  static constexpr int scale_bytes = (scales * 4 + 127) / 128 * 128;
};

// The place in the ring, and the parity of its barriers.
template <int stages>
struct RingPlace {
  int stage = 0;
  uint32_t parity = 0;

  DEVICE void advance() {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

template <GemmConfig c>
struct GemmRing {
  using Shape = GemmShape<c>;

  char* stages;
  uint64_t* full;   // the copy engine has brought all bytes
  uint64_t* empty;  // all warps that read them are done

  DEVICE char* weight(int stage) const { return stages + stage * Shape::stage_bytes; }
  DEVICE char* x(int stage) const { return weight(stage) + Shape::weight_bytes; }
  DEVICE float* scales(int stage) const {
    return reinterpret_cast<float*>(stages + c.stages * Shape::stage_bytes + stage * Shape::scale_bytes);
  }
};

// What this block works on, in this order: all of k of its tiles, a part of k where the blocks of a cluster share a tile,
// or, after whole tiles, an equal share of the stages of the tiles that are left, which may belong to two of them.
DEVICE int share_begin(const GemmKernelArgs& args, int cluster) {
  return cluster * args.share + (cluster < args.longer ? cluster : args.longer);
}

template <GemmConfig c>
class GemmWork {
 public:
  int tile, begin, end;  // stages of k
  int part = 0;          // the number of this part among the block's

  DEVICE GemmWork(const GemmKernelArgs& args, const GemmTiles<c>& tiles, uint32_t rank)
      : stages_(int((args.problem.depth + GemmShape<c>::depth - 1) / GemmShape<c>::depth)),
        next_(tiles.first()), step_(tiles.step()), count_(c.streamed ? args.whole : tiles.count) {
    begin = c.split ? int(rank * stages_ / c.cluster) : 0;
    end = c.split ? int((rank + 1) * stages_ / c.cluster) : stages_;
    if constexpr (c.streamed) {
      left_ = share_begin(args, tiles.first());
      left_end_ = share_begin(args, tiles.first() + 1);
    }
  }

  // The next tile of which the block does all that it does of any.
  DEVICE bool next() {
    if (next_ >= count_) return false;
    tile = next_;
    next_ += step_;
    return true;
  }

  // Then the next part of a tile that is left.
  DEVICE bool next_part() {
    if (!c.streamed || left_ >= left_end_) return false;
    tile = count_ + left_ / stages_;
    begin = left_ % stages_;
    end = stages_ - begin < left_end_ - left_ ? stages_ : begin + left_end_ - left_;
    left_ += end - begin;
    part = parts_++;
    return true;
  }

 private:
  int stages_, next_, step_, count_;
  int left_ = 0, left_end_ = 0, parts_ = 0;
};

template <GemmConfig c>
DEVICE void load_stage(const GemmKernelArgs& args, const GemmRing<c>& ring, int stage, const GemmTile& tile, int k,
                       uint32_t rank, uint64_t policy) {
  using Shape = GemmShape<c>;
  uint64_t* full = &ring.full[stage];
  const int boxes = Shape::ragged ? (tile.rows<c.tile_m>() + Shape::box - 1) / Shape::box : c.tile_m / Shape::box;
  expect_bytes(full, Shape::weight_bytes + boxes * (Shape::box * 128) + Shape::scales * 4);
  if constexpr (Shape::scaled) {
    const int block = args.problem.x_scale_depth_stride != 0 ? k / Shape::depth : 0;
    tensor_load(ring.scales(stage), args.x_scale, tile.m / 4 * 4, block, full);
  }
  if constexpr (c.weight_dense_k) {
    tensor_load(ring.weight(stage), args.weight, k, tile.n, tile.expert, full, policy);
  } else {
#pragma unroll
    for (int i = 0; i < c.tile_n / 64; ++i)
      tensor_load(ring.weight(stage) + i * Shape::block_bytes, args.weight, tile.n + i * 64, k, tile.expert, full,
                  policy);
  }
  // The blocks that need the same tokens load them in turn, each for all.
  for (int i = Shape::sharing > 1 ? int(rank) : 0; i < boxes; i += Shape::sharing) {
    char* to = ring.x(stage) + i * (Shape::box * 128);
    const int m = tile.m + i * Shape::box, inner = c.x_dense_k ? k : m, outer = c.x_dense_k ? m : k;
    if constexpr (Shape::sharing > 1) tensor_load_to((1 << c.cluster) - 1, to, args.x, inner, outer, full);
    else tensor_load(to, args.x, inner, outer, full);
  }
}

template <GemmConfig c>
DEVICE void load_tiles(const GemmKernelArgs& args, const GemmRing<c>& ring, const GemmTiles<c>& tiles, uint32_t rank) {
  const uint64_t policy = cache_policy(args.weight_read_once);
  RingPlace<c.stages> place;
  for (GemmWork<c> work(args, tiles, rank); work.next() || work.next_part();) {
    const GemmTile tile = tiles.at(work.tile, rank);
    for (int step = work.begin; step < work.end; ++step, place.advance()) {
      wait_barrier(&ring.empty[place.stage], place.parity ^ 1);
      load_stage<c>(args, ring, place.stage, tile, step * GemmShape<c>::depth, rank, policy);
    }
  }
}

template <GemmConfig c>
DEVICE void release(const GemmRing<c>& ring, int stage) {
  const uint32_t lane = threadIdx.x % 32;
  if constexpr (GemmShape<c>::sharing > 1) {
    if (lane < c.cluster) arrive_at(&ring.empty[stage], lane);
  } else {
    if (lane == 0) arrive(&ring.empty[stage]);
  }
}

template <GemmConfig c>
using GemmSums = float[GemmShape<c>::parts][c.tile_m / 2];

// The products of one tile with `tokens` tokens, added up over `count` stages.
template <GemmConfig c, int tokens>
DEVICE void multiply_tile(GemmSums<c>& sums, const GemmRing<c>& ring, RingPlace<c.stages>& place, int count) {
  using Shape = GemmShape<c>;
  constexpr int part_bytes = 64 * 128;  // of the weight, in both layouts
  constexpr int weight_step = c.weight_dense_k ? 32 : 16 * 128, x_step = c.x_dense_k ? 32 : 16 * 128;
  const int warpgroup = threadIdx.x / 128;
#pragma unroll
  for (int p = 0; p < Shape::parts; ++p)
#pragma unroll
    for (int i = 0; i < c.tile_m / 2; ++i) sums[p][i] = 0.f;
  int previous = -1;
  for (int step = 0; step < count; ++step, place.advance()) {
    wait_barrier(&ring.full[place.stage], place.parity);
    const uint64_t weight = matrix_descriptor<c.weight_dense_k>(
        ring.weight(place.stage) + warpgroup * Shape::parts * part_bytes, Shape::block_bytes);
    const uint64_t x = matrix_descriptor<c.x_dense_k>(ring.x(place.stage), Shape::block_bytes);
    begin_products();
#pragma unroll
    for (int k = 0; k < Shape::steps; ++k)
#pragma unroll
      for (int p = 0; p < Shape::parts; ++p)
        multiply<c.type, tokens, c.weight_dense_k, c.x_dense_k>(
            sums[p], weight + ((p * part_bytes + k * weight_step) >> 4), x + (k * x_step >> 4));
    commit_products();
    wait_products<1>();
    if (previous >= 0) release<c>(ring, previous);
    previous = place.stage;
  }
  wait_products<0>();
  if (previous >= 0) release<c>(ring, previous);
}

// Of two neighbouring tokens; where groups begin anywhere they are not aligned.
template <GemmConfig c>
DEVICE Vec<float, 2> token_scales(const float* scales, int row) {
  if constexpr (c.groups == RowGroups::none) return *reinterpret_cast<const Vec<float, 2>*>(scales);
  return {scales[row % 4], scales[row % 4 + 1]};
}

// The same for e4m3. The matrix unit keeps few bits of its sums of e4m3: after each stage they are scaled and added up
// in float32, while the other warpgroup multiplies.
template <GemmConfig c, int tokens>
DEVICE void multiply_scaled_tile(GemmSums<c>& sums, const MatmulArgs& problem, const GemmRing<c>& ring,
                                 RingPlace<c.stages>& place, const GemmTile& tile, int begin, int end) {
  using Shape = GemmShape<c>;
  constexpr int kinds = c.column_scales ? 2 : 1;  // of columns whose scales a thread needs
  const int warpgroup = threadIdx.x / 128, lane = threadIdx.x % 32;
  const float* scales[Shape::parts][kinds];
  float scale[Shape::parts][kinds];
#pragma unroll
  for (int p = 0; p < Shape::parts; ++p)
#pragma unroll
    for (int i = 0; i < kinds; ++i) {
      const int column = tile.n + warpgroup * Shape::columns + p * 64;
      int64_t at = c.column_scales ? column + threadIdx.x / 32 % 4 * 16 + lane / 4 + i * 8 : column / 128;
      const int64_t last = c.column_scales ? problem.columns - 1 : (problem.columns - 1) / 128;
      at = at < last ? at : last;  // columns past the end are not written
      scales[p][i] = problem.weight_scale + tile.expert * problem.scale_expert_stride +
                     at * problem.scale_column_stride;
      scale[p][i] = begin < end ? scales[p][i][begin * problem.scale_depth_stride] : 0.f;
#pragma unroll
      for (int j = 0; j < c.tile_m / 2; ++j) sums[p][j] = 0.f;
    }
  for (int step = begin; step < end; ++step, place.advance()) {
    wait_barrier(&ring.full[place.stage], place.parity);
    const uint64_t weight =
        matrix_descriptor<true>(ring.weight(place.stage) + warpgroup * Shape::parts * 64 * 128, Shape::block_bytes);
    const uint64_t x = matrix_descriptor<true>(ring.x(place.stage), Shape::block_bytes);
    GemmSums<c> products;
    begin_products();
#pragma unroll
    for (int p = 0; p < Shape::parts; ++p) {
      multiply<c.type, tokens, true, true, false>(products[p], weight + (p * 64 * 128 >> 4), x);
#pragma unroll
      for (int k = 1; k < Shape::steps; ++k)
        multiply<c.type, tokens, true, true>(products[p], weight + ((p * 64 * 128 + k * 32) >> 4), x + (k * 32 >> 4));
    }
    commit_products();
    float next[Shape::parts][kinds];
    const int64_t next_step = step + 1 < end ? step + 1 : step;
#pragma unroll
    for (int p = 0; p < Shape::parts; ++p)
#pragma unroll
      for (int i = 0; i < kinds; ++i) next[p][i] = scales[p][i][next_step * problem.scale_depth_stride];
    wait_products<0>();
#pragma unroll
    for (int p = 0; p < Shape::parts; ++p) {
#pragma unroll
      for (int j = 0; j < tokens / 8; ++j) {
        const Vec<float, 2> x_scale = token_scales<c>(ring.scales(place.stage) + j * 8 + lane % 4 * 2, tile.m);
        float both[2][kinds];
#pragma unroll
        for (int i = 0; i < 2 * kinds; ++i) both[i % 2][i / 2] = x_scale.at[i % 2] * scale[p][i / 2];
#pragma unroll
        for (int i = 0; i < 4; ++i)
          sums[p][j * 4 + i] = fmaf(products[p][j * 4 + i], both[i % 2][i / 2 % kinds], sums[p][j * 4 + i]);
      }
#pragma unroll
      for (int i = 0; i < kinds; ++i) scale[p][i] = next[p][i];
    }
    release<c>(ring, place.stage);
  }
}

// Groups end anywhere: a tile that is not full is multiplied with fewer tokens.
template <GemmConfig c, int tokens = c.tile_m>
DEVICE void multiply_rows(GemmSums<c>& sums, const MatmulArgs& problem, const GemmRing<c>& ring,
                          RingPlace<c.stages>& place, const GemmTile& tile, int begin, int end) {
  constexpr int step = GemmShape<c>::row_step;
  if constexpr (GemmShape<c>::ragged && tokens > step) {
    if (tile.rows<c.tile_m>() <= tokens - step)
      return multiply_rows<c, tokens - step>(sums, problem, ring, place, tile, begin, end);
  }
  if constexpr (GemmShape<c>::scaled) multiply_scaled_tile<c, tokens>(sums, problem, ring, place, tile, begin, end);
  else multiply_tile<c, tokens>(sums, ring, place, end - begin);
}

// ---- writing ----

// n finished values, the last steps and the store.
template <GemmConfig c, int n>
DEVICE void write(const MatmulArgs& problem, int64_t row, int column, const float (&values)[n]) {
  using Out = Element<c.out>;
  constexpr int access = c.access < n ? c.access : n;
  Out* out = static_cast<Out*>(problem.out) + row * problem.out_stride;
  Vec<Out, n> rounded{};
  if constexpr (c.addend) {
    const Out* addend = static_cast<const Out*>(problem.addend) + row * problem.addend_stride;
    const Vec<Out, n> added = load_vector<Reuse::once, access, n>(addend, column, problem.columns);
#pragma unroll
    for (int i = 0; i < n; ++i) rounded.at[i] = from_float<Out>(values[i] + to_float(added.at[i]));
  } else {
#pragma unroll
    for (int i = 0; i < n; ++i) rounded.at[i] = from_float<Out>(values[i]);
  }
  store_vector<access, n>(out, column, problem.columns, rounded);
}

DEVICE uint32_t pack(bf16 low, bf16 high) { return uint32_t(high.bits) << 16 | low.bits; }
DEVICE uint32_t pack(f16 low, f16 high) { return uint32_t(high.bits) << 16 | low.bits; }

// Where the staged element (token, column) lies: whole pieces of 16 or 32 bytes change places, so that neither those
// who write columns nor those who read rows meet in a bank.
template <typename Staged>
DEVICE Staged* staged(char* buffer, int token, int column) {
  constexpr bool narrow = sizeof(Staged) == 2;
  const int flip = narrow ? token % 8 : token / 2 % 4;
  return reinterpret_cast<Staged*>(buffer) + token * 64 + (column ^ flip * 8);
}

// A chunk of 64 columns, from the registers (see multiply()) of a warpgroup into shared memory.
template <GemmConfig c>
DEVICE void stage_chunk(const float* sums, const float (&bias)[2], float scale, char* buffer) {
  using Shape = GemmShape<c>;
  using Staged = typename Shape::Staged;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
#pragma unroll
  for (int m = 0; m < Shape::chunk; m += 16) {
    float v[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = finish<c>(sums[m / 2 + i], scale, bias[i / 2 % 2]);
    if constexpr (sizeof(Staged) == 2) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] = pack(from_float<Staged>(v[2 * i]), from_float<Staged>(v[2 * i + 1]));
      const int matrix = lane / 8;  // this lane says where one row of this one goes
      const Staged* to = staged<Staged>(buffer, m + matrix / 2 * 8 + lane % 8, warp * 16 + matrix % 2 * 8);
      asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(to)),
                   "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]) : "memory");
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i)
        *staged<float>(buffer, m + i / 4 * 8 + lane % 4 * 2 + i % 2, warp * 16 + lane / 4 + i / 2 % 2 * 8) = v[i];
    }
  }
}

// A staged chunk, by the threads of a warpgroup.
template <GemmConfig c>
DEVICE void copy_chunk(const MatmulArgs& problem, int row, int column, int rows, char* chunk) {
  using Staged = typename GemmShape<c>::Staged;
  constexpr int n = kVectorBytes / sizeof(typename GemmShape<c>::Out), pieces = 64 / n;
#pragma unroll
  for (int i = threadIdx.x % 128; i < GemmShape<c>::chunk * pieces; i += 128) {
    const int token = i / pieces, at = i % pieces * n;
    if (token >= rows) break;
    const Staged* from = staged<Staged>(chunk, token, at);
    float values[n];
#pragma unroll
    for (int j = 0; j < n; ++j) values[j] = to_float(from[j]);
    write<c>(problem, row + token, column + at, values);
  }
}

template <GemmConfig c>
DEVICE void write_tile(const GemmSums<c>& sums, const GemmKernelArgs& args, const GemmTile& tile, char* stage,
                       int& buffer) {
  using Shape = GemmShape<c>;
  const MatmulArgs& problem = args.problem;
  const int warpgroup = threadIdx.x / 128, thread = threadIdx.x % 128;
#pragma unroll
  for (int p = 0; p < Shape::parts; ++p) {
    const int column = tile.n + warpgroup * Shape::columns + p * 64;
    if (column >= problem.columns) continue;
    float bias[2];
#pragma unroll
    for (int i = 0; i < 2; ++i)
      bias[i] = load_bias<c>(problem, tile.expert, column + thread / 32 * 16 + thread % 32 / 4 + i * 8);
#pragma unroll
    for (int first = 0; first < c.tile_m; first += Shape::chunk) {
      const int row = tile.m + first, rows = tile.end - row;
      if (rows <= 0) continue;
      // Buffers in turn, with one barrier a chunk: whoever passes it has read what he copied himself from the buffer
      // that comes next, and the copy engine has read it too.
      char* chunk = stage + (warpgroup * Shape::buffers + buffer) * Shape::chunk_bytes;
      buffer = buffer + 1 == Shape::buffers ? 0 : buffer + 1;
      stage_chunk<c>(sums[p] + first / 2, bias, problem.scale, chunk);
      if constexpr (c.bulk) {
        publish_to_copies();
        if (thread == 0) wait_stores_read<Shape::buffers - 2>();
      }
      warpgroup_sync(1 + warpgroup);
      // What reaches past the end of a group must not be written; past the end of the result it is not.
      if (c.bulk && (c.groups == RowGroups::none || rows >= Shape::chunk)) {
        if (thread == 0) {
          tensor_store(args.out, column, row, chunk);
          commit_stores();
        }
      } else {
        copy_chunk<c>(problem, row, column, rows, chunk);
      }
    }
  }
}

// ---- one tile by several blocks, in parts of k ----

// The sums of part `part`, thread by thread.
template <GemmConfig c>
DEVICE Vec<float, 4>* kept(const GemmKernelArgs& args, int part, int p, int i) {
  constexpr int threads = c.warpgroups * 128;
  return reinterpret_cast<Vec<float, 4>*>(args.partial) +
         (int64_t(part * GemmShape<c>::parts + p) * (c.tile_m / 8) + i) * threads + threadIdx.x;
}

// (In assembly: a copy of the sums in between would make the compiler wait for each product.)
template <GemmConfig c>
DEVICE void keep_sums(const GemmSums<c>& sums, const GemmKernelArgs& args, int part) {
#pragma unroll
  for (int p = 0; p < GemmShape<c>::parts; ++p)
#pragma unroll
    for (int i = 0; i < c.tile_m / 8; ++i) {
      asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(kept<c>(args, part, p, i)), "f"(sums[p][i * 4]),
                   "f"(sums[p][i * 4 + 1]), "f"(sums[p][i * 4 + 2]), "f"(sums[p][i * 4 + 3]) : "memory");
    }
}

// The second kernel: adds up the parts of the tiles that were cut, always in the same order. A block has a chunk of
// tokens of one part of the columns of a tile.
template <GemmConfig c>
DEVICE void gemm_sum(const GemmKernelArgs& args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Shape = GemmShape<c>;
  __shared__ __align__(1024) char staging[c.warpgroups * Shape::chunk_bytes];
  constexpr int chunks = c.tile_m / Shape::chunk;
  const MatmulArgs& problem = args.problem;
  wait_for_previous_kernel();
  let_next_kernel_start();
  GemmTiles<c> tiles;
  tiles.prepare(problem);
  int at = int(blockIdx.x);
  const int first = at % chunks * Shape::chunk, p = at / chunks % Shape::parts;
  at /= chunks * Shape::parts;
  const int rank = at % c.cluster, cut = at / c.cluster;
  const int stages = int((problem.depth + Shape::depth - 1) / Shape::depth), begin = cut * stages, end = begin + stages;
  const int after_longer = begin - args.longer * (args.share + 1);
  int cluster = after_longer < 0 ? begin / (args.share + 1) : args.longer + after_longer / args.share;
  float sums[Shape::chunk / 2] = {};
  constexpr int together = 4;  // parts whose sums are under way at once
  for (; share_begin(args, cluster) < end; cluster += together) {
    Vec<float, 4> more[together][Shape::chunk / 8];
#pragma unroll
    for (int j = 0; j < together; ++j) {
      const int at_stage = share_begin(args, cluster + j);
      const int part = ((cluster + j) * c.cluster + rank) * 2 + cut - at_stage / stages;
#pragma unroll
      for (int i = 0; i < Shape::chunk / 8; ++i)
        more[j][i] = load_access<Reuse::once, float, 4>(
            reinterpret_cast<float*>(kept<c>(args, part, p, first / 8 + i)), at_stage < end);
    }
#pragma unroll
    for (int j = 0; j < together; ++j)
#pragma unroll
      for (int i = 0; i < Shape::chunk / 2; ++i) sums[i] += more[j][i / 4].at[i % 4];
  }
  const GemmTile tile = tiles.at(args.whole + cut, rank);
  const int warpgroup = threadIdx.x / 128, thread = threadIdx.x % 128;
  const int row = tile.m + first, column = tile.n + warpgroup * Shape::columns + p * 64;
  if (row >= tile.end || column >= problem.columns) return;
  float bias[2];
#pragma unroll
  for (int i = 0; i < 2; ++i)
    bias[i] = load_bias<c>(problem, tile.expert, column + thread / 32 * 16 + thread % 32 / 4 + i * 8);
  char* chunk = staging + warpgroup * Shape::chunk_bytes;
  stage_chunk<c>(sums, bias, problem.scale, chunk);
  warpgroup_sync(1 + warpgroup);
  copy_chunk<c>(problem, row, column, tile.end - row, chunk);
#endif
}

// The sums of this block into the memory of the ring, which is free by now.
template <GemmConfig c>
DEVICE float* partial(char* ring, int token, int column) {
  return reinterpret_cast<float*>(ring) + token * c.tile_n + (column ^ token / 2 % 4 * 8);
}

template <GemmConfig c>
DEVICE void share_sums(const GemmSums<c>& sums, char* ring) {
  using Shape = GemmShape<c>;
  warpgroups_sync<c.warpgroups>(1);  // the other one may still read the ring
  const int lane = threadIdx.x % 32, first = threadIdx.x / 128 * Shape::columns + threadIdx.x / 32 % 4 * 16 + lane / 4;
#pragma unroll
  for (int p = 0; p < Shape::parts; ++p)
#pragma unroll
    for (int i = 0; i < c.tile_m / 2; ++i)
      *partial<c>(ring, i / 4 * 8 + lane % 4 * 2 + i % 2, first + p * 64 + i / 2 % 2 * 8) = sums[p][i];
}

// Each block adds up and writes its share of the tokens.
template <GemmConfig c>
DEVICE void write_shared_tile(const MatmulArgs& problem, const GemmTile& tile, char* ring, uint32_t rank) {
  constexpr int tokens = c.tile_m / c.cluster, pieces = c.tile_n / 4;
  for (int i = threadIdx.x; i < tokens * pieces; i += c.warpgroups * 128) {
    const int token = int(rank) * tokens + i / pieces, at = i % pieces * 4, column = tile.n + at;
    if (tile.m + token >= tile.end || column >= problem.columns) continue;
    float sum[4] = {};
    for (int block = 0; block < c.cluster; ++block) {
      const Vec<float, 4> more = load_from_cluster(partial<c>(ring, token, at), block);
#pragma unroll
      for (int j = 0; j < 4; ++j) sum[j] += more.at[j];
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) sum[j] = finish<c>(sum[j], problem.scale, load_bias<c>(problem, tile.expert, column + j));
    write<c>(problem, tile.m + token, column, sum);
  }
}

template <GemmConfig c>
DEVICE void gemm(const GemmKernelArgs& args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)  // no other chip has these instructions, and none is asked to run this
  using Shape = GemmShape<c>;
  extern __shared__ char dynamic_shared[];
  __shared__ uint64_t full[c.stages], empty[c.stages];
  const MatmulArgs& problem = args.problem;
  char* shared = dynamic_shared + (0u - shared_address(dynamic_shared)) % 1024;
  char* staging = shared + c.stages * (Shape::stage_bytes + Shape::scale_bytes);
  staging += (0u - shared_address(staging)) % 1024;
  const GemmRing<c> ring{shared, full, empty};
  const bool loads = threadIdx.x >= c.warpgroups * 128;
  if (threadIdx.x == 0)
    for (int i = 0; i < c.stages; ++i) {
      init_barrier(&full[i], 1);
      init_barrier(&empty[i], c.warpgroups * 4 * Shape::sharing);
    }
  if constexpr (c.cluster > 1) cluster_sync();
  else __syncthreads();
  wait_for_previous_kernel();
  let_next_kernel_start();
  GemmTiles<c> tiles;
  tiles.prepare(problem);
  const uint32_t rank = c.cluster > 1 ? block_in_cluster() : 0;

  if (loads) {
    if constexpr (c.warpgroups > 1) give_registers_back<56>();
    if (threadIdx.x == c.warpgroups * 128) load_tiles<c>(args, ring, tiles, rank);
  } else {
    if constexpr (c.warpgroups > 1) take_registers<224>();
    RingPlace<c.stages> place;
    int buffer = 0;
    GemmSums<c> sums;
    GemmWork<c> work(args, tiles, rank);
    while (work.next()) {
      const GemmTile tile = tiles.at(work.tile, rank);
      multiply_rows<c>(sums, problem, ring, place, tile, work.begin, work.end);
      if constexpr (c.split) share_sums<c>(sums, shared);
      else write_tile<c>(sums, args, tile, staging, buffer);
    }
    if constexpr (c.streamed)
      while (work.next_part()) {
        multiply_rows<c>(sums, problem, ring, place, tiles.at(work.tile, rank), work.begin, work.end);
        keep_sums<c>(sums, args, int(blockIdx.x) * 2 + work.part);
      }
    if constexpr (c.bulk) wait_stores_read<0>();
  }
  if constexpr (c.cluster > 1) {  // no block may go while another uses its shared memory
    __syncwarp();
    cluster_sync();
    if constexpr (c.split) {
      if (!loads) write_shared_tile<c>(problem, tiles.at(tiles.first(), rank), shared, rank);
      __syncwarp();
      cluster_sync();
    }
  }
  if constexpr (c.groups != RowGroups::none) {
    if (problem.fill) tiles.fill_other_rows(problem);
  }
#endif
}

}  // namespace deepinfer
