#include "cube.h"

#include <cstring>
#include <string>
#include <vector>

namespace AscendC::detail {

namespace {

using twin::core;
using twin::kFix;
using twin::kL0A;
using twin::kL0B;
using twin::kL0C;
using twin::kL1;
using twin::kM;
using twin::kMTE1;
using twin::kMTE2;
using twin::Space;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

void require_space(const Matrix& matrix, Space space, const char* what) {
  if (matrix.space != space) core().fail(std::string(what) + " is not in its memory");
}
void require_alignment(const Matrix& matrix, size_t alignment) {
  if (matrix.offset % alignment)
    core().fail("the address " + std::to_string(matrix.offset) + " is not a multiple of " + std::to_string(alignment));
}
void require_bytes(const Matrix& matrix, int64_t begin, int64_t bytes) {
  if (begin < 0 || size_t(begin + bytes) > matrix.bytes)
    core().fail(std::to_string(begin + bytes) + " bytes of a tensor that has " + std::to_string(matrix.bytes));
}
void require_range(const char* name, int64_t value, int64_t least, int64_t most) {
  if (value < least || value > most)
    core().fail(std::string(name) + " is " + std::to_string(value) + ", from " + std::to_string(least) + " to " +
                std::to_string(most));
}

char* address(const Matrix& matrix, int64_t offset) { return core().data(matrix.space) + matrix.offset + offset; }

void read(twin::Pipe pipe, uint32_t tick, const Matrix& matrix, int64_t offset, int64_t bytes, bool any = false) {
  require_bytes(matrix, offset, bytes);
  core().access(pipe, tick, matrix.space, matrix.offset + size_t(offset), size_t(bytes), false, any);
}
void write(twin::Pipe pipe, uint32_t tick, const Matrix& matrix, int64_t offset, int64_t bytes) {
  require_bytes(matrix, offset, bytes);
  core().access(pipe, tick, matrix.space, matrix.offset + size_t(offset), size_t(bytes), true);
}

struct Fractal {
  int64_t to, from;  // in bytes
};

// Whole fractals, with what is undefined in them.
void move_fractals(const Matrix& to, const Matrix& from, int64_t item, bool transposed,
                   const std::vector<Fractal>& fractals) {
  const uint32_t tick = core().issue(kMTE1, "LoadData");
  if (to.space != kL0A && to.space != kL0B) core().fail("the destination is neither in L0A nor in L0B");
  require_space(from, kL1, "the source");
  require_alignment(to, size_t(kFractalBytes));
  require_alignment(from, size_t(kC0Bytes));
  ++core().work().loads;
  core().work().loaded_bytes += int64_t(fractals.size()) * kFractalBytes;
  const auto source = [=](int64_t byte) {  // of a byte of the destination, within a fractal
    if (!transposed) return byte;
    const int64_t element = byte / item, row = element / kEdge, column = element % kEdge;
    return (column * kEdge + row) * item + byte % item;
  };
  for (const Fractal& f : fractals) {
    read(kMTE1, tick, from, f.from, kFractalBytes, true);
    write(kMTE1, tick, to, f.to, kFractalBytes);
    if (core().is_defined(from.space, from.offset + size_t(f.from), size_t(kFractalBytes))) continue;
    for (int64_t i = 0; i < kFractalBytes; i += item)
      if (!core().is_defined(from.space, from.offset + size_t(f.from + source(i)), size_t(item)))
        core().mark_undefined(to.space, to.offset + size_t(f.to + i), size_t(item));
  }
  core().defer(kMTE1, tick, [=] {
    for (const Fractal& f : fractals)
      if (transposed)
        for (int64_t i = 0; i < kFractalBytes; i += item)
          std::memcpy(address(to, f.to + i), address(from, f.from + source(i)), size_t(item));
      else std::memcpy(address(to, f.to), address(from, f.from), size_t(kFractalBytes));
  });
}

void require_transposable(int64_t item, bool transposed) {
  if (transposed && item != 2) core().fail("fractals are transposed for elements of 2 bytes only, here");
}

}  // namespace

int64_t source_elements(const Nd2NzParams& p) {
  return (p.ndNum - 1) * int64_t(p.srcNdMatrixStride) + (p.nValue - 1) * int64_t(p.srcDValue) + p.dValue;
}

void nd2nz(const Matrix& to, char* from, int64_t item, const Nd2NzParams& p) {
  const uint32_t tick = core().issue(kMTE2, "DataCopy to L1");
  require_space(to, kL1, "the destination");
  require_alignment(to, size_t(kC0Bytes));
  require_range("ndNum", p.ndNum, 1, 4095);
  require_range("nValue", p.nValue, 1, 16384);
  require_range("dValue", p.dValue, 1, 65535);
  require_range("srcDValue", p.srcDValue, 1, 65535);
  require_range("dstNzC0Stride", p.dstNzC0Stride, 1, 16384);
  require_range("dstNzNStride", p.dstNzNStride, 1, 16384);
  const int64_t blocks = ceil_div(p.dValue * item, kC0Bytes);
  if (blocks > 1 && int64_t(p.dstNzC0Stride) < (p.nValue - 1) * int64_t(p.dstNzNStride) + 1)
    core().fail("what is written to L1 overlaps");
  core().work().copies += 1;
  core().work().copied_bytes += int64_t(p.ndNum) * p.nValue * p.dValue * item;
  struct Row {
    char* from;
    int64_t to;
  };
  std::vector<Row> rows;
  for (int64_t matrix = 0; matrix < p.ndNum; ++matrix)
    for (int64_t n = 0; n < p.nValue; ++n) {
      const Row row{from + (matrix * p.srcNdMatrixStride + n * p.srcDValue) * item,
                    matrix * p.dstNzMatrixStride * item + n * p.dstNzNStride * kC0Bytes};
      core().access_global(kMTE2, tick, row.from, size_t(p.dValue * item), false);
      for (int64_t c = 0; c < blocks; ++c) write(kMTE2, tick, to, row.to + c * p.dstNzC0Stride * kC0Bytes, kC0Bytes);
      rows.push_back(row);
    }
  const int64_t width = p.dValue * item, step = p.dstNzC0Stride * kC0Bytes;
  core().defer(kMTE2, tick, [=] {
    for (const Row& row : rows) {
      const char* source = core().global_memory(row.from, size_t(width));
      for (int64_t c = 0; c < blocks; ++c) {
        char* target = address(to, row.to + c * step);
        const int64_t bytes = std::min(kC0Bytes, width - c * kC0Bytes);
        std::memset(target, 0, size_t(kC0Bytes));
        std::memcpy(target, source + c * kC0Bytes, size_t(bytes));
      }
    }
  });
}

void load(const Matrix& to, const Matrix& from, int64_t item, const LoadData2DParams& p) {
  core().name_instruction("LoadData");
  require_transposable(item, p.ifTranspose);
  require_range("repeatTimes", p.repeatTimes, 1, 255);
  if (core().arch().number == 3510 && p.dstGap) core().fail("this chip has no dstGap");
  if (p.addrMode) core().fail("this order of addresses is not modelled");
  std::vector<Fractal> fractals;
  for (int64_t i = 0; i < p.repeatTimes; ++i)
    fractals.push_back({i * (1 + p.dstGap) * kFractalBytes, (p.startIndex + i * p.srcStride) * kFractalBytes});
  move_fractals(to, from, item, p.ifTranspose, fractals);
}

void load(const Matrix& to, const Matrix& from, int64_t item, const LoadData2DParamsV2& p) {
  core().name_instruction("LoadData");
  if (core().arch().number != 3510) core().fail("this chip has no such form of LoadData");
  require_transposable(item, p.ifTranspose);
  require_range("mStep", p.mStep, 1, 255);
  require_range("kStep", p.kStep, 1, 255);
  const int64_t start = int64_t(p.kStartPosition) * p.srcStride + p.mStartPosition;
  std::vector<Fractal> fractals;
  for (int64_t k = 0; k < p.kStep; ++k)
    for (int64_t m = 0; m < p.mStep; ++m) {
      const int64_t target = p.ifTranspose ? m * p.dstStride + k : k * p.dstStride + m;
      fractals.push_back({target * kFractalBytes, (start + k * p.srcStride + m) * kFractalBytes});
    }
  move_fractals(to, from, item, p.ifTranspose, fractals);
}

void multiply(const Matrix& c, const Matrix& a, const Matrix& b, int64_t item, ToFloat widen, const MmadParams& p) {
  // Sums of fewer fractals are not kept behind those that they continue.
  constexpr int kFractalsInOrder = 10;
  if ((p.m / kEdge) * (p.n / kEdge) >= kFractalsInOrder) core().follow(kM);
  const uint32_t tick = core().issue(kM, "Mmad");
  require_space(c, kL0C, "the result");
  require_space(a, kL0A, "the left matrix");
  require_space(b, kL0B, "the right matrix");
  require_alignment(c, 1024);
  require_alignment(a, size_t(kFractalBytes));
  require_alignment(b, size_t(kFractalBytes));
  require_range("m", p.m, 1, 4095);
  require_range("n", p.n, 1, 4095);
  require_range("k", p.k, 1, 4095);
  const bool nz = core().arch().number == 3510;
  if (p.unitFlag || p.kDirectionAlign || p.cmatrixSource) core().fail("not modelled");
  if (p.disableGemv && !nz) core().fail("this chip has no disableGemv");
  const int64_t m = p.m, n = p.n, k = p.k, c0 = kC0Bytes / item;
  const int64_t m_edges = ceil_div(m, kEdge), n_edges = ceil_div(n, kEdge), k_edges = ceil_div(k, c0);
  const bool vector = m == 1 && !p.disableGemv;  // a single row is read as it is, not as fractals
  const auto a_at = [=](int64_t row, int64_t block) {
    if (vector) return block * kC0Bytes;
    const int64_t fractal = nz ? block * m_edges + row / kEdge : row / kEdge * k_edges + block;
    return fractal * kFractalBytes + row % kEdge * kC0Bytes;
  };
  const auto b_at = [=](int64_t column, int64_t block) {
    return (block * n_edges + column / kEdge) * kFractalBytes + column % kEdge * kC0Bytes;
  };
  const auto c_at = [=](int64_t row, int64_t edge) {
    return ((edge * m_edges + row / kEdge) * kEdge * kEdge + row % kEdge * kEdge) * int64_t(sizeof(float));
  };
  const auto block_elements = [=](int64_t block) { return std::min(c0, k - block * c0); };
  const auto edge_columns = [=](int64_t edge) { return std::min(kEdge, n - edge * kEdge); };
  for (int64_t block = 0; block < k_edges; ++block) {
    for (int64_t row = 0; row < m; ++row) read(kM, tick, a, a_at(row, block), block_elements(block) * item);
    for (int64_t column = 0; column < n; ++column) read(kM, tick, b, b_at(column, block), block_elements(block) * item);
  }
  for (int64_t edge = 0; edge < n_edges; ++edge)
    for (int64_t row = 0; row < m_edges * kEdge; ++row) {
      const int64_t at = c_at(row, edge), bytes = row < m ? edge_columns(edge) * int64_t(sizeof(float)) : 0;
      if (!p.cmatrixInitVal && bytes) read(kM, tick, c, at, bytes);
      write(kM, tick, c, at, kEdge * int64_t(sizeof(float)));
      core().mark_undefined(c.space, c.offset + size_t(at + bytes), size_t(kEdge * int64_t(sizeof(float)) - bytes));
    }
  ++core().work().products;
  core().work().fractals += m_edges * n_edges * k_edges;
  const bool fresh = p.cmatrixInitVal;
  core().defer(kM, tick, [=] {
    std::vector<float> left(size_t(m * k_edges * c0)), right(size_t(k_edges * c0 * n)), sums(size_t(m * n));
    std::vector<float> column_of(static_cast<size_t>(c0));
    for (int64_t block = 0; block < k_edges; ++block) {
      for (int64_t row = 0; row < m; ++row)
        widen(address(a, a_at(row, block)), &left[size_t(row * k_edges * c0 + block * c0)], block_elements(block));
      for (int64_t column = 0; column < n; ++column) {
        widen(address(b, b_at(column, block)), column_of.data(), block_elements(block));
        for (int64_t i = 0; i < block_elements(block); ++i)
          right[size_t((block * c0 + i) * n + column)] = column_of[size_t(i)];
      }
    }
    for (int64_t row = 0; row < m; ++row) {
      float* out = &sums[size_t(row * n)];
      for (int64_t edge = 0; edge < n_edges && !fresh; ++edge)
        std::memcpy(out + edge * kEdge, address(c, c_at(row, edge)), size_t(edge_columns(edge)) * sizeof(float));
      for (int64_t i = 0; i < k; ++i) {
        const float factor = left[size_t(row * k_edges * c0 + i)];
        const float* with = &right[size_t(i * n)];
        for (int64_t j = 0; j < n; ++j) out[j] += factor * with[j];
      }
      for (int64_t edge = 0; edge < n_edges; ++edge)
        std::memcpy(address(c, c_at(row, edge)), out + edge * kEdge, size_t(edge_columns(edge)) * sizeof(float));
    }
  });
}

void write_out(char* to, int64_t item, const Matrix& from, FromFloat narrow, const Result& r) {
  const uint32_t tick = core().issue(kFix, "Fixpipe");
  require_space(from, kL0C, "the source");
  require_alignment(from, 64);
  const int64_t edges = ceil_div(r.columns, kEdge);
  const auto at = [=](int64_t row, int64_t edge) {
    return (edge * r.source_stride + row) * kEdge * int64_t(sizeof(float));
  };
  const auto width = [=](int64_t edge) { return std::min(kEdge, r.columns - edge * kEdge); };
  for (int64_t row = 0; row < r.rows; ++row) {
    for (int64_t edge = 0; edge < edges; ++edge)
      read(kFix, tick, from, at(row, edge), width(edge) * int64_t(sizeof(float)));
    core().access_global(kFix, tick, to + row * r.target_stride * item, size_t(r.columns * item), true);
  }
  ++core().work().copies;
  core().work().copied_bytes += r.rows * r.columns * item;
  core().defer(kFix, tick, [=] {
    for (int64_t row = 0; row < r.rows; ++row) {
      char* target = core().global_memory(to + row * r.target_stride * item, size_t(r.columns * item));
      for (int64_t edge = 0; edge < edges; ++edge)
        narrow(reinterpret_cast<const float*>(address(from, at(row, edge))), target + edge * kEdge * item, width(edge));
    }
  });
}

}  // namespace AscendC::detail
