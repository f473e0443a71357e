// A CUDA runtime without a GPU, for the CUDA build of torch: device memory is host memory, kernels do nothing, and results
// are zeros. All of torch's host code runs: allocator, contexts, fork rules, choice of kernels, autocast.
//
// HOLLOW_GPUS=2  HOLLOW_MIB=8192  HOLLOW_CAPABILITY=8.0  describe the devices.
// HOLLOW_CONTEXTS=FILE  lists each context: the PID of its process and its device.
// All other functions succeed and do nothing (stubs.py).

#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#undef cudaGetDeviceProperties
#undef cudaEventElapsedTime
#undef cudaStreamGetCaptureInfo

enum { MOST_DEVICES = 16, CONTEXT = 300 << 20, ALIGNMENT = 512, OWN = 1, DEVICE = 2 };

typedef struct {
  char *start, *allocated;
  size_t size;
  int device, kind;
} Block;

static int num_devices = 1, major = 8, minor = 0, is_ready, is_forked;
static size_t total = 8ull << 30, used[MOST_DEVICES];
static int has_context[MOST_DEVICES];
static long num_launches, num_waits;
static __thread int current;
static __thread cudaError_t last_error;
static Block *blocks;
static int num_blocks, room;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

static void in_child(void) { is_forked = is_ready; }  // CUDA cannot be used in a child of a process that used it

__attribute__((constructor)) static void watch_forks(void) { pthread_atfork(NULL, NULL, in_child); }

static cudaError_t ended(cudaError_t error) {
  if (error) last_error = error;
  return error;
}

// The first call in a process reads the environment; in a forked child all calls fail.
static cudaError_t begin(void) {
  if (is_forked) return ended(cudaErrorInitializationError);
  if (!is_ready) {
    char *text;
    is_ready = 1;
    if ((text = getenv("HOLLOW_GPUS"))) num_devices = atoi(text);
    if ((text = getenv("HOLLOW_MIB"))) total = strtoull(text, NULL, 10) << 20;
    if ((text = getenv("HOLLOW_CAPABILITY"))) sscanf(text, "%d.%d", &major, &minor);
  }
  return cudaSuccess;
}

// Written when the context is created, because ranks end by os._exit. O_APPEND keeps the lines of processes apart.
static void list_context(int device) {
  char *path = getenv("HOLLOW_CONTEXTS"), line[32];
  int file = path ? open(path, O_WRONLY | O_CREAT | O_APPEND, 0600) : -1;
  if (file < 0) return;
  write(file, line, snprintf(line, sizeof line, "%d %d\n", getpid(), device));
  close(file);
}

static cudaError_t use_context(void) {
  cudaError_t error = begin();
  if (!error && !has_context[current]) {
    has_context[current] = 1;
    used[current] += CONTEXT;
    list_context(current);
  }
  return error;
}

static void remember(Block block) {
  pthread_mutex_lock(&mutex);
  if (num_blocks == room) blocks = realloc(blocks, (room = room ? 2 * room : 1024) * sizeof *blocks);
  blocks[num_blocks++] = block;
  pthread_mutex_unlock(&mutex);
}

static Block forget(void *start) {
  Block found = {0};
  pthread_mutex_lock(&mutex);
  for (int i = 0; i < num_blocks; i++)
    if (blocks[i].start == start) {
      found = blocks[i];
      blocks[i] = blocks[--num_blocks];
      break;
    }
  pthread_mutex_unlock(&mutex);
  return found;
}

static Block holding(const void *address) {
  Block found = {0};
  pthread_mutex_lock(&mutex);
  for (int i = 0; i < num_blocks; i++)
    if ((char *)address >= blocks[i].start && (char *)address < blocks[i].start + blocks[i].size) found = blocks[i];
  pthread_mutex_unlock(&mutex);
  return found;
}

// ---------------------------------------------------------------- devices

