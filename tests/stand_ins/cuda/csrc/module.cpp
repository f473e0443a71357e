// The Python module of the stand-in: the functions that torch._C has in a CUDA build, and functions for tests.
#include "state.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/utils/device_lazy_init.h>
#include <torch/csrc/utils/pybind.h>

#include <pybind11/chrono.h>

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <functional>
#include <list>
#include <thread>

namespace py = pybind11;

namespace at {
struct CUDAHooksInterface;
}

extern "C" __attribute__((weak)) void* stand_in_cuda_hooks;

namespace stand_in {

const at::CUDAHooksInterface* cuda_hooks();
const at::Generator& default_generator(int device);
at::Tensor cpu_alias(const at::Tensor& tensor);

namespace {

using at::Tensor;
using c10d::Backend;
using c10d::Work;
using Tensors = std::vector<Tensor>;
using milliseconds = std::chrono::milliseconds;

Tensor alias_on_cpu(const Tensor& tensor) { return tensor.device().is_cuda() ? cpu_alias(tensor) : tensor; }
Tensors aliases_on_cpu(const Tensors& tensors) {
  Tensors all;
  for (auto& tensor : tensors) all.push_back(alias_on_cpu(tensor));
  return all;
}
std::vector<Tensors> aliases_on_cpu(const std::vector<Tensors>& lists) {
  std::vector<Tensors> all;
  for (auto& list : lists) all.push_back(aliases_on_cpu(list));
  return all;
}

// NCCL does not report a peer that is lost or does not join: its kernels spin until the watchdog ends the process, and
// destroying the communicator waits for them.
class NcclWork final : public Work {
 public:
  NcclWork(int rank, c10d::OpType type, Tensors tensors, std::vector<c10::intrusive_ptr<Work>> parts, StreamKey stream,
           int64_t operation, milliseconds timeout)
      : Work(rank, type),
        tensors_(std::move(tensors)),
        parts_(std::move(parts)),
        stream_(stream),
        operation_(operation),
        deadline_(std::chrono::steady_clock::now() + timeout) {
    future_ = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{});
  }

  // The current stream waits; the host continues as soon as the result is available.
  bool wait(milliseconds = kNoTimeout) override {
    finish();
    Lock lock(state().mutex);
    stream_waits_for(current_key(static_cast<int>(stream_ >> 32)), state().order.of(stream_));
    tensors_.clear();
    return true;
  }
  void synchronize() override { wait(); }
  bool isCompleted() override {
    for (auto& part : parts_)
      if (!part->isCompleted() || part->exception()) return false;
    return true;
  }
  bool isSuccess() const override { return true; }
  Tensors result() override { return tensors_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    if (!future_->completed()) {
      finish();
      future_->markCompleted(at::IValue(tensors_));
    }
    return future_;
  }
  void abort() override {}

  // Blocks until all peers have participated. A lost peer is not detected before the watchdog's timeout.
  void finish() {
    for (auto& part : parts_) try {
        auto left = std::chrono::duration_cast<milliseconds>(deadline_ - std::chrono::steady_clock::now());
        part->wait(std::max(left, milliseconds(1)));  // 0 would mean no timeout
      } catch (const std::exception& error) {
        spin_until_watchdog(error.what());
      }
  }

 private:
  Tensors tensors_;
  std::vector<c10::intrusive_ptr<Work>> parts_;
  StreamKey stream_;
  int64_t operation_;
  std::chrono::steady_clock::time_point deadline_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;

  [[noreturn]] void spin_until_watchdog(const char* cause) {
    std::this_thread::sleep_until(deadline_);
    std::fprintf(
        stderr,
        "[rank%d]:[E] ProcessGroupNCCL: Watchdog caught collective operation timeout: WorkNCCL(OpType=%s). "
        "To avoid data inconsistency, we are taking the entire process down. (stand-in: %s)\n",
        rank_, c10d::opTypeToString(retrieveOpType()).c_str(), cause);
    std::fflush(stderr);
    std::abort();
  }
};

struct Options final : Backend::Options {
  explicit Options(bool is_high_priority_stream = false)
      : Backend::Options("nccl", milliseconds(10 * 60 * 1000)), is_high_priority_stream(is_high_priority_stream) {}
  bool is_high_priority_stream;
  std::shared_ptr<Backend> split_from;
  int64_t split_color = -1;
};

// NCCL over gloo on the same memory: collectives run on a stream of the group, in the order of their calls.
class ProcessGroupNCCL final : public Backend {
 public:
  ProcessGroupNCCL(c10::intrusive_ptr<Backend> gloo, c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                   c10::intrusive_ptr<Options> options)
      : Backend(rank, size), gloo_(std::move(gloo)), store_(std::move(store)), options_(std::move(options)) {}

