#include "files.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>

namespace deepinfer::jit {

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> parts;
  while (!text.empty()) {
    size_t end = text.find(separator);
    if (end != 0) parts.emplace_back(text.substr(0, end));
    text = end == text.npos ? std::string_view() : text.substr(end + 1);
  }
  return parts;
}

std::optional<std::string> read_file(const std::string& path) {
  int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) return std::nullopt;
  std::string content;
  struct stat status;
  if (fstat(descriptor, &status) == 0 && S_ISREG(status.st_mode)) content.reserve(size_t(status.st_size) + 1);
  char buffer[65536];
  ssize_t got;
  while ((got = read(descriptor, buffer, sizeof(buffer))) > 0 || (got < 0 && errno == EINTR))
    if (got > 0) content.append(buffer, size_t(got));
  close(descriptor);
  if (got < 0) return std::nullopt;
  return content;
}

bool is_file(const std::string& path) {
  struct stat status;
  return stat(path.c_str(), &status) == 0 && S_ISREG(status.st_mode);
}

bool is_directory(const std::string& path) {
  struct stat status;
  return stat(path.c_str(), &status) == 0 && S_ISDIR(status.st_mode);
}

bool make_directories(const std::string& path) {
  for (size_t end = path.find('/', 1);; end = path.find('/', end + 1)) {
    const std::string part = path.substr(0, end);
    if (mkdir(part.c_str(), 0777) != 0 && errno != EEXIST && !is_directory(part)) return false;
    if (end == path.npos) return is_directory(path);
  }
}

bool write_file(const std::string& path, std::string_view content) {
  int descriptor = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (descriptor < 0) return false;
  bool good = true;
  while (good && !content.empty()) {
    ssize_t written = write(descriptor, content.data(), content.size());
    if (written > 0) content.remove_prefix(size_t(written));
    good = written > 0 || (written < 0 && errno == EINTR);
  }
  good = good && fsync(descriptor) == 0;
  return close(descriptor) == 0 && good;
}

bool sync_directory(const std::string& path) {
  int descriptor = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) return false;
  bool good = fsync(descriptor) == 0;
  close(descriptor);
  return good;
}

std::string make_temporary_directory(const std::string& parent) {
  std::string path = parent + "/XXXXXX";
  return mkdtemp(path.data()) ? path : "";
}

void remove_tree(const std::string& path) {
  struct stat status;
  if (lstat(path.c_str(), &status) == 0 && S_ISDIR(status.st_mode)) {
    for (const std::string& name : names_in(path)) remove_tree(path + "/" + name);
    rmdir(path.c_str());
  } else {
    unlink(path.c_str());
  }
}

std::optional<FileStatus> file_status(const std::string& path) {
  struct stat status;
  if (stat(path.c_str(), &status) != 0) return std::nullopt;
  return FileStatus{status.st_size, status.st_mtim.tv_sec * int64_t(1'000'000'000) + status.st_mtim.tv_nsec};
}

void touch(const std::string& path) { utimensat(AT_FDCWD, path.c_str(), nullptr, 0); }

std::vector<std::string> names_in(const std::string& directory) {
  std::vector<std::string> names;
  if (DIR* stream = opendir(directory.c_str())) {
    while (dirent* entry = readdir(stream)) {
      std::string name = entry->d_name;
      if (name != "." && name != "..") names.push_back(name);
    }
    closedir(stream);
  }
  return names;
}

FileLock::FileLock(const std::string& path, double timeout_seconds)
    : descriptor_(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666)) {
  constexpr double kPause = 0.005;
  while (descriptor_ >= 0 && flock(descriptor_, LOCK_EX | LOCK_NB) != 0) {
    const bool wait = (errno == EWOULDBLOCK || errno == EINTR) && timeout_seconds > 0;
    if (!wait) {
      close(descriptor_);
      descriptor_ = -1;
      return;
    }
    usleep(useconds_t(kPause * 1e6));
    timeout_seconds -= kPause;
  }
}

FileLock::~FileLock() {
  if (descriptor_ < 0) return;
  flock(descriptor_, LOCK_UN);  // explicitly: a forked child may hold a copy of the descriptor
  close(descriptor_);
}

}  // namespace deepinfer::jit
