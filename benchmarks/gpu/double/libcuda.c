/* A stand-in for libcuda.so.1 on machines without a GPU: the calls that kvferry makes, with their real argument types.
 *
 * "Device memory" is memory that processes share (memfd, as SharedSegment makes it). Copies are made as late as a GPU
 * may make them: when the stream is waited for, or when it is queried a second time. Each call is appended to the file
 * KVFERRY_CUDA_CALLS, one line each, if that is set. A call with an argument that the driver would refuse fails here.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600 };
typedef struct { uint64_t source, target, length; } Piece;
typedef struct { int pid, fd; uint64_t inode, size; } Shared;
typedef struct { const Piece *pieces; unsigned count; int queries; } Stream;
static int streams, allocations, modules, mappings;
static const char *code;

static void record(const char *format, ...) {
  const char *path = getenv("KVFERRY_CUDA_CALLS");
  FILE *file = path ? fopen(path, "a") : NULL;
  if (!file) return;
  va_list arguments;
  va_start(arguments, format);
  vfprintf(file, format, arguments);
  va_end(arguments);
  fputc('\n', file);
  fclose(file);
}

/* The shared mapping that contains an address. */
static int find(uint64_t address, uint64_t *base, uint64_t *size, uint64_t *inode) {
  FILE *maps = fopen("/proc/self/maps", "r");
  char line[4096];
  int found = 0;
  while (maps && !found && fgets(line, sizeof line, maps)) {
    unsigned long long start, end, number;
    char access[8];
    if (sscanf(line, "%llx-%llx %7s %*s %*s %llu", &start, &end, access, &number) != 4) continue;
    if (access[3] == 's' && address >= start && address < end)
      *base = start, *size = end - start, *inode = number, found = 1;
  }
  if (maps) fclose(maps);
  return found;
}

static int descriptor_of(uint64_t inode) {
  struct stat status;
  for (int fd = 0; fd < 4096; fd++)
    if (fstat(fd, &status) == 0 && status.st_ino == inode) return fd;
  return -1;
}

static void finish(Stream *stream) {
  for (unsigned i = 0; stream->pieces && i < stream->count; i++)
    memmove((void *)stream->pieces[i].target, (void *)stream->pieces[i].source, stream->pieces[i].length);
  stream->pieces = NULL;
}

