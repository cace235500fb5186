#include "elf.h"

#include <elf.h>

#include <algorithm>
#include <cstring>

namespace deepinfer::jit {

namespace {

template <typename T>
bool read_at(std::string_view file, uint64_t offset, T& value) {
  if (offset > file.size() || file.size() - offset < sizeof(T)) return false;
  std::memcpy(&value, file.data() + offset, sizeof(T));
  return true;
}

}  // namespace

std::vector<std::string> kernels_of_elf(std::string_view file) {
  constexpr std::string_view kPrefix = ".ascend.meta.";
  std::vector<std::string> kernels;
  Elf64_Ehdr header;
  if (!read_at(file, 0, header) || std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0 ||
      header.e_ident[EI_CLASS] != ELFCLASS64 || header.e_shentsize != sizeof(Elf64_Shdr))
    return kernels;
  const auto section = [&](uint64_t index, Elf64_Shdr& result) {
    return read_at(file, header.e_shoff + index * sizeof(Elf64_Shdr), result);
  };
  Elf64_Shdr names, entry;
  if (!section(header.e_shstrndx, names)) return kernels;
  for (int i = 0; i < header.e_shnum && section(uint64_t(i), entry); ++i) {
    const uint64_t at = names.sh_offset + entry.sh_name;
    if (at >= file.size()) continue;
    std::string_view name = file.substr(at, file.substr(at).find('\0'));
    if (name.substr(0, kPrefix.size()) != kPrefix) continue;
    name.remove_prefix(kPrefix.size());
    for (const std::string_view suffix : {"_mix_aic", "_mix_aiv"})
      if (name.size() > suffix.size() && name.substr(name.size() - suffix.size()) == suffix)
        name.remove_suffix(suffix.size());
    if (std::find(kernels.begin(), kernels.end(), name) == kernels.end()) kernels.emplace_back(name);
  }
  return kernels;
}

}  // namespace deepinfer::jit
