// Preloaded into a process to break the file operations of the kernel cache, one at a time. Only files under FAULT_ROOT
// are touched. Steps are counted from faults_arm(); the process forks for each try, so the count needs no reset.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static int first_step = -1, kind, step, ours[1024];

// kind 0: die at step `first`; otherwise that errno from step `first` on.
void faults_arm(int first, int error) { first_step = first, kind = error, step = 0; }
int faults_steps(void) { return step; }

static int under_root(const char* path) {
  const char* root = getenv("FAULT_ROOT");
  return first_step >= 0 && root && strncmp(path, root, strlen(root)) == 0;
}

static int fails(void) {
  if (step++ < first_step) return 0;
  if (kind == 0) _exit(9);
  errno = kind;
  return 1;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

int open(const char* path, int flags, ...) {
  va_list list;
  va_start(list, flags);
  const int mode = va_arg(list, int);
  va_end(list);
  const int creates = flags & O_CREAT && under_root(path);
  if (creates && fails()) return -1;
  const int descriptor = REAL(open)(path, flags, mode);
  if (descriptor >= 0 && descriptor < 1024) ours[descriptor] = creates;
  return descriptor;
}

ssize_t write(int descriptor, const void* data, size_t size) {
  if (descriptor >= 0 && descriptor < 1024 && ours[descriptor] && first_step >= 0) {
    if (step == first_step) REAL(write)(descriptor, data, size / 2);
    if (fails()) return -1;
  }
  return REAL(write)(descriptor, data, size);
}

int fsync(int descriptor) {
  if (descriptor >= 0 && descriptor < 1024 && ours[descriptor] && first_step >= 0 && fails()) return -1;
  return REAL(fsync)(descriptor);
}

int mkdir(const char* path, mode_t mode) { return under_root(path) && fails() ? -1 : REAL(mkdir)(path, mode); }
char* mkdtemp(char* path) { return under_root(path) && fails() ? NULL : REAL(mkdtemp)(path); }
int rename(const char* from, const char* to) { return under_root(to) && fails() ? -1 : REAL(rename)(from, to); }