  const std::string getBackendName() const override { return "nccl"; }
  c10::intrusive_ptr<Backend::Options> getBackendOptions() override { return options_; }
  void setTimeout(milliseconds timeout) override { options_->timeout = timeout; }
  bool supportsCoalescing() const override { return true; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  c10d::ErrorType getError() override { return c10d::ErrorType::SUCCESS; }
  void eagerConnectSingleDevice(at::Device device) override { device_ = device.index(); }

  c10::intrusive_ptr<Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return launch(c10d::OpType::BROADCAST, tensors, tensors, [=, this] {
      auto aliases = aliases_on_cpu(tensors);
      return gloo_->broadcast(aliases, options);
    });
  }
  c10::intrusive_ptr<Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return launch(c10d::OpType::ALLREDUCE, tensors, tensors, [=, this] {
      auto aliases = aliases_on_cpu(tensors);
      return gloo_->allreduce(aliases, options);
    });
  }
  c10::intrusive_ptr<Work> allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return launch(c10d::OpType::ALLREDUCE_COALESCED, tensors, tensors, [=, this] {
      auto aliases = aliases_on_cpu(tensors);
      return gloo_->allreduce_coalesced(aliases, options);
    });
  }
  c10::intrusive_ptr<Work> reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return launch(c10d::OpType::REDUCE, tensors, tensors, [=, this] {
      auto aliases = aliases_on_cpu(tensors);
      return gloo_->reduce(aliases, options);
    });
  }
  c10::intrusive_ptr<Work> allgather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return launch(c10d::OpType::ALLGATHER, flat(outputs), inputs, [=, this] {
      auto to = aliases_on_cpu(outputs);
      auto from = aliases_on_cpu(inputs);
      return gloo_->allgather(to, from, options);
    });
  }
  c10::intrusive_ptr<Work> _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
    return launch(c10d::OpType::_ALLGATHER_BASE, {output}, {input}, [=, this] {
      // NCCL splits by elements; gloo splits the output along its first dimension.
      auto to = alias_on_cpu(output).view({getSize(), -1}), from = alias_on_cpu(input).reshape({1, -1});
      return gloo_->_allgather_base(to, from, options);
    });
  }
  c10::intrusive_ptr<Work> allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return launch(c10d::OpType::COALESCED, outputs, inputs, [=, this] {
      auto to = aliases_on_cpu(outputs), from = aliases_on_cpu(inputs);
      return gloo_->allgather_into_tensor_coalesced(to, from, options);
    });
  }
  c10::intrusive_ptr<Work> gather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    return launch(c10d::OpType::GATHER, flat(outputs), inputs, [=, this] {
      auto to = aliases_on_cpu(outputs);
      auto from = aliases_on_cpu(inputs);
      return gloo_->gather(to, from, options);
    });
  }
  c10::intrusive_ptr<Work> scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    return launch(c10d::OpType::SCATTER, outputs, flat(inputs), [=, this] {
      auto to = aliases_on_cpu(outputs);
      auto from = aliases_on_cpu(inputs);
      return gloo_->scatter(to, from, options);
    });
  }
  c10::intrusive_ptr<Work> reduce_scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override {
    return launch(c10d::OpType::REDUCE_SCATTER, outputs, flat(inputs), [=, this] {
      auto to = aliases_on_cpu(outputs);
      auto from = aliases_on_cpu(inputs);
      return gloo_->reduce_scatter(to, from, options);
    });
  }
  c10::intrusive_ptr<Work> _reduce_scatter_base(
      Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    return launch(c10d::OpType::_REDUCE_SCATTER_BASE, {output}, {input}, [=, this] {
      auto to = alias_on_cpu(output), from = alias_on_cpu(input);
      return gloo_->_reduce_scatter_base(to, from, options);
    });
  }
  c10::intrusive_ptr<Work> reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    return launch(c10d::OpType::REDUCE_SCATTER_TENSOR_COALESCED, outputs, inputs, [=, this] {
      auto to = aliases_on_cpu(outputs), from = aliases_on_cpu(inputs);
      return gloo_->reduce_scatter_tensor_coalesced(to, from, options);
    });
  }
  c10::intrusive_ptr<Work> alltoall_base(
      Tensor& output, Tensor& input, std::vector<int64_t>& output_sizes, std::vector<int64_t>& input_sizes,
      const c10d::AllToAllOptions& options) override {
    return launch(c10d::OpType::ALLTOALL_BASE, {output}, {input}, [=, this]() mutable {
      auto to = alias_on_cpu(output), from = alias_on_cpu(input);
      return gloo_->alltoall_base(to, from, output_sizes, input_sizes, options);
    });
  }
  c10::intrusive_ptr<Work> send(Tensors& tensors, int to, int tag) override {
    return launch(c10d::OpType::SEND, {}, tensors, [=, this] {
      auto aliases = aliases_on_cpu(tensors);
      return gloo_->send(aliases, to, tag);
    });
  }
  c10::intrusive_ptr<Work> recv(Tensors& tensors, int from, int tag) override {
    return launch(c10d::OpType::RECV, tensors, {}, [=, this] {
      auto aliases = aliases_on_cpu(tensors);
      return gloo_->recv(aliases, from, tag);
    });
  }
  c10::intrusive_ptr<Work> barrier(const c10d::BarrierOptions& options) override {
    auto work = launch(c10d::OpType::BARRIER, {}, {}, [=, this] { return gloo_->barrier(options); });
    work->wait();  // blocks the host, as NCCL's barrier does
    return work;
  }

  // Calls between the two form one group, whose work is complete when all its parts are.
  void startCoalescing() override { coalescing_ = true; }
  c10::intrusive_ptr<Work> endCoalescing() override {
    coalescing_ = false;
    auto parts = std::exchange(coalesced_, {});
    auto tensors = std::exchange(coalesced_tensors_, {});
    return remember(c10::make_intrusive<NcclWork>(
        rank_, c10d::OpType::COALESCED, std::move(tensors), std::move(parts), stream(), last_operation_, options_->timeout));
  }

  // Like ncclCommDestroy: waits for running kernels, and for all other ranks to call it.
  void shutdown() override {
    for (auto& work : running_) work->finish();
    running_.clear();
    auto arrived = [&](int rank) { return "destroyed/" + std::to_string(rank); };
    store_->set(arrived(rank_), std::vector<uint8_t>{1});
    for (int rank = 0; rank < size_; ++rank)
      while (!store_->check({arrived(rank)})) std::this_thread::sleep_for(milliseconds(10));
  }
  void abort() override { running_.clear(); }

 private:
  c10::intrusive_ptr<Backend> gloo_;
  c10::intrusive_ptr<c10d::Store> store_;
  c10::intrusive_ptr<Options> options_;
  int device_ = -1;
  int64_t stream_ = -1;
  uint64_t sequence_ = 0;
  int64_t last_operation_ = 0;
  bool coalescing_ = false;
  std::vector<c10::intrusive_ptr<Work>> coalesced_;
  Tensors coalesced_tensors_;
  std::list<c10::intrusive_ptr<NcclWork>> running_;

  static Tensors flat(const std::vector<Tensors>& lists) {
    Tensors all;
    for (auto& list : lists) all.insert(all.end(), list.begin(), list.end());
    return all;
  }

  StreamKey stream() {
    if (device_ < 0) device_ = current_device();
    if (stream_ < 0) {
      static int64_t num_groups = 0;
      stream_ = (1 << 20) + num_groups++;  // outside of the range of stream numbers that programs create
    }
    return key_of(device_, stream_);
  }

  c10::intrusive_ptr<Work> launch(
      c10d::OpType type, const Tensors& written, const Tensors& read,
      const std::function<c10::intrusive_ptr<Work>()>& call) {
    ++sequence_;
    Tensors tensors = written;
    tensors.insert(tensors.end(), read.begin(), read.end());
    for (auto& tensor : tensors)
      if (tensor.device().is_cuda()) device_ = tensor.device().index();
    {
      Lock lock(state().mutex);
      raise_device_error();
      auto& order = state().order;
      stream_waits_for(stream(), order.of(current_key(device_)));
      auto name = "nccl::" + c10d::opTypeToString(type);
      last_operation_ = stand_in::launch(stream(), name.c_str());
      for (auto& tensor : read)
        if (tensor.device().is_cuda() && tensor.nbytes()) note_use(tensor.storage().data(), stream(), false, name.c_str());
      for (auto& tensor : written)
        if (tensor.device().is_cuda() && tensor.nbytes()) note_use(tensor.storage().data(), stream(), true, name.c_str());
    }
    auto work = call();
    if (coalescing_) {
      coalesced_.push_back(work);
      coalesced_tensors_.insert(coalesced_tensors_.end(), tensors.begin(), tensors.end());
      return nullptr;
    }
    return remember(c10::make_intrusive<NcclWork>(
        rank_, type, std::move(tensors), std::vector{work}, stream(), last_operation_, options_->timeout));
  }

  c10::intrusive_ptr<NcclWork> remember(c10::intrusive_ptr<NcclWork> work) {
    running_.remove_if([](auto& each) { return each->isCompleted(); });
    running_.push_back(work);
    return work;
  }
};

