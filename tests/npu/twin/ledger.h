// What is remembered of each byte of a memory. Nearly all accesses are of whole blocks of 32 bytes: a block has one record
// for all of its bytes until some of them are accessed without the others.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <memory>
#include <vector>

namespace twin {

template <typename Record>
class Ledger {
 public:
  static constexpr size_t kBlock = 32;

  void resize(size_t bytes) { blocks_.resize((bytes + kBlock - 1) / kBlock); }
  bool empty() const { return blocks_.empty(); }

  // Forgets the first `bytes` bytes.
  void clear(size_t bytes) {
    for (size_t i = 0; i * kBlock < bytes; ++i) blocks_[i] = Block{};
  }

  // Calls f(record, byte) for bytes [begin, end): once for a block whose bytes are alike, with the first of them.
  template <typename F>
  void visit(size_t begin, size_t end, F f) {
    while (begin < end) {
      Block& block = blocks_[begin / kBlock];
      const size_t start = begin / kBlock * kBlock, stop = std::min(end, start + kBlock);
      const bool whole = stop - begin == kBlock;
      if (whole && !block.bytes) {
        f(block.all, begin);
      } else {
        if (!block.bytes) {
          block.bytes = std::make_unique<std::array<Record, kBlock>>();
          block.bytes->fill(block.all);
        }
        for (size_t byte = begin; byte < stop; ++byte) f((*block.bytes)[byte - start], byte);
        if (whole) merge(block);
      }
      begin = stop;
    }
  }

 private:
  struct Block {
    Record all;
    std::unique_ptr<std::array<Record, kBlock>> bytes;  // where they differ
  };

  static void merge(Block& block) {
    const Record& first = block.bytes->front();
    if (!std::all_of(block.bytes->begin(), block.bytes->end(), [&](const Record& r) { return r == first; })) return;
    block.all = first;
    block.bytes.reset();
  }

  std::vector<Block> blocks_;
};

}  // namespace twin
