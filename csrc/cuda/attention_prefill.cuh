// Attention of many queries on Hopper, without a mask or with the causal one.
//
// A work item is 128 queries of one head. One thread drives the copy engine: it brings the queries of an item once and
// then, from the last that is seen to the first, tiles of keys and of values, each into a ring of its own stages. Two
// warpgroups have 64 queries each. Of a tile of keys the matrix unit makes the scores, whose softmax goes on in
// registers (a running maximum and sum of each row); the weights are rounded to the type of the values and are, still
// in registers, the rows of the second product, which is added up in registers as well.
//
// The scores of the next tile are on their way before the values of this one are multiplied, so that one tile's softmax
// overlaps with products of the same warpgroup; and the warpgroups issue their products in turn, so that it overlaps
// with those of the other. The matrix unit bounds a head of 192, the exponentials come close to it below.
//
// Blocks are as many as processors. Items come in the order of their length, the longest first, and are dealt out to
// and fro, which under a causal mask gives all blocks about the same number of tiles. Only tiles that the mask cuts or
// the keys do not fill are masked; those that no query of the item sees are left out.
#pragma once

#include "attention_prefill_config.h"
#include "wgmma.cuh"

namespace deepinfer {

constexpr int kPrefillTile = 128;  // queries of an item, and keys of a tile
constexpr int kPrefillStages = 2;
constexpr int kPrefillPiece = 64, kPrefillRowBytes = 128;  // elements of a head that the copy engine brings as one row

template <AttentionPrefillConfig c>
struct PrefillShared {
  static constexpr int pieces = c.depth / kPrefillPiece, value_pieces = c.value_depth / kPrefillPiece;
  static constexpr int rope_piece = (c.depth - c.rope_depth) / kPrefillPiece;  // the first of them

  char query[pieces][kPrefillTile][kPrefillRowBytes];
  char key[kPrefillStages][pieces][kPrefillTile][kPrefillRowBytes];
  char value[kPrefillStages][value_pieces][kPrefillTile][kPrefillRowBytes];
  uint64_t query_full, query_empty;
  uint64_t key_full[kPrefillStages], key_empty[kPrefillStages], value_full[kPrefillStages], value_empty[kPrefillStages];
};

// The block's item of its n-th turn; the turns change direction.
DEVICE int prefill_item(int n) { return n * gridDim.x + (n % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x); }

template <AttentionPrefillConfig c>
struct PrefillItem {
  int batch, head, query, tiles;  // the first of the queries, and how many tiles of keys they see

  DEVICE PrefillItem(const AttentionPrefillArgs& args, int i) {
    const AttentionArgs& problem = args.problem;
    const int rows = tiles_of(problem.queries), all = int(problem.batch * problem.heads);
    const int first = i / (rows * args.section) * args.section, rest = i % (rows * args.section);
    const int section = all - first < args.section ? all - first : args.section;
    const int which = first + rest % section;
    head = which % int(problem.heads);
    batch = which / int(problem.heads);
    query = (rows - 1 - rest / section) * kPrefillTile;
    tiles = tiles_of(problem.keys);
    if (c.causal && query / kPrefillTile < tiles) tiles = query / kPrefillTile + 1;
  }
  static DEVICE int tiles_of(int64_t tokens) { return int((tokens + kPrefillTile - 1) / kPrefillTile); }
};

template <AttentionPrefillConfig c>
DEVICE void load_items(const AttentionPrefillArgs& args, PrefillShared<c>& shared, int items) {
  using Shared = PrefillShared<c>;
  const int group = int(args.problem.heads / args.problem.key_heads);
  RingPlace<kPrefillStages> place;
  for (int n = 0, i; (i = prefill_item(n)) < items; ++n) {
    const PrefillItem<c> item(args, i);
    const int key_head = item.head / group;
    wait_barrier(&shared.query_empty, n % 2 ^ 1);
    expect_bytes(&shared.query_full, sizeof(shared.query));
    for (int p = 0; p < Shared::rope_piece; ++p)
      tensor_load(shared.query[p], args.query, p * kPrefillPiece, item.query, item.head, item.batch,
                  &shared.query_full);
    for (int p = Shared::rope_piece; p < Shared::pieces; ++p)
      tensor_load(shared.query[p], args.query_rope, (p - Shared::rope_piece) * kPrefillPiece, item.query, item.head,
                  item.batch, &shared.query_full);
    for (int tile = item.tiles - 1; tile >= 0; --tile, place.advance()) {
      const int stage = place.stage, token = tile * kPrefillTile;
      wait_barrier(&shared.key_empty[stage], place.parity ^ 1);
      expect_bytes(&shared.key_full[stage], sizeof(shared.key[0]));
      for (int p = 0; p < Shared::rope_piece; ++p)
        tensor_load(shared.key[stage][p], args.key, p * kPrefillPiece, token, key_head, item.batch,
                    &shared.key_full[stage]);
      for (int p = Shared::rope_piece; p < Shared::pieces; ++p)
        tensor_load(shared.key[stage][p], args.key_rope, (p - Shared::rope_piece) * kPrefillPiece, token,
                    args.rope_of_all ? 0 : key_head, item.batch, &shared.key_full[stage]);
      wait_barrier(&shared.value_empty[stage], place.parity ^ 1);
      expect_bytes(&shared.value_full[stage], sizeof(shared.value[0]));
      for (int p = 0; p < Shared::value_pieces; ++p)
        tensor_load(shared.value[stage][p], args.value, p * kPrefillPiece, token, key_head, item.batch,
                    &shared.value_full[stage]);
    }
  }
}

DEVICE float exp2_approximately(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

DEVICE float minus_infinity() { return __uint_as_float(0xff800000u); }

// Lane t of four neighbours gives word j to lane j, as its word t.
DEVICE void transpose_among_four(uint32_t (&words)[4]) {
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    const bool upper = threadIdx.x & step;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & step) continue;
      const uint32_t other = __shfl_xor_sync(0xffffffff, upper ? words[i] : words[i + step], step);
      if (upper) words[i] = other;
      else words[i + step] = other;
    }
  }
}

