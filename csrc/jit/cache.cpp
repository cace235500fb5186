#include "cache.h"

#include <pwd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <ctime>
#include <stdexcept>

#include "compiler.h"
#include "sha256.h"

namespace deepinfer::jit {

namespace {

constexpr const char* kLayout = "/v1";
constexpr int64_t kDefaultSize = int64_t(1) << 30;
constexpr double kLockSeconds = 120;    // a kernel that takes longer is compiled twice, nothing worse
constexpr int64_t kStaleSeconds = 3600;  // unfinished entries older than this belong to a writer that died

std::string home() {
  if (std::string given = environment("HOME"); !given.empty()) return given;
  const passwd* user = getpwuid(getuid());
  return user ? user->pw_dir : "/tmp";
}

int64_t parse_size(const std::string& text) {
  int64_t number = 0;
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  const std::string suffix(end, text.data() + text.size());
  const int shift = suffix == "K" ? 10 : suffix == "M" ? 20 : suffix == "G" ? 30 : suffix.empty() ? 0 : -1;
  if (error != std::errc() || shift < 0 || number < 0 || number > (INT64_MAX >> shift))
    throw std::invalid_argument("DEEPINFER_CACHE_SIZE must be a number of bytes, K, M or G allowed as a suffix, got " +
                                text);
  return number << shift;
}

std::string folder_name(const std::string& kernel, const std::string& arch, const std::string& key) {
  return kernel + "-" + arch + "-" + key.substr(0, 32);
}

std::string entries_of(const std::string& root) { return root + kLayout + "/entries"; }
std::string temporary_of(const std::string& root) { return root + kLayout + "/tmp"; }

// The value of a line "name: value", or an empty string.
std::string field_of(const std::string& manifest, const std::string& name) {
  for (const std::string& line : split(manifest, '\n'))
    if (line.starts_with(name + ": ")) return line.substr(name.size() + 2);
  return "";
}

std::string manifest_of(const CacheEntry& entry) {
  char created[32];
  const time_t now = time(nullptr);
  tm utc;
  std::strftime(created, sizeof(created), "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&now, &utc));
  std::string text = "kernel: " + entry.kernel + "\narch: " + entry.arch + "\nkey: " + entry.key +
                     "\nsize: " + std::to_string(entry.binary.size()) + "\nsha256: " + sha256(entry.binary) +
                     "\ncreated: " + created + "\n";
  for (const auto& [name, value] : entry.fields) text += name + ": " + value + "\n";
  return text;
}

struct Names {
  const char *source, *binary;
};
Names names_for(const std::string& arch) {
  return is_ascend(arch) ? Names{"/kernel.asc", "/kernel.o"} : Names{"/kernel.cu", "/kernel.cubin"};
}

std::optional<std::string> read_entry(const std::string& folder, const std::string& arch, const std::string& key) {
  const std::optional<std::string> manifest = read_file(folder + "/manifest.txt");
  if (!manifest || field_of(*manifest, "key") != key) return std::nullopt;
  std::optional<std::string> binary = read_file(folder + names_for(arch).binary);
  if (!binary || field_of(*manifest, "size") != std::to_string(binary->size()) ||
      field_of(*manifest, "sha256") != sha256(*binary))
    return std::nullopt;
  return binary;
}

// Out of the readers' sight at once, then removed at leisure.
void retire(const std::string& root, const std::string& folder) {
  const std::string grave = make_temporary_directory(temporary_of(root));
  if (grave.empty()) return remove_tree(folder);
  std::rename(folder.c_str(), (grave + "/entry").c_str());
  remove_tree(grave);
}

bool store_in(const std::string& root, const CacheEntry& entry, const std::string& target) {
  if (!make_directories(entries_of(root)) || !make_directories(temporary_of(root))) return false;
  const std::string work = make_temporary_directory(temporary_of(root));
  if (work.empty()) return false;
  const std::string folder = work + "/entry";
  const Names names = names_for(entry.arch);
  bool good = make_directories(folder) && write_file(folder + names.source, entry.source) &&
              write_file(folder + names.binary, entry.binary) &&
              write_file(folder + "/manifest.txt", manifest_of(entry)) && sync_directory(folder);
  if (good && std::rename(folder.c_str(), target.c_str()) != 0) {
    // Something is there already: as good as ours, or broken.
    if (!read_entry(target, entry.arch, entry.key)) {
      retire(root, target);
      good = std::rename(folder.c_str(), target.c_str()) == 0 || read_entry(target, entry.arch, entry.key);
    }
  }
  if (good) sync_directory(entries_of(root));
  remove_tree(work);
  return good;
}

void evict(const std::string& root, int64_t limit, const std::string& keep) {
  struct Entry {
    std::string folder;
    int64_t size = 0, used_ns = 0;
  };
  std::vector<Entry> entries;
  int64_t total = 0;
  for (const std::string& name : names_in(entries_of(root))) {
    Entry entry{entries_of(root) + "/" + name};
    for (const std::string& file : names_in(entry.folder)) {
      const auto status = file_status(entry.folder + "/" + file);
      if (!status) continue;
      entry.size += status->size;
      if (file == "manifest.txt") entry.used_ns = status->modified_ns;
    }
    total += entry.size;
    if (entry.folder != keep) entries.push_back(std::move(entry));
  }
  if (total > limit) {
    std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) { return a.used_ns < b.used_ns; });
    for (const Entry& entry : entries) {
      if (total <= limit) break;
      retire(root, entry.folder);
      total -= entry.size;
    }
  }
  for (const std::string& name : names_in(temporary_of(root))) {
    const std::string path = temporary_of(root) + "/" + name;
    const auto status = file_status(path);
    if (status && status->modified_ns < (time(nullptr) - kStaleSeconds) * int64_t(1'000'000'000)) remove_tree(path);
  }
}

}  // namespace

Cache Cache::from_environment() {
  Cache cache;
  cache.roots_ = split(environment("DEEPINFER_CACHE_DIR"), ':');
  if (cache.roots_.empty()) {
    const std::string base = environment("XDG_CACHE_HOME");
    cache.roots_ = {(base.empty() ? home() + "/.cache" : base) + "/torch_deepinfer"};
  }
  const std::string size = environment("DEEPINFER_CACHE_SIZE");
  cache.size_limit_ = size.empty() ? kDefaultSize : parse_size(size);
  return cache;
}

std::optional<std::string> Cache::find(const std::string& kernel, const std::string& arch, const std::string& key,
                                       std::string& path) const {
  for (const std::string& root : roots_) {
    const std::string folder = entries_of(root) + "/" + folder_name(kernel, arch, key);
    if (auto binary = read_entry(folder, arch, key)) {
      touch(folder + "/manifest.txt");
      path = folder;
      return binary;
    }
  }
  return std::nullopt;
}

std::unique_ptr<FileLock> Cache::lock(const std::string& key) const {
  for (const std::string& root : roots_) {
    const std::string folder = root + kLayout + "/locks";
    if (make_directories(folder) && access(folder.c_str(), W_OK) == 0)
      return std::make_unique<FileLock>(folder + "/" + key.substr(0, 2), kLockSeconds);
  }
  return nullptr;
}

std::string Cache::store(const CacheEntry& entry) const {
  for (const std::string& root : roots_) {
    const std::string target = entries_of(root) + "/" + folder_name(entry.kernel, entry.arch, entry.key);
    if (!store_in(root, entry, target)) continue;
    evict(root, size_limit_, target);
    return target;
  }
  return "";
}

}  // namespace deepinfer::jit
