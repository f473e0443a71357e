// Implements the device type "cuda" for c10 and ATen: devices, streams, events, generators, hooks.
#include "state.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>
#include <torch/csrc/profiler/stubs/base.h>

#include <chrono>
#include <cstring>

namespace stand_in {
namespace {

double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct Event {
  Clock clock;
  double recorded_s = 0;
};

Event* event_of(void* pointer) { return static_cast<Event*>(pointer); }

struct DeviceGuard final : c10::impl::DeviceGuardImplInterface {
  static int index(c10::Device device) { return device.has_index() ? device.index() : current_device(); }
  static c10::Stream stream(int device, int64_t id) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::kCUDA, device), id);
  }

  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device before(c10::kCUDA, current_device());
    set_current_device(index(device));
    return before;
  }
  c10::Device getDevice() const override { return c10::Device(c10::kCUDA, current_device()); }
  void setDevice(c10::Device device) const override {
    Lock lock(state().mutex);
    TORCH_CHECK(index(device) < state().num_devices, "CUDA error: invalid device ordinal");
    set_current_device(index(device));
    state().contexts.insert(index(device));  // since CUDA 12, cudaSetDevice creates the context
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { set_current_device(index(device)); }
  c10::Stream getStream(c10::Device device) const override { return stream(index(device), current_stream(index(device))); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(index(device), 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    Lock lock(state().mutex);
    static int64_t num_streams = 0;
    return stream(index(device), ++num_streams);
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    int device = next.device_index();
    auto before = stream(device, current_stream(device));
    set_current_stream(device, next.id());
    return before;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete event_of(event); }
  void record(void** event, const c10::Stream& on, const c10::DeviceIndex, const c10::EventFlag) const override {
    Lock lock(state().mutex);
    if (!*event) *event = new Event;
    state().contexts.insert(on.device_index());
    state().order.launch(key_of(on));
    event_of(*event)->clock = state().order.of(key_of(on));
    event_of(*event)->recorded_s = seconds();
  }
  void block(void* event, const c10::Stream& on) const override {
    if (!event) return;
    Lock lock(state().mutex);
    stream_waits_for(key_of(on), event_of(event)->clock);
  }
  bool queryEvent(void* event) const override {
    if (event) complete(event_of(event)->clock);
    return true;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(state().num_devices); }
  bool queryStream(const c10::Stream& of) const override {
    Lock lock(state().mutex);
    complete(state().order.of(key_of(of)));
    return true;
  }
  void synchronizeStream(const c10::Stream& of) const override {
    Lock lock(state().mutex);
    host_waits(state().order.of(key_of(of)), "cudaStreamSynchronize", true);
  }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    Lock lock(state().mutex);
    host_waits(event_of(event)->clock, "cudaEventSynchronize", false);
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    Lock lock(state().mutex);
    host_waits_for_device(device);
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& on) const override {
    record_stream(pointer.get(), key_of(on));
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    return 1e3 * (event_of(second)->recorded_s - event_of(first)->recorded_s);
  }

 private:
  // A query that returns "complete" synchronizes the host with the completed operations, without waiting.
  static void complete(const Clock& clock) {
    Lock lock(state().mutex);
    state().order.host_waits_for(clock);
    complete_copies();
  }
};

thread_local std::vector<std::string> open_ranges;  // path of each open range

// A generator with a seed and an offset, like CUDA's Philox: each operation that draws random numbers takes the next
// offset. The numbers come from a CPU generator that is seeded with both.
class Generator final : public c10::GeneratorImpl {
 public:
  explicit Generator(int device, uint64_t seed = c10::detail::getNonDeterministicRandom() >> 11)
      : GeneratorImpl(c10::Device(c10::kCUDA, device), c10::DispatchKeySet(c10::DispatchKey::CUDA)), seed_(seed) {}
  static c10::DeviceType device_type() { return c10::kCUDA; }
  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_state(const c10::TensorImpl& from) override {
    TORCH_CHECK(from.numel() == kStateBytes, "RNG state is wrong size");
    const auto* bytes = static_cast<const uint8_t*>(from.data());
    std::memcpy(&seed_, bytes, sizeof seed_);
    std::memcpy(&offset_, bytes + sizeof seed_, sizeof offset_);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto tensor = at::detail::empty_cpu({kStateBytes}, at::TensorOptions(at::kByte));
    std::memcpy(tensor.mutable_data_ptr(), &seed_, sizeof seed_);
    std::memcpy(static_cast<uint8_t*>(tensor.mutable_data_ptr()) + sizeof seed_, &offset_, sizeof offset_);
    return tensor.getIntrusivePtr();
  }
  at::Generator next() {
    offset_ += 4;
    return at::make_generator<at::CPUGeneratorImpl>(seed_ ^ (offset_ * 0x9e3779b97f4a7c15ULL));
  }

