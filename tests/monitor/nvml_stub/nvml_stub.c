// A libnvidia-ml.so.1 that answers from a JSON file, so that the real pynvml runs on a machine without a GPU.
//
// NVML_STUB names the file. Every call looks whether it has changed: a test that rewrites it changes the GPUs while
// they are being watched. It is one object without nesting, a member in each line (`json.dumps(state, indent=0)`):
// {
// "driver": "580.159.03",
// "0.util": 85
// }
// Its keys and values, written as key=value:
//   driver=580.159.03   cuda=13000   count=2   err.init=9
//   0.name=Tesla T4     0.uuid=GPU-...   0.cc=7.5   0.bus=00000000:00:04.0
//   0.memory_total=16106127360   0.memory_used=0   0.memory_reserved=0   (bytes)
//   0.util=85   0.temperature=61   0.power=54321 (mW)   0.sm_clock=1590   0.throttle=4   0.energy=1000 (mJ)
//   0.memory_util=40   0.temperature_limit=93   0.power_limit=70000 (mW)   0.memory_clock=5000
//   0.pcie_generation=3   0.pcie_width=16   0.wait_ms=20
//   0.ecc_corrected=0   0.ecc_uncorrected=0
//   0.processes=4242:1048576,77:-   0.mig=1   0.mig_max=2   0.mig.0.uuid=MIG-...   0.mig.0.gi=7   0.mig.0.ci=0
//   1.err.power=3       the reading `power` of GPU 1 fails with NVML's error 3
//   1.err.all=15        every reading of GPU 1 does: it is lost
//   events=0:8:79,0:8:13:2  events since the start, GPU:type:data[:GPU instance]; each is reported once to each set
//   event_types=11      of all GPUs; without it there are no events; 0.err.events=4: registering fails
// A reading without a key is NVML_ERROR_NOT_SUPPORTED. Built with -DOLD_DRIVER, the newer functions do not exist.

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { OK = 0, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, TIMEOUT = 10 };

typedef struct { int gpu, instance; } Handle; // instance -1: the whole GPU
static Handle handles[16][9];

// The file as it was read last. A driver answers from memory: reading a file per call would cost more than NVML does.
static char lines[512][1024];
static int num_lines;
static struct stat read_at;
static pthread_mutex_t reading = PTHREAD_MUTEX_INITIALIZER;

static void read_state(void) {
    const char *path = getenv("NVML_STUB");
    struct stat now;
    if (!path || stat(path, &now)) {
        num_lines = 0;
        return;
    }
    if (now.st_ino == read_at.st_ino && now.st_size == read_at.st_size && now.st_mtim.tv_sec == read_at.st_mtim.tv_sec &&
        now.st_mtim.tv_nsec == read_at.st_mtim.tv_nsec)
        return;
    FILE *file = fopen(path, "r");
    for (num_lines = 0; file && num_lines < 512 && fgets(lines[num_lines], sizeof *lines, file); num_lines++)
        lines[num_lines][strcspn(lines[num_lines], "\r\n")] = 0;
    if (file) fclose(file);
    read_at = now;
}

static int look_up(const char *key, char *value, size_t size) {
    char start[176];
    int found = 0, length = snprintf(start, sizeof start, "\"%s\": ", key);
    pthread_mutex_lock(&reading);
    read_state();
    for (int i = 0; i < num_lines; i++)
        if (!strncmp(lines[i], start, length)) {
            const char *text = lines[i] + length;
            int count = strlen(text);
            if (count && text[count - 1] == ',') count--;
            if (count > 1 && *text == '"') text++, count -= 2;
            snprintf(value, size, "%.*s", count, text);
            found = 1;
        }
    pthread_mutex_unlock(&reading);
    return found;
}

// Reads `what` of a device as text: 0, or the error injected for it, or NOT_SUPPORTED.
static int text_of(const Handle *h, const char *what, char *value, size_t size) {
    char key[160], code[32], prefix[64];
    if (!h) return INVALID;
    if (h->instance < 0) snprintf(prefix, sizeof prefix, "%d", h->gpu);
    else snprintf(prefix, sizeof prefix, "%d.mig.%d", h->gpu, h->instance);
    snprintf(key, sizeof key, "%s.err.%s", prefix, what);
    if (look_up(key, code, sizeof code)) return atoi(code);
    snprintf(key, sizeof key, "%s.err.all", prefix);
    if (look_up(key, code, sizeof code)) return atoi(code);
    snprintf(key, sizeof key, "%s.%s", prefix, what);
    return look_up(key, value, size) ? OK : NOT_SUPPORTED;
}

static int number_of(const Handle *h, const char *what, unsigned long long *value) {
    char text[64];
    int code = text_of(h, what, text, sizeof text);
    if (!code) *value = strtoull(text, NULL, 10);
    return code;
}

static int small_number_of(const Handle *h, const char *what, unsigned int *value) {
    unsigned long long wide;
    int code = number_of(h, what, &wide);
    if (!code) *value = (unsigned int)wide;
    return code;
}