// What a warpgroup does with its queries of one item. A thread has two rows, eight apart.
template <AttentionPrefillConfig c>
class PrefillRows {
 public:
  DEVICE PrefillRows(const AttentionArgs& args, PrefillShared<c>& shared) : args_(args), shared_(shared) {}

  DEVICE void run(const PrefillItem<c>& item, uint32_t query_parity) {
    const int row = item.query + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      limit_[i] = c.causal && row + i * 8 < args_.keys ? row + i * 8 + 1 : int(args_.keys);
      most_[i] = minus_infinity();
      sum_[i] = 0.f;
    }
#pragma unroll
    for (int i = 0; i < c.value_depth / 2; ++i) out_[i] = 0.f;

    wait_barrier(&shared_.query_full, query_parity);
    wait_barrier(&shared_.key_full[key_.stage], key_.parity);
    begin_products();
    issue_scores();
    wait_products<0>();
    made(scores_);
    release(shared_.key_empty[key_.stage]);
    key_.advance();
    int tile = item.tiles - 1;
    mask(tile);
    exponentiate();
    round_weights();
    if (tile > 0) wait_barrier(&shared_.key_full[key_.stage], key_.parity);
    while (--tile >= 0) {
      await_turn();
      begin_products();
      issue_scores();
      wait_barrier(&shared_.value_full[value_.stage], value_.parity);
      begin_products();
      issue_values();
      pass_turn();
      wait_products<1>();
      made(scores_);
      release(shared_.key_empty[key_.stage]);
      key_.advance();
      exponentiate();
      // Here, so that the compiler does not move the exponentials behind the products that they overlap with.
      if (tile > 0) wait_barrier(&shared_.key_full[key_.stage], key_.parity);
      wait_products<0>();
      made(out_);
      release(shared_.value_empty[value_.stage]);
      value_.advance();
      round_weights();
#pragma unroll
      for (int i = 0; i < c.value_depth / 2; ++i) out_[i] *= factor_[i / 2 % 2];
    }
    release(shared_.query_empty);
    wait_barrier(&shared_.value_full[value_.stage], value_.parity);
    begin_products();
    issue_values();
    wait_products<0>();
    made(out_);
    release(shared_.value_empty[value_.stage]);
    value_.advance();
    write(item, row);
  }

 private:
  static constexpr Operand type = c.type == DType::bf16 ? Operand::bf16 : Operand::f16;
  using Out = Element<c.type>;

  // The same in all lanes. Said like this, the compiler sees it, and keeps what follows from it in uniform registers.
  static DEVICE uint64_t uniform(uint64_t descriptor) {
    const uint32_t low = uint32_t(descriptor) + threadIdx.x % 32;
    return descriptor >> 32 << 32 | __shfl_sync(0xffffffff, low, 0);
  }

  DEVICE void issue_scores() {
    const uint64_t queries = uniform(matrix_descriptor<true>(shared_.query[0][threadIdx.x / 128 * 64], 0));
    const uint64_t keys = uniform(matrix_descriptor<true>(shared_.key[key_.stage], 0));
    multiply<type, kPrefillTile, true, true, false>(scores_, queries, keys);
#pragma unroll
    for (int k = 16; k < c.depth; k += 16) {
      const int piece = k / kPrefillPiece * kPrefillRowBytes, within = k % kPrefillPiece * 2;
      multiply<type, kPrefillTile, true, true>(scores_, queries + ((piece * kPrefillTile + within) >> 4),
                                         keys + ((piece * kPrefillTile + within) >> 4));
    }
    commit_products();
  }

  DEVICE void issue_values() {
    const uint64_t values = matrix_descriptor<false>(shared_.value[value_.stage], kPrefillTile * kPrefillRowBytes);
#pragma unroll
    for (int k = 0; k < kPrefillTile; k += 16)
      multiply_registers<type, c.value_depth, false>(out_, weights_ + k / 4, values + (k * kPrefillRowBytes >> 4));
    commit_products();
  }

  // A promise to the compiler that these registers are read no earlier.
  template <int n>
  static DEVICE void made(float (&products)[n]) {
#pragma unroll
    for (int i = 0; i < n; ++i) asm volatile("" : "+f"(products[i]) :: "memory");
  }

  static DEVICE void release(uint64_t& empty) {
    if (threadIdx.x % 32 == 0) arrive(&empty);
  }

  DEVICE void mask(int tile) {
    const int first = tile * kPrefillTile + threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < kPrefillTile / 2; ++i)
      if (first + i / 4 * 8 + i % 2 >= limit_[i / 2 % 2]) scores_[i] = minus_infinity();
  }

  // Scores become their exponentials, less the largest so far; `factor_` is what those before are to be multiplied by.
  DEVICE void exponentiate() {
    constexpr int partial = 2;  // of a row, for sums that do not wait for each other
    const float scale = args_.scale * 1.44269504f;
    float least[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float most[partial] = {scores_[row * 2], scores_[row * 2 + 1]};
#pragma unroll
      for (int i = 1; i < kPrefillTile / 8; ++i)
#pragma unroll
        for (int j = 0; j < partial; ++j) most[j] = fmaxf(most[j], scores_[i * 4 + row * 2 + j]);
      float largest = fmaxf(most_[row], fmaxf(most[0], most[1]));
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, 2));
      least[row] = largest == minus_infinity() ? 0.f : largest * -scale;
      factor_[row] = exp2_approximately(fmaf(most_[row], scale, least[row]));
      most_[row] = largest;
    }
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float sums[partial] = {sum_[row] * factor_[row], 0.f};
#pragma unroll
      for (int i = 0; i < kPrefillTile / 8; ++i)
