// The state of the stand-in in one process: its devices, the operations of each stream, and all misuses.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <array>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace stand_in {

constexpr int kMaxDevices = 8;

// A stream of a device: device index in the upper half, stream id in the lower.
using StreamKey = int64_t;
// A vector clock: for each stream the number of its last operation that is known to be complete.
using Clock = std::map<StreamKey, int64_t>;

inline StreamKey key_of(int device, int64_t stream) { return (static_cast<int64_t>(device) << 32) | stream; }
inline StreamKey key_of(const c10::Stream& stream) { return key_of(stream.device_index(), stream.id()); }

// Happens-before relation between streams and the host, by vector clocks. The results of an operation are visible to a
// stream that has waited for it, and to the host after a synchronization.
class Order {
 public:
  // Starts an operation on a stream and returns its number. Whatever the host has waited for is visible to it.
  int64_t launch(StreamKey stream);
  int64_t last(StreamKey stream) { return streams_[stream][stream]; }
  const Clock& of(StreamKey stream) { return streams_[stream]; }
  void stream_waits_for(StreamKey stream, const Clock& clock) { merge(streams_[stream], clock); }
  void host_waits_for(const Clock& clock) { merge(host_, clock); }
  void host_waits_for_device(int device);
  bool host_has_seen(StreamKey stream, int64_t operation) { return host_[stream] >= operation; }
  bool stream_has_seen(StreamKey by, StreamKey stream, int64_t operation) {
    return by == stream || streams_[by][stream] >= operation || host_[stream] >= operation;
  }

 private:
  static void merge(Clock& into, const Clock& from);
  Clock host_;
  std::map<StreamKey, Clock> streams_;
};

// One allocation of a tensor: its last write and reads, and the streams on which it was recorded.
struct Usage {
  size_t size = 0;
  int device = 0;
  StreamKey home = 0;  // the stream it was allocated on
  StreamKey writer = -1;
  int64_t written = 0;
  std::map<StreamKey, int64_t> readers;
  std::set<StreamKey> recorded;
  std::map<StreamKey, int64_t> previous;  // last uses of the memory before it was freed, by streams that were not recorded
};

// Uses of freed memory for which the stream of the allocation has not waited.
struct Leftover {
  size_t size = 0;
  std::map<StreamKey, int64_t> uses;
};

// An operation of a side stream for which no stream and no host has waited yet.
struct InFlight {
  StreamKey stream;
  int64_t operation;
  std::string name;
  int64_t launched_after;  // operations of default streams
};

struct Counters {
  int64_t operations = 0;  // kernels and copies launched
  int64_t on_default_streams = 0;
  std::array<int64_t, 2> copied_bytes{};  // to a device, to the host
};

// Everything shared; `mutex` guards all of it.
struct State {
  std::recursive_mutex mutex;
  int num_devices = 1;
  Order order;
  Counters counters;
  std::set<int> contexts;  // devices on which this process has a context
  std::map<char*, Usage> allocations;
  std::map<char*, Leftover> leftovers;
  std::map<std::string, int64_t> misuses;  // "kind: detail" -> number of occurrences
  std::map<std::string, int64_t> launches;  // operation -> number of launches
  std::map<std::string, int64_t> side_launches;  // those on streams other than the default one
  // operation of a side stream -> operations that default streams launched before one waited for it
  std::map<std::string, int64_t> overlapped;
  std::vector<InFlight> in_flight;
  std::map<std::string, int64_t> ranges;  // "outer range/inner range" of NVTX -> number of times that it was entered
  std::map<std::string, int64_t> host_waits;  // operation -> number of times that it made the host wait for a device
  int sync_debug_mode = 0;  // 0 off, 1 warn, 2 error: torch.cuda.set_sync_debug_mode
  std::string device_error;  // raised at the next synchronization and by all later calls
  int64_t fails_after = -1;  // operations until `device_error` is set
  std::string planned_error;
};

State& state();
using Lock = std::lock_guard<std::recursive_mutex>;

int current_device();
void set_current_device(int device);
int64_t current_stream(int device);
void set_current_stream(int device, int64_t stream);
inline StreamKey current_key(int device) { return key_of(device, current_stream(device)); }

// kind: read-after-write, write-after-write, write-after-read, missing-record-stream, early-host-access, pinned-reuse,
// use-after-free
void report_misuse(const char* kind, const std::string& detail);
Usage* usage_of(const void* pointer);
// Records that an operation on `stream` reads or writes an allocation, and reports races with other streams.
void note_use(const void* pointer, StreamKey stream, bool writes, const char* operation);
// Starts an operation: counts it, opens a context, raises a pending device error.
int64_t launch(StreamKey stream, const char* operation);
void stream_waits_for(StreamKey stream, const Clock& clock);
// The host waits for a device. `flagged`: torch's sync_debug_mode would report this one.
void host_waits(const Clock& clock, const char* operation, bool flagged);
void host_waits_for_device(int device);
void raise_device_error();
// Open and close a range of NVTX on this thread; both return the number of ranges that enclose it, -1 if none is open.
int push_range(const char* name);
int pop_range();
// A runtime call failed: CUDA keeps the error for this thread, and the next kernel launch raises it.
void leave_error(std::string text);

// Memory of devices, and page-locked memory of the host (memory.cpp).
c10::DeviceAllocator* device_allocator();
c10::Allocator* pinned_allocator();
bool is_pinned(const void* pointer);
// Returns whether this is one complete allocation of page-locked memory, whose pages are not shared with others.
bool is_whole_pinned_allocation(const void* pointer, size_t size);
void register_host_memory(void* pointer, size_t size);
bool unregister_host_memory(void* pointer);
void set_device_memory(int device, size_t total, size_t context);
void set_memory_fraction(int device, double fraction);
std::pair<size_t, size_t> free_and_total(int device);
void empty_cache();
void record_stream(const void* pointer, StreamKey stream);
struct Segment {
  int device;
  size_t address, size, allocated;
  bool is_large;
  int64_t stream;
};
std::vector<Segment> segments();

// Copies between the host and a device that are complete only after a synchronization (copies.cpp).
void copy_arrives_late(StreamKey stream, int64_t operation, void* to, const void* from, size_t size);
void copy_reads_late(StreamKey stream, int64_t operation, const void* from, size_t size);
void complete_copies();
// Called when page-locked memory is freed; torch's allocator keeps it until copies that use it are complete.
void forget_copies(const void* pointer, size_t size);

}  // namespace stand_in