int cuInit(unsigned flags) { record("cuInit %u", flags); return flags ? INVALID_VALUE : SUCCESS; }
int cuDeviceGet(int *device, int index) { record("cuDeviceGet %d", index); *device = index; return SUCCESS; }
int cuDevicePrimaryCtxRetain(void **context, int device) {
  record("cuDevicePrimaryCtxRetain %d", device);
  *context = (void *)0x7fff12345678;
  return SUCCESS;
}
int cuDevicePrimaryCtxRelease_v2(int device) {
  record("cuDevicePrimaryCtxRelease_v2 %d", device);
  record("left: streams %d, host allocations %d, modules %d, mappings %d", streams, allocations, modules, mappings);
  return SUCCESS;
}
int cuCtxSetCurrent(void *context) { return context == (void *)0x7fff12345678 ? SUCCESS : INVALID_VALUE; }
int cuGetErrorString(int error, const char **text) {
  *text = error == NOT_READY ? "device not ready" : "an error of the stand-in for the driver";
  return SUCCESS;
}
int cuMemGetAddressRange_v2(uint64_t *base, size_t *size, uint64_t address) {
  uint64_t inode, length;
  if (!find(address, base, &length, &inode)) return INVALID_VALUE;
  *size = length;
  return SUCCESS;
}
int cuIpcGetMemHandle(char handle[64], uint64_t address) {
  uint64_t base, size, inode;
  if (!find(address, &base, &size, &inode) || base != address) return INVALID_VALUE;
  Shared shared = {getpid(), descriptor_of(inode), inode, size};
  memset(handle, 0, 64);
  memcpy(handle, &shared, sizeof shared);
  record("cuIpcGetMemHandle");
  return shared.fd < 0 ? INVALID_VALUE : SUCCESS;
}
typedef struct { char reserved[64]; } Handle;
int cuIpcOpenMemHandle_v2(uint64_t *address, Handle handle, unsigned flags) {
  Shared shared;
  char path[64];
  struct stat status;
  memcpy(&shared, handle.reserved, sizeof shared);
  snprintf(path, sizeof path, "/proc/%d/fd/%d", shared.pid, shared.fd);
  record("cuIpcOpenMemHandle_v2 flags %u", flags);
  if (flags != 1 || shared.pid == getpid()) return INVALID_VALUE;
  int fd = open(path, O_RDWR | O_CLOEXEC);
  if (fd < 0 || fstat(fd, &status) || status.st_ino != shared.inode) return INVALID_HANDLE;
  void *mapped = mmap(NULL, shared.size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  if (mapped == MAP_FAILED) return INVALID_HANDLE;
  *address = (uint64_t)mapped, mappings++;
  return SUCCESS;
}
int cuIpcCloseMemHandle(uint64_t address) {
  uint64_t base, size, inode;
  record("cuIpcCloseMemHandle");
  if (!find(address, &base, &size, &inode) || base != address) return INVALID_VALUE;
  munmap((void *)base, size), mappings--;
  return SUCCESS;
}
int cuModuleLoadData(void **module, const char *image) {
  record("cuModuleLoadData");
  if (!strstr(image, ".version")) return INVALID_VALUE;
  free((void *)code);
  code = strdup(image), *module = (void *)code, modules++;
  return SUCCESS;
}
int cuModuleGetFunction(void **function, void *module, const char *name) {
  char entry[256];
  snprintf(entry, sizeof entry, ".entry %s(", name);
  record("cuModuleGetFunction %s", name);
  *function = (void *)0x7fffabcdef00;
  return strstr(code, entry) ? SUCCESS : NOT_FOUND;
}
int cuModuleUnload(void *module) { record("cuModuleUnload"); modules--; return SUCCESS; }
int cuStreamCreate(void **stream, unsigned flags) {
  record("cuStreamCreate %u", flags);
  *stream = calloc(1, sizeof(Stream)), streams++;
  return SUCCESS;
}
int cuStreamDestroy_v2(void *stream) { record("cuStreamDestroy_v2"); finish(stream), free(stream), streams--; return SUCCESS; }
int cuStreamQuery(void *stream) {
  Stream *self = stream;
  if (self->pieces && self->queries++ == 0) return NOT_READY;
  finish(self);
  return SUCCESS;
}
int cuStreamSynchronize(void *stream) { if (stream) finish(stream); return SUCCESS; }
int cuMemHostAlloc(void **memory, size_t size, unsigned flags) {
  record("cuMemHostAlloc %zu %u", size, flags);
  allocations++;
  return posix_memalign(memory, 4096, size) ? INVALID_VALUE : SUCCESS;
}
int cuMemFreeHost(void *memory) { record("cuMemFreeHost"); free(memory), allocations--; return SUCCESS; }
int cuMemcpyDtoDAsync_v2(uint64_t target, uint64_t source, size_t length, void *stream) {
  memmove((void *)target, (void *)source, length);
  return SUCCESS;
}
int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void *stream, void **parameters, void **extra) {
  Stream *self = stream;
  const Piece *pieces = *(const Piece **)parameters[0];
  unsigned count = *(unsigned *)parameters[1];
  record("cuLaunchKernel grid %u %u %u block %u %u %u shared %u pieces %u", gx, gy, gz, bx, by, bz, shared, count);
  if (function != (void *)0x7fffabcdef00 || extra || !gx || gy != 1 || gz != 1 || !bx || bx > 1024 || by != 1 || bz != 1)
    return INVALID_VALUE;
  if (self->pieces) return INVALID_VALUE; /* the table would be overwritten while it is read */
  self->pieces = pieces, self->count = count, self->queries = 0;
  return SUCCESS;
}