#pragma unroll
        for (int j = 0; j < partial; ++j) {
          float& score = scores_[i * 4 + row * 2 + j];
          score = exp2_approximately(fmaf(score, scale, least[row]));
          sums[j] += score;
        }
      sum_[row] = sums[0] + sums[1];
    }
  }

  DEVICE void round_weights() {
#pragma unroll
    for (int i = 0; i < kPrefillTile / 4; ++i) weights_[i] = Pair<Out>::from_floats(scores_[i * 2], scores_[i * 2 + 1]);
  }

  DEVICE void write(const PrefillItem<c>& item, int row) {
    float inverse[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float sum = sum_[i];
      sum += __shfl_xor_sync(0xffffffff, sum, 1);
      sum += __shfl_xor_sync(0xffffffff, sum, 2);
      inverse[i] = 1.f / sum;
    }
    const HeadStrides& strides = args_.out_strides;
    Out* out = static_cast<Out*>(args_.out) + item.batch * strides.batch + item.head * strides.head +
               row * strides.token + threadIdx.x % 4 * 8;
#pragma unroll
    for (int column = 0; column < c.value_depth; column += 32)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t words[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float* pair = out_ + column / 2 + j * 4 + i * 2;
          words[j] = Pair<Out>::from_floats(pair[0] * inverse[i], pair[1] * inverse[i]);
        }
        transpose_among_four(words);
        if (row + i * 8 < args_.queries)
          store_access(reinterpret_cast<uint32_t*>(out + i * 8 * strides.token + column),
                       Vec<uint32_t, 4>{words[0], words[1], words[2], words[3]});
      }
  }

  const AttentionArgs& args_;
  PrefillShared<c>& shared_;
  RingPlace<kPrefillStages> key_, value_;
  float scores_[kPrefillTile / 2], out_[c.value_depth / 2];
  uint32_t weights_[kPrefillTile / 4];
  float most_[2], sum_[2], factor_[2];
  int limit_[2];  // the first key that a row does not see
};

template <AttentionPrefillConfig c>
DEVICE void attention_prefill(const AttentionPrefillArgs& args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ char dynamic_shared[];
  auto& shared =
      *reinterpret_cast<PrefillShared<c>*>(dynamic_shared + (0u - shared_address(dynamic_shared)) % 1024);
  constexpr int warps = 8;  // that read
  if (threadIdx.x == 256) {
    prefetch_map(args.query);
    prefetch_map(args.key);
    prefetch_map(args.value);
  }
  if (threadIdx.x == 0) {
    init_barrier(&shared.query_full, 1);
    init_barrier(&shared.query_empty, warps);
    for (int i = 0; i < kPrefillStages; ++i) {
      init_barrier(&shared.key_full[i], 1);
      init_barrier(&shared.key_empty[i], warps);
      init_barrier(&shared.value_full[i], 1);
      init_barrier(&shared.value_empty[i], warps);
    }
  }
  __syncthreads();
  wait_for_previous_kernel();
  let_next_kernel_start();
  const AttentionArgs& problem = args.problem;
  const int items = int(problem.batch * problem.heads) * PrefillItem<c>::tiles_of(problem.queries);
  if (threadIdx.x >= 256) {
    give_registers_back<24>();
    if (threadIdx.x == 256) load_items<c>(args, shared, items);
    return;
  }
  take_registers<240>();
  if (threadIdx.x >= 128) pass_turn();
  PrefillRows<c> rows(problem, shared);
  for (int n = 0, i; (i = prefill_item(n)) < items; ++n) rows.run(PrefillItem<c>(args, i), n % 2);
#endif
}

}  // namespace deepinfer