py::dict values_of(const c10::CachingAllocator::Stat& one) {
  py::dict values;
  values["current"] = one.current;
  values["peak"] = one.peak;
  values["allocated"] = one.allocated;
  values["freed"] = one.freed;
  return values;
}

py::dict pools(const c10::CachingAllocator::StatArray& statistic) {
  py::dict all;
  const char* names[] = {"all", "small_pool", "large_pool"};
  for (int i = 0; i < 3; ++i) all[names[i]] = values_of(statistic[i]);  // AGGREGATE, SMALL_POOL, LARGE_POOL
  return all;
}

py::dict memory_statistics(int device) {
  auto found = device_allocator()->getDeviceStats(static_cast<c10::DeviceIndex>(device));
  py::dict all;
  all["num_alloc_retries"] = found.num_alloc_retries;
  all["num_ooms"] = found.num_ooms;
  all["num_sync_all_streams"] = found.num_sync_all_streams;
  all["num_device_alloc"] = found.num_device_alloc;
  all["num_device_free"] = found.num_device_free;
  all["max_split_size"] = -1;
  all["oversize_allocations"] = values_of(found.oversize_allocations);
  all["oversize_segments"] = values_of(found.oversize_segments);
  all["allocation"] = pools(found.allocation);
  all["segment"] = pools(found.segment);
  all["active"] = pools(found.active);
  all["inactive_split"] = pools(found.inactive_split);
  all["allocated_bytes"] = pools(found.allocated_bytes);
  all["reserved_bytes"] = pools(found.reserved_bytes);
  all["active_bytes"] = pools(found.active_bytes);
  all["inactive_split_bytes"] = pools(found.inactive_split_bytes);
  all["requested_bytes"] = pools(found.requested_bytes);
  return all;
}

