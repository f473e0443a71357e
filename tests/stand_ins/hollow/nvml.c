// The NVML functions with which torch's allocator queries NVLink fabric before it maps expandable segments: there is none.
// pynvml cannot be initialized with it, so accel-run finds no NVML (tests/nvml_stub.py provides one).

enum { NOT_SUPPORTED = 3 };

int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *address, void **device) { return *device = (void *)address, 0; }
int nvmlDeviceGetNvLinkRemoteDeviceType(void) { return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void) { return NOT_SUPPORTED; }
int nvmlDeviceGetComputeRunningProcesses(void) { return NOT_SUPPORTED; }
int nvmlSystemGetCudaDriverVersion_v2(void) { return NOT_SUPPORTED; }
int nvmlDeviceGetGpuFabricInfoV(void) { return NOT_SUPPORTED; }
