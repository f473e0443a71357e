// The functions of libcuda.so.1 whose results Triton and torch use; stubs.py adds all other functions of cuda.h.

#define _GNU_SOURCE
#include <cuda.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#undef cuGetProcAddress

static char handle[64];  // of contexts, modules and functions; its content is not read

static int capability(int minor) {
  int numbers[2] = {8, 0};
  char *text = getenv("HOLLOW_CAPABILITY");
  if (text) sscanf(text, "%d.%d", &numbers[0], &numbers[1]);
  return numbers[minor];
}

CUresult cuDriverGetVersion(int *version) { return *version = CUDA_VERSION, CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int number) { return *device = number, CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int *count) {
  char *text = getenv("HOLLOW_GPUS");
  return *count = text ? atoi(text) : 1, CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext *context) { return *context = (CUcontext)handle, CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *device) { return *device = 0, CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { return *context = (CUcontext)handle, CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
  *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = capability(0); break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = capability(1); break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
      *value = capability(0) == 7 ? 65536 : capability(0) == 9 ? 232448 : 166912;
      break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: *value = 49152; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 40; break;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: *value = 65536; break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
    default: *value = 1;
  }
  return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) { return *module = (CUmodule)handle, CUDA_SUCCESS; }
CUresult cuModuleLoad(CUmodule *module, const char *path) { return *module = (CUmodule)handle, CUDA_SUCCESS; }
CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned n, CUjit_option *options, void **values) {
  return *module = (CUmodule)handle, CUDA_SUCCESS;
}
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  return *function = (CUfunction)handle, CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : attribute == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32 : 0;
  return CUDA_SUCCESS;
}
// Virtual memory for expandable segments. A handle encodes the size, a multiple of the page size, and the device.

extern int hollow_take(int device, long size);
extern void hollow_reserve(void *start, size_t size);
extern void hollow_unreserve(void *start);

enum { DEVICES = 0xf };

CUresult cuMemAddressReserve(CUdeviceptr *start, size_t size, size_t alignment, CUdeviceptr address, unsigned long long flags) {
  void *found = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (found == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  hollow_reserve(found, size);
  *start = (CUdeviceptr)found;
  return CUDA_SUCCESS;
}
CUresult cuMemAddressFree(CUdeviceptr start, size_t size) {
  hollow_unreserve((void *)start);
  munmap((void *)start, size);
  return CUDA_SUCCESS;
}
CUresult cuMemCreate(
    CUmemGenericAllocationHandle *made, size_t size, const CUmemAllocationProp *wanted, unsigned long long flags) {
  if (!hollow_take(wanted->location.id, size)) return CUDA_ERROR_OUT_OF_MEMORY;
  *made = size | wanted->location.id;
  return CUDA_SUCCESS;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle made) {
  hollow_take(made & DEVICES, -(long)(made & ~(unsigned long long)DEVICES));
  return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text) { return *text = "none", CUDA_SUCCESS; }
CUresult cuGetErrorName(CUresult error, const char **text) { return *text = "none", CUDA_SUCCESS; }

CUresult cuGetProcAddress_v2(
    const char *name, void **function, int version, cuuint64_t flags, CUdriverProcAddressQueryResult *status) {
  char newer[128];
  snprintf(newer, sizeof newer, "%s_v2", name);
  *function = dlsym(RTLD_DEFAULT, name);
  if (!*function) *function = dlsym(RTLD_DEFAULT, newer);
  if (status) *status = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