py::list memory_segments() {
  py::list all;
  for (auto& each : segments()) {
    py::dict one;
    one["device"] = each.device;
    one["address"] = each.address;
    one["total_size"] = each.size;
    one["allocated_size"] = each.allocated;
    one["segment_type"] = each.is_large ? "large" : "small";
    one["stream"] = each.stream;
    all.append(one);
  }
  return all;
}

py::dict counts() {
  Lock lock(state().mutex);
  py::dict all;
  all["operations"] = state().counters.operations;
  all["host_waits"] = state().host_waits;
  all["launches"] = state().launches;
  all["side_launches"] = state().side_launches;
  all["overlapped"] = state().overlapped;
  all["bytes_to_device"] = state().counters.copied_bytes[0];
  all["bytes_to_host"] = state().counters.copied_bytes[1];
  return all;
}

// Like at::native::resize_bytes_cuda; a CPU build of torch refuses to resize storages of other devices.
void resize_storage(const Tensor& over, size_t size) {
  auto* storage = over.storage().unsafeGetStorageImpl();
  c10::DeviceGuard guard(over.device());
  auto memory = device_allocator()->allocate(size);
  if (size) std::memcpy(memory.get(), storage->data(), std::min(size, storage->nbytes()));
  storage->set_data_ptr_noswap(std::move(memory));
  storage->set_nbytes(size);
}

}  // namespace

