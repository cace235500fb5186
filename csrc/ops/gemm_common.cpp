#include "gemm_common.h"

#include <cstring>
#include <vector>

#include "../cpu/parallel.h"
#include "../cuda/gemm.h"
#include "../npu/gemm.h"
#include "overlap.h"
#include "rows.h"

namespace deepinfer {

namespace {

int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// What a kernel may read past the end of the scratch for products and biases: a whole vector of both halves.
constexpr int64_t kReadAhead = 128;

// Bytes of an element of x in a packed row: only the AVX-512 kernel multiplies bf16 as such, all else is float32.
int64_t packed_size(DType dtype) { return dtype == DType::bf16 && cpu::isa() == cpu::Isa::avx512 ? 2 : 4; }

// The most rows of a block: such that they take about half of a 1 MB L2 cache when packed. Weights that have to be
// copied are copied for each block, which is worth more rows than that.
int64_t most_block_rows(const GroupedGemmArgs& args) {
  const int64_t row_bytes = std::max<int64_t>(1, args.depth * packed_size(args.dtype));
  return std::clamp<int64_t>(round_up(512 * 1024 / row_bytes, 4), args.depth_stride == 1 ? 32 : 256, 256);
}

// Cuts the rows of each expert into blocks of nearly the same size.
std::vector<RowBlock> row_blocks(const std::vector<RowBlock>& groups, int64_t max_rows) {
  std::vector<RowBlock> blocks;
  for (const auto& [expert, first_row, rows] : groups) {
    if (rows <= 0) continue;
    const int64_t parts = (rows + max_rows - 1) / max_rows, size = round_up((rows + parts - 1) / parts, 4);
    for (int64_t at = 0; at < rows; at += size) blocks.push_back({expert, first_row + at, std::min(size, rows - at)});
  }
  return blocks;
}

// The columns of one item of work.
int64_t chunk_columns(const GroupedGemmArgs& args, int64_t column_bytes, int64_t most_rows, int64_t threads) {
  int64_t tiles;
  if (args.depth_stride == 1) {
    // About 256 KB of weights: long enough to stream, short enough to balance.
    tiles = std::clamp<int64_t>(256 * 1024 / column_bytes / cpu::kColumnTile, 1, 16);
  } else {
    // Columns are not dense, rows may be: the longer the pieces the faster they come out of memory, which is what few
    // rows of x wait for; but four items a thread.
    const int64_t most_tiles = most_rows <= 32 ? 80 : 16;
    tiles = std::clamp<int64_t>(args.columns * args.block_count / (4 * threads) / cpu::kColumnTile, 16, most_tiles);
  }
  return std::min(tiles * cpu::kColumnTile, round_up(args.columns, cpu::kColumnTile));
}

// Zeros for the rows that belong to no expert.
void fill_rows(const MatmulArgs& args, int64_t begin, int64_t end) {
  const int64_t size = element_size(args.out_dtype);
  char* out = static_cast<char*>(args.out);
  for (int64_t row = begin; row < end; ++row) std::memset(out + row * args.out_stride * size, 0, args.columns * size);
}

void matmul_on_cpu(const MatmulArgs& args, const Tensor& like) {
  std::vector<RowBlock> groups;  // one an expert
  int64_t begin = 0;
  for (int64_t e = 0; e < args.experts; ++e) {
    if (args.row_groups == RowGroups::counts) begin = e * args.group_rows;
    const int64_t end = args.row_groups == RowGroups::ends     ? args.groups[e]
                        : args.row_groups == RowGroups::counts ? begin + args.groups[e]
                                                               : begin + args.rows;
    groups.push_back({e, begin, end - begin});
    begin = end;
    if (args.fill && args.row_groups == RowGroups::counts) fill_rows(args, end, (e + 1) * args.group_rows);
  }
  if (args.fill && args.row_groups == RowGroups::ends) fill_rows(args, begin, args.rows);
  GroupedGemmArgs to{};
  to.x = args.x;
  to.x_stride = args.x_stride;
  to.weight = args.weight;
  to.expert_stride = args.expert_stride;
  to.column_stride = args.column_stride;
  to.depth_stride = args.depth_stride;
  to.bias = args.bias;
  to.bias_stride = args.bias_stride;
  to.addend = args.addend;
  to.addend_stride = args.addend_stride;
  to.out = args.out;
  to.out_stride = args.out_stride;
  to.columns = args.columns;
  to.depth = args.depth;
  to.scale = args.scale;
  to.round_sums = args.bias_step == BiasStep::rounded;
  to.dtype = args.dtype;
  to.out_dtype = args.out_dtype;
  grouped_gemm_on_cpu(to, like, groups);
}

}  // namespace

void grouped_gemm_on_cpu(GroupedGemmArgs& args, const Tensor& like, const std::vector<RowBlock>& groups) {
  const auto blocks = row_blocks(groups, most_block_rows(args));
  if (blocks.empty() || args.columns == 0) return;
  int64_t most_rows = 0;
  for (const RowBlock& block : blocks) most_rows = std::max(most_rows, block.rows);
  args.blocks = blocks.data();
  args.block_count = int64_t(blocks.size());

  const int64_t threads = torch::stable::get_num_threads(), halves = args.gated ? 2 : 1;
  const int64_t column_bytes = std::max<int64_t>(1, args.depth * element_size(args.dtype) * halves);
  args.chunk = chunk_columns(args, column_bytes, most_rows, threads);
  const int64_t items = args.block_count * ((args.columns + args.chunk - 1) / args.chunk);
  const int64_t workers = std::min(items, threads);
  args.packed_bytes = most_rows * round_up(args.depth, 32) * packed_size(args.dtype);
  args.bias_bytes = round_up(args.chunk * halves * 4, 64) + kReadAhead;
  args.product_bytes = most_rows * round_up(args.chunk * halves * 4, 64) + kReadAhead;
  args.scratch_bytes = args.packed_bytes + args.product_bytes + args.bias_bytes;
  if (args.depth_stride != 1) {
    args.copy_stride = round_up(args.depth, 32) + 32;  // no power of two: columns would compete for one set of a cache
    args.scratch_bytes += args.chunk * halves * args.copy_stride * element_size(args.dtype);
  }
  Tensor scratch = new_tensor(like, {workers * args.scratch_bytes}, ScalarType::Byte);
  args.scratch = scratch.mutable_data_ptr();
  int64_t next_item = 0;
  args.next_item = &next_item;
  cpu::parallel(cpu::grouped_gemm, args, workers, items * args.chunk * column_bytes);
}

// Whether the copy engine can read it: addresses and all strides but that of one dense dimension are multiples of 16
// bytes.
static bool suits_copy_engine(const Tensor& t, bool dense_depth) {
  const int64_t size = int64_t(t.element_size()), last = t.dim() - 1;
  auto fits = [&](int64_t d, int64_t least) {
    return t.size(d) == 1 || (t.stride(d) * size % 16 == 0 && t.stride(d) >= least);
  };
  if (reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 != 0) return false;
  if (t.dim() == 3 && !fits(0, 1)) return false;
  const int64_t rows = t.size(last - 1), depth = t.size(last);
  if (depth == 1 || t.stride(last) == 1) return fits(last - 1, depth);
  return !dense_depth && (rows == 1 || t.stride(last - 1) == 1) && fits(last, rows);
}

static Tensor for_copy_engine(const Tensor& t, bool dense_depth) {
  if (t.numel() == 0 || suits_copy_engine(t, dense_depth)) return t;
  std::vector<int64_t> sizes = sizes_of(t);
  sizes.back() = round_up(sizes.back(), 16 / int64_t(t.element_size()));
  Tensor padded = new_tensor(t, sizes, t.scalar_type());
  Tensor copy = torch::stable::narrow(padded, t.dim() - 1, 0, t.size(t.dim() - 1));
  return torch::stable::copy_(copy, t);
}

// On an NPU a matrix has dense rows or, with elements of 2 bytes, dense columns, none of which share memory.
static Tensor for_cube_cores(const Tensor& t) {
  const auto fits = [&](int64_t dense, int64_t other) {
    return (t.size(dense) == 1 || t.stride(dense) == 1) && (t.size(other) == 1 || t.stride(other) >= t.size(dense));
  };
  const bool kept = fits(1, 0) || (t.element_size() == 2 && t.size(0) > 1 && t.size(1) > 1 && fits(0, 1));
  return kept ? t : torch::stable::contiguous(t);
}

Tensor as_operand(const Tensor& t) {
  if (is_npu(t)) return for_cube_cores(t);
  const bool copied = t.is_cuda() && t.scalar_type() != ScalarType::Float;
  return copied && cuda::uses_copy_engine(t.get_device_index()) ? for_copy_engine(t, false) : t;
}

// The experts of 3-D tokens lie one behind the other.
static bool has_one_stride(const Tensor& t) {
  return t.dim() < 3 || t.size(0) <= 1 || t.size(1) <= 1 || t.stride(0) == t.size(1) * t.stride(1);
}
static Tensor with_one_stride(const Tensor& t) { return has_one_stride(t) ? t : torch::stable::contiguous(t); }

Tensor as_tokens(const Tensor& t) {
  return t.is_cuda() || is_npu(t) ? as_operand(with_one_stride(t)) : with_one_stride(with_dense_rows(t));
}

Tensor as_e4m3_operand(const Tensor& t) {
  return cuda::uses_copy_engine(t.get_device_index()) ? for_copy_engine(t, true) : t;
}

// With one row an expert, its stride is that of the experts.
int64_t row_stride(const Tensor& t) {
  const bool by_expert = t.dim() == 3 && t.size(1) == 1 && t.size(0) > 1;
  return t.stride(by_expert ? 0 : t.dim() - 2);
}

bool has_plain_rows(const Tensor& out) {
  return (out.size(2) <= 1 || out.stride(2) == 1) && has_one_stride(out);
}

void check_masked_result(const char* op, const Tensor& out, const Tensor& x, int64_t columns) {
  DI_CHECK(out.dim() == 3 && out.size(0) == x.size(0) && out.size(1) == x.size(1) && out.size(2) == columns, op,
           ": out must have shape [", x.size(0), ", ", x.size(1), ", ", columns, "], got ", shape_of(out));
  check_same_device(op, "out", out, x);
  DI_CHECK(!overlaps_itself(out), op, ": out is written and must not be expanded or have elements that share memory");
}

void check_groups(const char* op, const char* argument, const MatmulArgs& args) {
  int64_t last = 0;
  for (int64_t e = 0; e < args.experts; ++e) {
    const int64_t value = args.groups[e];
    if (args.row_groups == RowGroups::counts) {
      DI_CHECK(value >= 0 && value <= args.group_rows, op, ": ", argument, " must lie in [0, ", args.group_rows,
               "], got ", value);
    } else {
      DI_CHECK(value >= last, op, ": ", argument, " must be ascending and not negative, got ", value, " after ", last);
      last = value;
    }
  }
  DI_CHECK(last <= args.rows, op, ": ", argument, " must not exceed the ", args.rows, " rows of x, got ", last);
}

void set_x(MatmulArgs& args, const Tensor& x) {
  args.x = x.const_data_ptr();
  args.x_stride = row_stride(x);
  args.x_depth_stride = x.stride(x.dim() - 1);
}

// The stride along a k of one element is never used, but decides how the weight is read.
void set_weight(MatmulArgs& args, const Tensor& weight) {
  const int64_t last = weight.dim() - 1;
  args.weight = weight.const_data_ptr();
  args.expert_stride = weight.dim() == 3 ? weight.stride(0) : 0;
  args.column_stride = weight.stride(last - 1);
  args.depth_stride = weight.size(last) == 1 ? 1 : weight.stride(last);
}

void matmul(const MatmulArgs& args, const Tensor& like) {
  if (is_npu(like)) {
    const int device = like.get_device_index();
    const int64_t floats = npu::matmul_scratch(args);
    if (floats == 0) return npu::matmul(args, nullptr, device);
    Tensor scratch = new_tensor(like, {floats}, ScalarType::Float);
    return npu::matmul(args, static_cast<float*>(scratch.mutable_data_ptr()), device);
  }
  if (like.is_cuda()) {
    const int device = like.get_device_index();
    const int64_t bytes = cuda::matmul_scratch_bytes(args, device);
    if (bytes == 0) return cuda::matmul(args, nullptr, device);
    Tensor scratch = new_tensor(like, {bytes}, ScalarType::Byte);
    return cuda::matmul(args, scratch.mutable_data_ptr(), device);
  }
  matmul_on_cpu(args, like);
}

}  // namespace deepinfer