static int string_of(const Handle *h, const char *what, char *out, unsigned int size) {
    char text[256];
    int code = text_of(h, what, text, sizeof text);
    if (!code) snprintf(out, size, "%s", text);
    return code;
}

int nvmlInitWithFlags(unsigned int flags) {
    char code[32];
    (void)flags;
    return look_up("err.init", code, sizeof code) ? atoi(code) : OK;
}

int nvmlShutdown(void) { return OK; }

const char *nvmlErrorString(int code) {
    static char text[32];
    snprintf(text, sizeof text, "error %d", code);
    return text;
}

int nvmlSystemGetDriverVersion(char *out, unsigned int size) {
    char text[64];
    if (!look_up("driver", text, sizeof text)) return NOT_SUPPORTED;
    snprintf(out, size, "%s", text);
    return OK;
}

int nvmlSystemGetCudaDriverVersion(int *version) {
    char text[64];
    if (!look_up("cuda", text, sizeof text)) return NOT_SUPPORTED;
    *version = atoi(text);
    return OK;
}

int nvmlDeviceGetCount_v2(unsigned int *count) {
    char text[64];
    *count = look_up("count", text, sizeof text) ? (unsigned int)atoi(text) : 0;
    return OK;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, Handle **device) {
    char key[64], code[32];
    if (index >= 16) return INVALID;
    snprintf(key, sizeof key, "%u.err.handle", index);
    if (look_up(key, code, sizeof code)) return atoi(code);
    handles[index][8] = (Handle){(int)index, -1};
    *device = &handles[index][8];
    return OK;
}

int nvmlDeviceGetName(Handle *h, char *out, unsigned int size) { return string_of(h, "name", out, size); }
int nvmlDeviceGetUUID(Handle *h, char *out, unsigned int size) { return string_of(h, "uuid", out, size); }

struct Memory { unsigned long long total, free, used; };
struct Memory2 { unsigned int version; unsigned long long total, reserved, free, used; };

static int memory_of(Handle *h, unsigned long long *total, unsigned long long *used, unsigned long long *reserved) {
    int code = number_of(h, "memory_total", total);
    if (code) return code;
    code = number_of(h, "memory_used", used);
    if (number_of(h, "memory_reserved", reserved)) *reserved = 0;
    return code;
}

int nvmlDeviceGetMemoryInfo(Handle *h, struct Memory *memory) {
    unsigned long long reserved;
    int code = memory_of(h, &memory->total, &memory->used, &reserved);
    if (code) return code;
    memory->used += reserved;
    memory->free = memory->total - memory->used;
    return OK;
}

struct Utilization { unsigned int gpu, memory; };

int nvmlDeviceGetUtilizationRates(Handle *h, struct Utilization *rates) {
    unsigned int wait_ms = 0;
    if (!small_number_of(h, "wait_ms", &wait_ms)) usleep(1000 * wait_ms);
    if (small_number_of(h, "memory_util", &rates->memory)) rates->memory = 0;
    return small_number_of(h, "util", &rates->gpu);
}

int nvmlDeviceGetTemperature(Handle *h, int sensor, unsigned int *degrees) {
    (void)sensor;
    return small_number_of(h, "temperature", degrees);
}

int nvmlDeviceGetPowerUsage(Handle *h, unsigned int *milliwatts) { return small_number_of(h, "power", milliwatts); }

int nvmlDeviceGetClockInfo(Handle *h, int type, unsigned int *mhz) {
    return type == 1 || type == 2 ? small_number_of(h, type == 1 ? "sm_clock" : "memory_clock", mhz) : NOT_SUPPORTED;
}

int nvmlDeviceGetTemperatureThreshold(Handle *h, int kind, unsigned int *degrees) {
    return kind == 1 ? small_number_of(h, "temperature_limit", degrees) : NOT_SUPPORTED;
}

int nvmlDeviceGetEnforcedPowerLimit(Handle *h, unsigned int *milliwatts) {
    return small_number_of(h, "power_limit", milliwatts);
}

int nvmlDeviceGetCurrPcieLinkGeneration(Handle *h, unsigned int *generation) {
    return small_number_of(h, "pcie_generation", generation);
}

int nvmlDeviceGetCurrPcieLinkWidth(Handle *h, unsigned int *width) { return small_number_of(h, "pcie_width", width); }

int nvmlDeviceGetTotalEccErrors(Handle *h, int type, int counter, unsigned long long *count) {
    (void)counter;
    return number_of(h, type ? "ecc_uncorrected" : "ecc_corrected", count);
}

int nvmlDeviceGetCurrentClocksThrottleReasons(Handle *h, unsigned long long *bits) {
    return number_of(h, "throttle", bits);
}

#ifndef OLD_DRIVER
int nvmlDeviceGetMemoryInfo_v2(Handle *h, struct Memory2 *memory) {
    int code = memory_of(h, &memory->total, &memory->used, &memory->reserved);
    if (code) return code;
    memory->free = memory->total - memory->used - memory->reserved;
    return OK;
}

