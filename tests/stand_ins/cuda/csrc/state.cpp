// Tracks the order of operations, and reports misuses.
#include "state.h"

#include <c10/util/Exception.h>

namespace stand_in {

namespace {
thread_local int device_of_thread = 0;
thread_local std::array<int64_t, kMaxDevices> stream_of_thread{};
thread_local std::string error_of_thread;
constexpr int kOutOfMemory = 2;  // cudaErrorMemoryAllocation
constexpr int kDeviceLost = 719;  // cudaErrorLaunchFailure
}  // namespace

State& state() {
  static State* all = new State;  // never destroyed: tensors may outlive static objects
  return *all;
}

int current_device() { return device_of_thread; }
void set_current_device(int device) { device_of_thread = device; }
int64_t current_stream(int device) { return stream_of_thread.at(device); }
void set_current_stream(int device, int64_t stream) { stream_of_thread.at(device) = stream; }

int64_t Order::launch(StreamKey stream) {
  auto& clock = streams_[stream];
  merge(clock, host_);
  return ++clock[stream];
}

void Order::host_waits_for_device(int device) {
  for (auto& [stream, clock] : streams_)
    if ((stream >> 32) == device) merge(host_, clock);
}

void Order::merge(Clock& into, const Clock& from) {
  for (auto& [stream, time] : from) {
    auto& known = into[stream];
    if (time > known) known = time;
  }
}

void report_misuse(const char* kind, const std::string& detail) {
  ++state().misuses[std::string(kind) + ": " + detail];
}

Usage* usage_of(const void* pointer) {
  auto& all = state().allocations;
  auto* address = static_cast<char*>(const_cast<void*>(pointer));
  auto next = all.upper_bound(address);
  if (next == all.begin()) return nullptr;
  auto& [begin, usage] = *std::prev(next);
  return address < begin + usage.size ? &usage : nullptr;
}

static std::string name_of(StreamKey stream) {
  return "stream " + std::to_string(stream & 0xffffffff) + " of cuda:" + std::to_string(stream >> 32);
}

void note_use(const void* pointer, StreamKey stream, bool writes, const char* operation) {
  auto* usage = usage_of(pointer);
  if (!usage) {
    report_misuse("use-after-free", std::string(operation) + " on " + name_of(stream));
    state().device_error = "an illegal memory access was encountered";
    raise_device_error();
  }
  auto& order = state().order;
  auto unseen = [&](StreamKey other, int64_t when) { return other >= 0 && !order.stream_has_seen(stream, other, when); };
  auto race = [&](const char* kind, StreamKey other) {
    report_misuse(kind, std::string(operation) + " on " + name_of(stream) + " does not wait for " + name_of(other));
  };
  for (auto& [other, when] : usage->previous)
    if (unseen(other, when))
      report_misuse("missing-record-stream", "memory reused by " + name_of(stream) + " while " + name_of(other) + " uses it");
  usage->previous.clear();
  if (unseen(usage->writer, usage->written)) race(writes ? "write-after-write" : "read-after-write", usage->writer);
  if (!writes) {
    usage->readers[stream] = order.last(stream);
    return;
  }
  for (auto& [reader, when] : usage->readers)
    if (unseen(reader, when)) race("write-after-read", reader);
  usage->writer = stream;
  usage->written = order.last(stream);
  usage->readers.clear();
}

void raise_device_error() {
  auto& text = state().device_error;
  if (!text.empty()) throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, kDeviceLost, "CUDA error: " + text);
}

void leave_error(std::string text) { error_of_thread = std::move(text); }

int64_t launch(StreamKey stream, const char* operation) {
  auto& all = state();
  if (auto text = std::exchange(error_of_thread, {}); !text.empty())
    throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, kOutOfMemory, "CUDA error: " + text);
  all.contexts.insert(static_cast<int>(stream >> 32));
  ++all.counters.operations;
  ++all.launches[operation];
  if (all.fails_after >= 0 && all.fails_after-- == 0) all.device_error = all.planned_error;
  int64_t number = all.order.launch(stream);
  if (stream & 0xffffffff) {
    ++all.side_launches[operation];
    all.in_flight.push_back({stream, number, operation, all.counters.on_default_streams});
  } else {
    ++all.counters.on_default_streams;
  }
  return number;
}

// Something waits for all operations in `clock`: the operations that ran concurrently with them are now known.
static void note_overlap(const Clock& clock) {
  auto& all = state();
  std::erase_if(all.in_flight, [&](const InFlight& each) {
    auto seen = clock.find(each.stream);
    if (seen == clock.end() || seen->second < each.operation) return false;
    all.overlapped[each.name] += all.counters.on_default_streams - each.launched_after;
    return true;
  });
}

void stream_waits_for(StreamKey stream, const Clock& clock) {
  note_overlap(clock);
  state().order.stream_waits_for(stream, clock);
}

static void note_host_wait(const char* operation, bool flagged) {
  auto& all = state();
  ++all.host_waits[operation];
  if (flagged && all.sync_debug_mode == 1) TORCH_WARN("called a synchronizing CUDA operation (", operation, ")");
  TORCH_CHECK(!flagged || all.sync_debug_mode != 2, "called a synchronizing CUDA operation (", operation, ")");
}

void host_waits(const Clock& clock, const char* operation, bool flagged) {
  note_host_wait(operation, flagged);
  note_overlap(clock);
  state().order.host_waits_for(clock);
  complete_copies();
  raise_device_error();
}

void host_waits_for_device(int device) {
  note_host_wait("cudaDeviceSynchronize", false);
  state().order.host_waits_for_device(device);
  complete_copies();
  raise_device_error();
}

}  // namespace stand_in
