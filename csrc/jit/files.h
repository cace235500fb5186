// The few file operations of the cache. None of them throws: a cache that fails must not fail the call.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace deepinfer::jit {

// An environment variable, or an empty string.
std::string environment(const char* name);

std::vector<std::string> split(std::string_view text, char separator);

std::optional<std::string> read_file(const std::string& path);
bool is_file(const std::string& path);
bool is_directory(const std::string& path);

// Creates the folder and its parents.
bool make_directories(const std::string& path);

// Writes a new file and waits until it is on the disk.
bool write_file(const std::string& path, std::string_view content);
bool sync_directory(const std::string& path);

// A new, empty folder inside `parent`, or an empty string.
std::string make_temporary_directory(const std::string& parent);

// Removes a folder and the files and folders in it.
void remove_tree(const std::string& path);

struct FileStatus {
  int64_t size = 0;
  int64_t modified_ns = 0;
};
std::optional<FileStatus> file_status(const std::string& path);
void touch(const std::string& path);

// The names in a folder, without "." and "..".
std::vector<std::string> names_in(const std::string& directory);

// An advisory lock between processes and threads, held until destruction. It only keeps several processes from
// compiling the same kernel at once; nothing is wrong without it, so a lock that cannot be had within the time given
// (no such folder, a file system without locks, an owner that hangs) is simply not held.
class FileLock {
 public:
  FileLock(const std::string& path, double timeout_seconds);
  ~FileLock();
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;

 private:
  int descriptor_;
};

}  // namespace deepinfer::jit