struct Temperature { unsigned int version; int sensor; int degrees; };

int nvmlDeviceGetTemperatureV(Handle *h, struct Temperature *temperature) {
    return small_number_of(h, "temperature", (unsigned int *)&temperature->degrees);
}

int nvmlDeviceGetCurrentClocksEventReasons(Handle *h, unsigned long long *bits) {
    return number_of(h, "throttle", bits);
}
#endif

int nvmlDeviceGetTotalEnergyConsumption(Handle *h, unsigned long long *millijoules) {
    return number_of(h, "energy", millijoules);
}

int nvmlDeviceGetCudaComputeCapability(Handle *h, int *major, int *minor) {
    char text[32];
    int code = text_of(h, "cc", text, sizeof text);
    if (!code) sscanf(text, "%d.%d", major, minor);
    return code;
}

struct Pci { char bus_legacy[16]; unsigned int domain, bus, device, id, subsystem; char bus_id[32]; };

int nvmlDeviceGetPciInfo_v3(Handle *h, struct Pci *pci) {
    memset(pci, 0, sizeof *pci);
    return string_of(h, "bus", pci->bus_id, sizeof pci->bus_id);
}

struct Process { unsigned int pid; unsigned long long used; unsigned int gpu_instance, compute_instance; };

int nvmlDeviceGetComputeRunningProcesses_v3(Handle *h, unsigned int *count, struct Process *processes) {
    char text[512];
    unsigned int found = 0;
    int code = text_of(h, "processes", text, sizeof text);
    if (code) return code;
    for (char *item = strtok(text, ","); item; item = strtok(NULL, ",")) {
        char *colon = strchr(item, ':');
        if (processes && found < *count) {
            processes[found].pid = (unsigned int)atoi(item);
            processes[found].used = colon && colon[1] != '-' ? strtoull(colon + 1, NULL, 10) : ~0ULL;
        }
        found++;
    }
    if (found && (!processes || found > *count)) code = INSUFFICIENT_SIZE;
    *count = found;
    return code;
}

int nvmlDeviceGetMigMode(Handle *h, unsigned int *current, unsigned int *pending) {
    int code = small_number_of(h, "mig", current);
    *pending = *current;
    return code;
}

int nvmlDeviceGetMaxMigDeviceCount(Handle *h, unsigned int *count) { return small_number_of(h, "mig_max", count); }

int nvmlDeviceGetMigDeviceHandleByIndex(Handle *h, unsigned int index, Handle **device) {
    char text[128];
    if (index >= 8) return INVALID;
    handles[h->gpu][index] = (Handle){h->gpu, (int)index};
    if (text_of(&handles[h->gpu][index], "uuid", text, sizeof text)) return NOT_FOUND;
    *device = &handles[h->gpu][index];
    return OK;
}

int nvmlDeviceGetGpuInstanceId(Handle *h, unsigned int *id) { return small_number_of(h, "gi", id); }
int nvmlDeviceGetComputeInstanceId(Handle *h, unsigned int *id) { return small_number_of(h, "ci", id); }

typedef struct { int num_told; unsigned int watched; } EventSet; // a bit per GPU that is registered
struct Event { Handle *device; unsigned long long type, data; unsigned int gpu_instance, compute_instance; };

int nvmlEventSetCreate(EventSet **set) { return (*set = calloc(1, sizeof **set)) ? OK : INVALID; }

int nvmlEventSetFree(EventSet *set) {
    free(set);
    return OK;
}

int nvmlDeviceGetSupportedEventTypes(Handle *h, unsigned long long *types) {
    char text[32];
    if (!h || !look_up("event_types", text, sizeof text)) return NOT_SUPPORTED;
    *types = strtoull(text, NULL, 10);
    return OK;
}

int nvmlDeviceRegisterEvents(Handle *h, unsigned long long types, EventSet *set) {
    char text[32];
    (void)types;
    if (!h || !set) return INVALID;
    int code = text_of(h, "events", text, sizeof text);
    if (code != OK && code != NOT_SUPPORTED) return code;
    set->watched |= 1u << h->gpu;
    return OK;
}

int nvmlEventSetWait_v2(EventSet *set, struct Event *event, unsigned int timeout_ms) {
    char text[512], *rest = text;
    int number = 0;
    (void)timeout_ms;
    if (!look_up("events", text, sizeof text)) return TIMEOUT;
    for (char *item; (item = strsep(&rest, ","));) {
        unsigned int gpu, instance = ~0u;
        unsigned long long type, data;
        if (sscanf(item, "%u:%llu:%llu:%u", &gpu, &type, &data, &instance) < 3 || number++ < set->num_told) continue;
        set->num_told = number;
        if (gpu >= 16 || !(set->watched & 1u << gpu)) continue;
        *event = (struct Event){&handles[gpu][8], type, data, instance, instance == ~0u ? ~0u : 0};
        return OK;
    }
    return TIMEOUT;
}