cudaError_t cudaGetDeviceCount(int *count) {
  cudaError_t error = begin();
  *count = error ? 0 : num_devices;
  return error ? error : num_devices ? cudaSuccess : ended(cudaErrorNoDevice);
}

cudaError_t cudaGetDevice(int *device) {
  *device = current;
  return begin();
}

cudaError_t cudaSetDevice(int device) {
  cudaError_t error = begin();
  if (error) return error;
  if (device < 0 || device >= num_devices) return ended(cudaErrorInvalidDevice);
  current = device;
  return use_context();
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
  cudaError_t error = begin();
  memset(p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "Hollow GPU");
  p->totalGlobalMem = total;
  p->major = major;
  p->minor = minor;
  p->multiProcessorCount = 40;
  p->warpSize = 32;
  p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->maxThreadsPerMultiProcessor = major == 7 ? 1024 : 2048;
  p->sharedMemPerBlock = 49152;
  p->sharedMemPerBlockOptin = major == 7 ? 65536 : major == 9 ? 232448 : 166912;
  p->sharedMemPerMultiprocessor = p->sharedMemPerBlockOptin + 1024;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->l2CacheSize = 40 << 20;
  p->unifiedAddressing = p->concurrentKernels = 1;
  p->asyncEngineCount = 2;
  p->memoryBusWidth = 256;
  p->textureAlignment = 512;
  p->uuid.bytes[15] = (char)(device + 1);
  p->pciBusID = device + 1;
  return error;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
  struct cudaDeviceProp p;
  cudaError_t error = cudaGetDeviceProperties(&p, device);
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: *value = p.maxThreadsPerBlock; break;
    case cudaDevAttrMultiProcessorCount: *value = p.multiProcessorCount; break;
    case cudaDevAttrComputeCapabilityMajor: *value = p.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = p.minor; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = p.sharedMemPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = p.sharedMemPerBlockOptin; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = p.sharedMemPerMultiprocessor; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = p.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrMaxGridDimX: *value = p.maxGridSize[0]; break;
    case cudaDevAttrMaxGridDimY: *value = p.maxGridSize[1]; break;
    case cudaDevAttrWarpSize: *value = p.warpSize; break;
    case cudaDevAttrL2CacheSize: *value = p.l2CacheSize; break;
    default: *value = 1;
  }
  return error;
}

cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int device) {
  snprintf(text, size, "0000:%02x:00.0", device + 1);
  return begin();
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
  *can = 0;
  return begin();
}

cudaError_t cudaRuntimeGetVersion(int *version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *version) { return *version = CUDART_VERSION, cudaSuccess; }

// ---------------------------------------------------------------- memory

cudaError_t cudaMemGetInfo(size_t *free, size_t *whole) {
  cudaError_t error = use_context();
  *whole = total;
  *free = total > used[current] ? total - used[current] : 0;
  return error;
}