PYBIND11_MODULE(_stand_in, module) {
  if (&stand_in_cuda_hooks) stand_in_cuda_hooks = const_cast<void*>(static_cast<const void*>(cuda_hooks()));
  module.attr("is_preloaded") = static_cast<bool>(&stand_in_cuda_hooks);

  // Lambdas are converted to pointers, so that those of the same type share the code of pybind11.
  module.def("set_num_devices", +[](int count) { state().num_devices = count; });
  module.def("set_device_memory", &set_device_memory, py::arg("device"), py::arg("total"), py::arg("context"));
  module.def("set_memory_fraction", +[](double fraction, int device) { set_memory_fraction(device, fraction); });
  module.def("free_and_total", &free_and_total);
  module.def("memory_statistics", &memory_statistics);
  module.def("memory_segments", &memory_segments);
  module.def("reset_peaks", +[](int device) { device_allocator()->resetPeakStats(static_cast<c10::DeviceIndex>(device)); });
  module.def("reset_accumulated", +[](int device) { device_allocator()->resetAccumulatedStats(static_cast<c10::DeviceIndex>(device)); });
  module.def("resize_storage", &resize_storage);
  module.def("empty_cache", &empty_cache);
  module.def("register_host_memory", +[](size_t address, size_t size) {
    state().contexts.insert(current_device());
    register_host_memory(reinterpret_cast<void*>(address), size);
  });
  module.def("unregister_host_memory", +[](size_t address) { return unregister_host_memory(reinterpret_cast<void*>(address)); });
  module.def("synchronize", +[](int device) { Lock lock(state().mutex); host_waits_for_device(device); },
             py::call_guard<py::gil_scoped_release>());
  module.def("sync_debug_mode", +[] { return state().sync_debug_mode; });
  module.def("set_sync_debug_mode", +[](int mode) { state().sync_debug_mode = mode; });
  module.def("default_generator", +[](int device) { return default_generator(device); });
  // Python's lazy initialization runs again at the next use, and raises an error.
  module.def("after_fork_in_child", +[] {
    torch::utils::set_requires_device_init(c10::kCUDA, true);
    state().counters = {};  // a child process has its own counters
    state().contexts.clear();
    state().launches.clear();
    state().ranges.clear();
    state().side_launches.clear();
    state().overlapped.clear();
    state().in_flight.clear();
    state().misuses.clear();
  });
  module.def("contexts", +[] { Lock lock(state().mutex); return std::vector<int>(state().contexts.begin(), state().contexts.end()); });
  module.def("misuses", +[] { Lock lock(state().mutex); complete_copies(); return state().misuses; });
  module.def("clear_misuses", +[] { Lock lock(state().mutex); state().misuses.clear(); });
  module.def("counts", &counts);
  module.def("launches", +[] { Lock lock(state().mutex); return state().launches; });
  module.def("push_range", &push_range);
  module.def("pop_range", &pop_range);
  module.def("ranges", +[] { Lock lock(state().mutex); return state().ranges; });
  module.def("leave_error", &leave_error);
  module.def("fail_after", +[](int64_t operations, std::string text) {
    Lock lock(state().mutex);
    state().fails_after = operations;
    state().planned_error = std::move(text);
  });

  // Registered when torch was imported; imported here, because pybind11 requires registered base classes.
  py::module::import("torch._C._distributed_c10d");
  py::class_<Options, c10::intrusive_ptr<Options>>(module, "Options", py::module::import("torch._C._distributed_c10d").attr("Backend").attr("Options"))
      .def(py::init<bool>(), py::arg("is_high_priority_stream") = false)
      .def_readwrite("is_high_priority_stream", &Options::is_high_priority_stream)
      .def_readwrite("split_color", &Options::split_color);
  py::class_<ProcessGroupNCCL, c10::intrusive_ptr<ProcessGroupNCCL>>(module, "ProcessGroupNCCL", py::module::import("torch._C._distributed_c10d").attr("Backend"))
      .def(
          py::init([](c10::intrusive_ptr<c10d::Store> store, int rank, int size, c10::intrusive_ptr<Options> options) {
            auto gloo = py::module::import("torch._C._distributed_c10d").attr("ProcessGroupGloo")(
                store, rank, size, std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::hours(24)));
            return c10::make_intrusive<ProcessGroupNCCL>(
                gloo.cast<c10::intrusive_ptr<Backend>>(), std::move(store), rank, size, std::move(options));
          }),
          py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("options"))
      .def("_set_default_timeout", &ProcessGroupNCCL::setTimeout);
  module.attr("ProcessGroupNCCL").attr("Options") = module.attr("Options");
}

}  // namespace stand_in