 private:
  static constexpr int64_t kStateBytes = 16;
  Generator* clone_impl() const override {
    auto* copy = new Generator(device().index(), seed_);
    copy->offset_ = offset_;
    return copy;
  }
  uint64_t seed_;
  uint64_t offset_ = 0;
};

}  // namespace

const at::Generator& default_generator(int device) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>;
    for (int index = 0; index < kMaxDevices; ++index) made->push_back(at::make_generator<Generator>(index, 67280421310721ULL));
    return made;
  }();
  return all->at(device < 0 ? current_device() : device);
}

namespace {

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(state().num_devices); }
  int getNumGPUs() const override { return state().num_devices; }
  bool hasPrimaryContext(c10::DeviceIndex device) const override { return state().contexts.count(device) > 0; }
  c10::DeviceIndex current_device() const override { return static_cast<c10::DeviceIndex>(stand_in::current_device()); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { DeviceGuard().setDevice(c10::Device(c10::kCUDA, device)); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    auto before = current_device();
    if (device >= 0) set_current_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? current_device() : device, c10::default_rng_seed_val);
  }
  c10::Device getDeviceFromPtr(void* pointer) const override {
    Lock lock(state().mutex);
    auto* usage = usage_of(pointer);
    return c10::Device(c10::kCUDA, usage ? usage->device : 0);
  }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  c10::Allocator* getCUDADeviceAllocator() const override { return device_allocator(); }
  void deviceSynchronize(c10::DeviceIndex device) const override { DeviceGuard().synchronizeDevice(device); }
};

// The CUDA functions that torch.profiler uses without CUPTI: an event before and after each operator.
struct Profiling final : torch::profiler::impl::ProfilerStubs {
  using Mark = torch::profiler::impl::ProfilerVoidEventStub;
  void record(c10::DeviceIndex* device, Mark* mark, int64_t* cpu_ns) const override {
    double now = seconds();
    if (device) *device = static_cast<c10::DeviceIndex>(current_device());
    if (cpu_ns) *cpu_ns = static_cast<int64_t>(now * 1e9);
    *mark = std::make_shared<double>(now);
  }
  float elapsed(const Mark* begun, const Mark* ended) const override {
    return static_cast<float>((*static_cast<double*>(ended->get()) - *static_cast<double*>(begun->get())) * 1e6);
  }
  void mark(const char*) const override {}
  void rangePush(const char* name) const override { push_range(name); }
  void rangePop() const override { pop_range(); }
  bool enabled() const override { return true; }
  void onEachDevice(std::function<void(int)> call) const override {
    for (int device = 0; device < state().num_devices; ++device) call(device);
  }
  void synchronize() const override {}
};

c10::impl::DeviceGuardImplRegistrar register_guard(c10::kCUDA, new DeviceGuard);
const bool allocators_are_set = [] {
  c10::SetAllocator(c10::kCUDA, device_allocator());
  torch::profiler::impl::registerCUDAMethods(new Profiling);
  return pinned_allocator() != nullptr;
}();

}  // namespace

const at::CUDAHooksInterface* cuda_hooks() {
  static auto* hooks = new Hooks(at::CUDAHooksArgs{});
  return hooks;
}

int push_range(const char* name) {
  open_ranges.push_back(open_ranges.empty() ? name : open_ranges.back() + "/" + name);
  Lock lock(state().mutex);
  ++state().ranges[open_ranges.back()];
  return static_cast<int>(open_ranges.size()) - 1;
}

int pop_range() {
  if (open_ranges.empty()) return -1;
  open_ranges.pop_back();
  return static_cast<int>(open_ranges.size());
}

// Returns the CPU generator for one operation, derived from `generator` or from the device's default generator.
at::Generator generator_of_operation(const std::optional<at::Generator>& generator, int device) {
  Lock lock(state().mutex);
  auto& used = generator ? *generator : default_generator(device);
  return used.get<Generator>()->next();
}

}  // namespace stand_in