cudaError_t cudaMalloc(void **start, size_t size) {
  cudaError_t error = use_context();
  if (error) return error;
  if (used[current] + size > total) return ended(cudaErrorMemoryAllocation);
  char *allocated = calloc(1, size + ALIGNMENT);  // pages that are not written use no host memory
  if (!allocated) return ended(cudaErrorMemoryAllocation);
  *start = (void *)(((size_t)allocated + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
  used[current] += size;
  remember((Block){*start, allocated, size, current, DEVICE});
  return cudaSuccess;
}

cudaError_t cudaFree(void *start) {
  Block block = start ? forget(start) : (Block){0};
  if (block.start) {
    used[block.device] -= block.size;
    free(block.allocated);
  }
  return cudaSuccess;
}

cudaError_t cudaMallocAsync(void **start, size_t size, cudaStream_t stream) { return cudaMalloc(start, size); }
cudaError_t cudaFreeAsync(void *start, cudaStream_t stream) { return cudaFree(start); }

cudaError_t cudaHostAlloc(void **start, size_t size, unsigned flags) {
  cudaError_t error = use_context();
  if (error) return error;
  *start = aligned_alloc(4096, (size + 4095) / 4096 * 4096);
  remember((Block){*start, *start, size, current, OWN});
  return cudaSuccess;
}

cudaError_t cudaFreeHost(void *start) {
  free(forget(start).allocated);
  return cudaSuccess;
}

cudaError_t cudaHostRegister(void *start, size_t size, unsigned flags) {
  cudaError_t error = use_context();
  if (error) return error;
  if (holding(start).start) return ended(cudaErrorHostMemoryAlreadyRegistered);
  remember((Block){start, NULL, size, current, OWN});
  return cudaSuccess;
}

cudaError_t cudaHostUnregister(void *start) { return forget(start).start ? cudaSuccess : ended(cudaErrorHostMemoryNotRegistered); }

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *found, const void *address) {
  Block block = holding(address);
  memset(found, 0, sizeof *found);
  found->type = block.kind == DEVICE ? cudaMemoryTypeDevice : block.kind == OWN ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  found->device = block.kind ? block.device : cudaInvalidDeviceId;
  if (block.kind) found->devicePointer = (void *)address;
  if (block.kind == OWN) found->hostPointer = (void *)address;
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
  memmove(to, from, size);
  num_waits++;
  return begin();
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
  memmove(to, from, size);
  return begin();
}

cudaError_t cudaMemset(void *to, int value, size_t size) { return memset(to, value, size), begin(); }
cudaError_t cudaMemsetAsync(void *to, int value, size_t size, cudaStream_t s) { return memset(to, value, size), begin(); }

// ---------------------------------------------------------------- graphs, which record nothing

static cudaStream_t captured;  // the one stream whose work is being captured
static int is_capturing, is_invalid;
static __thread int captures_here;
static char graph[8];  // the graph being captured; its content is not read
static unsigned long long num_captures;
static long num_replays;

// A host wait by the capturing thread or for the captured stream fails in CUDA, and invalidates the capture.
static cudaError_t invalidate(int is_affected) {
  if (!is_capturing || !is_affected) return cudaSuccess;
  is_invalid = 1;
  return ended(cudaErrorStreamCaptureUnsupported);
}

static enum cudaStreamCaptureStatus status_of(cudaStream_t stream) {
  if (!is_capturing || stream != captured) return cudaStreamCaptureStatusNone;
  return is_invalid ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
  if (is_capturing) return ended(cudaErrorIllegalState);
  captured = stream;
  is_capturing = captures_here = 1;
  is_invalid = 0;
  num_captures++;
  return begin();
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *found) {
  is_capturing = captures_here = 0;
  *found = is_invalid ? NULL : (cudaGraph_t)malloc(8);
  return is_invalid ? ended(cudaErrorStreamCaptureInvalidated) : begin();
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
  return *status = status_of(stream), cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id, cudaGraph_t *found,
    const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges, size_t *count) {
  *status = status_of(stream);
  if (id) *id = *status ? num_captures : 0;
  if (found) *found = (cudaGraph_t)graph;
  if (nodes) *nodes = NULL;
  if (edges) *edges = NULL;
  if (count) *count = 0;
  return cudaSuccess;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t found, cudaGraphNode_t *nodes, size_t *count) { return *count = 1, cudaSuccess; }
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *made, cudaGraph_t found, unsigned long long flags) {
  return *made = (cudaGraphExec_t)malloc(8), cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t made, cudaStream_t stream) { return num_replays++, use_context(); }
cudaError_t cudaGraphDestroy(cudaGraph_t found) { return free(found), cudaSuccess; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t made) { return free(made), cudaSuccess; }

