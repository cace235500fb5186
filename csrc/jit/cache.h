// Compiled kernels on disk.
//
//     <root>/v1/entries/rms_norm-sm_90a-<32 digits of the key>/
//         manifest.txt    what it is and how to check it, "name: value" lines
//         kernel.cu       the generated source; kernel.asc for Ascend
//         kernel.cubin    the machine code; kernel.o
//     <root>/v1/locks/    one lock file for each first byte of a key
//     <root>/v1/tmp/      entries being written
//
// An entry is written in tmp, brought to the disk, and renamed into place as a whole. Readers check size and digest of
// the machine code, so whatever a crash or a full disk leaves behind is at worst a kernel that is compiled again.
// Roots come from DEEPINFER_CACHE_DIR, separated by colons; all are read, the first that can be written is.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "files.h"

namespace deepinfer::jit {

// `fields` are the lines of the manifest that the cache does not know itself.
struct CacheEntry {
  std::string kernel, arch, key;
  std::string source, binary;
  std::vector<std::pair<std::string, std::string>> fields;
};

class Cache {
 public:
  // From the environment: DEEPINFER_CACHE_DIR, DEEPINFER_CACHE_SIZE (bytes, or with a suffix K, M or G).
  static Cache from_environment();

  const std::vector<std::string>& roots() const { return roots_; }
  int64_t size_limit() const { return size_limit_; }

  // The machine code of an intact entry, which is marked as used; `path` receives its folder.
  std::optional<std::string> find(const std::string& kernel, const std::string& arch, const std::string& key,
                                  std::string& path) const;

  // Held while the kernel of this key is compiled, so that other processes wait for the result.
  std::unique_ptr<FileLock> lock(const std::string& key) const;

  // Writes an entry and evicts the entries used least recently if the root has grown too large. Returns its folder,
  // or an empty string when no root could take it.
  std::string store(const CacheEntry& entry) const;

 private:
  std::vector<std::string> roots_;
  int64_t size_limit_ = 0;
};

}  // namespace deepinfer::jit
