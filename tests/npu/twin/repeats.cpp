#include "repeats.h"

namespace AscendC::detail {

using twin::core;

void check_repeats(int64_t repeats) {
  if (repeats < 1 || repeats > 255) core().fail("repeatTime is " + std::to_string(repeats) + ", from 1 to 255");
}

void access_blocks(uint32_t tick, const Place& place, const Blocks& blocks, int64_t last, bool write) {
  for (int64_t block = 0; block < blocks.count(); ++block) {
    const int64_t at = blocks.byte(block), bytes = block % blocks.of_repeat + 1 < blocks.of_repeat ? kBlockBytes : last;
    require(place, size_t(at + bytes), size_t(kBlockBytes));
    core().access(twin::kV, tick, place.space, place.offset + size_t(at), size_t(bytes), write);
  }
}

void check_overlap(const Place& to, const Blocks& written, const Place& from, const Blocks& read) {
  if (to.space != from.space) return;
  std::vector<int64_t> writer(core().capacity(to.space) / size_t(kBlockBytes), -1);
  for (int64_t block = 0; block < written.count(); ++block) {
    const size_t at = (to.offset + size_t(written.byte(block))) / size_t(kBlockBytes);
    if (at >= writer.size()) core().fail("a block past the memory");
    if (writer[at] >= 0) core().fail("a block is written twice");
    writer[at] = block;
  }
  for (int64_t block = 0; block < read.count(); ++block) {
    const size_t at = (from.offset + size_t(read.byte(block))) / size_t(kBlockBytes);
    if (at < writer.size() && writer[at] >= 0 && writer[at] != block)
      core().fail("the destination overlaps a source in part");
  }
}

}  // namespace AscendC::detail