// ---------------------------------------------------------------- streams and events

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
  *stream = (cudaStream_t)malloc(8);
  return use_context();
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) { return cudaStreamCreateWithPriority(stream, flags, 0); }
cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return num_waits++, invalidate(stream == captured) ?: begin(); }
cudaError_t cudaDeviceSynchronize(void) { return num_waits++, invalidate(captures_here) ?: use_context(); }
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) { return *priority = 0, cudaSuccess; }

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
  *event = (cudaEvent_t)calloc(1, sizeof(struct timespec));
  return use_context();
}
cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { return free(event), cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  clock_gettime(CLOCK_MONOTONIC, (struct timespec *)event);
  return begin();
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) { return cudaEventRecord(event, stream); }
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to) {
  struct timespec *a = (struct timespec *)from, *b = (struct timespec *)to;
  *ms = 1e3f * (b->tv_sec - a->tv_sec) + 1e-6f * (b->tv_nsec - a->tv_nsec);
  return cudaSuccess;
}

// ---------------------------------------------------------------- kernels, which do nothing

cudaError_t cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **given, size_t shared, cudaStream_t stream) {
  num_launches++;
  return use_context();
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *kernel, void **given) {
  num_launches++;
  return use_context();
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **given, size_t shared, cudaStream_t stream) {
  num_launches++;
  return use_context();
}
cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) { return *kernel = (cudaKernel_t)function, cudaSuccess; }

void **__cudaRegisterFatBinary(void *binary) {
  static void *handle[4];
  return handle;
}
void __cudaRegisterFatBinaryEnd(void **handle) {}
void __cudaUnregisterFatBinary(void **handle) {}

static __thread struct {
  dim3 grid, block;
  size_t shared;
  void *stream;
} configuration;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
  configuration.grid = grid;
  configuration.block = block;
  configuration.shared = shared;
  configuration.stream = stream;
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
  *grid = configuration.grid;
  *block = configuration.block;
  *shared = configuration.shared;
  *(void **)stream = configuration.stream;
  return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *found, const void *function) {
  memset(found, 0, sizeof *found);
  found->maxThreadsPerBlock = 1024;
  found->numRegs = 32;
  found->binaryVersion = found->ptxVersion = 10 * major + minor;
  found->maxDynamicSharedSizeBytes = 49152;
  return begin();
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *count, const void *f, int block, size_t shared, unsigned flags) {
  return *count = 2, cudaSuccess;
}

cudaError_t cudaGetSymbolAddress(void **address, const void *symbol) {
  static char zeros[65536];
  return *address = zeros, cudaSuccess;
}

// ---------------------------------------------------------------- errors

cudaError_t cudaGetLastError(void) {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
cudaError_t cudaPeekAtLastError(void) { return last_error; }
const char *cudaGetErrorName(cudaError_t error) { return "cudaError"; }
const char *cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInitializationError: return "initialization error";
    case cudaErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureInvalidated: return "operation failed due to a previous error during capture";
    case cudaErrorHostMemoryAlreadyRegistered: return "part or all of the requested memory range is already mapped";
    default: return "unknown error";
  }
}

// ---------------------------------------------------------------- for driver.c and checks.py

// Reserves or releases bytes of a device's memory; returns whether enough memory was free.
int hollow_take(int device, long size) {
  if (size > 0 && used[device] + size > total) return 0;
  used[device] += size;
  return 1;
}

void hollow_reserve(void *start, size_t size) { remember((Block){start, NULL, size, current, DEVICE}); }
void hollow_unreserve(void *start) { forget(start); }

static int do_nothing(void) { return 0; }

cudaError_t cudaGetDriverEntryPointByVersion(
    const char *name, void **found, unsigned version, unsigned long long flags, enum cudaDriverEntryPointQueryResult *status) {
  *found = dlsym(RTLD_DEFAULT, name);
  if (!*found) *found = (void *)do_nothing;  // newer than the headers, or of another library
  if (status) *status = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

long hollow_launches(void) { return num_launches; }
long hollow_waits(void) { return num_waits; }
long hollow_captures(void) { return num_captures; }
long hollow_replays(void) { return num_replays; }
int hollow_context(int device) { return has_context[device]; }
