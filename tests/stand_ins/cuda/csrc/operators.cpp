// Operators on tensors of the stand-in: each runs the CPU kernel on the same memory, and is recorded on its stream.
#include "state.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/CompileTimeFunctionPointer.h>

#include <cstring>
#include <unordered_map>

namespace stand_in {

at::Generator generator_of_operation(const std::optional<at::Generator>& generator, int device);

namespace {

using at::Tensor;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using c10::Storage;
using c10::StorageImpl;

const DispatchKeySet kOnCPU(DispatchKey::CPU);
const DispatchKeySet kOnDevice(DispatchKey::CUDA);

bool on_device(const Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == c10::kCUDA && tensor.layout() == at::kStrided;
}

// A tensor over `storage` with the shape of `like`.
Tensor tensor_over(const Storage& storage, DispatchKeySet keys, const Tensor& like) {
  Tensor made = at::detail::make_tensor<c10::TensorImpl>(Storage(storage), keys, like.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.is_conj()) impl->_set_conj(true);
  if (like.is_neg()) impl->_set_neg(true);
  return made;
}

Storage cpu_storage_over(const StorageImpl* storage) {
  c10::DataPtr data(const_cast<StorageImpl*>(storage)->mutable_data(), nullptr, &c10::detail::deleteNothing, c10::Device(c10::kCPU));
  return Storage(Storage::use_byte_size_t(), storage->nbytes(), std::move(data), c10::GetAllocator(c10::kCPU), true);
}

Storage device_storage_from(const Storage& cpu, int device) {
  c10::DeviceGuard guard(c10::Device(c10::kCUDA, device));
  auto data = device_allocator()->allocate(cpu.nbytes());
  if (cpu.nbytes()) std::memcpy(data.get(), cpu.data(), cpu.nbytes());
  return Storage(Storage::use_byte_size_t(), cpu.nbytes(), std::move(data), device_allocator(), true);
}

Tensor alias_of(const Tensor& tensor) {
  return tensor_over(cpu_storage_over(tensor.storage().unsafeGetStorageImpl()), kOnCPU, tensor);
}

bool changes_size_with_content(const std::string& name) {
  static const std::set<std::string> all{
      "aten::nonzero", "aten::masked_select", "aten::_unique", "aten::_unique2", "aten::unique_dim",
      "aten::unique_consecutive", "aten::bincount", "aten::repeat_interleave.Tensor"};
  return all.count(name) > 0;
}

bool takes_tensors_of_the_host(const std::string& name) {
  return name.find("index") != std::string::npos || name.find("embedding") != std::string::npos;
}

// One call of an operator. CPU aliases are kept by storage, so that views of one storage stay views of one storage.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : op_(op), schema_(op.schema()), name_(op.schema().name()), stack_(stack) {
    arguments_ = torch::jit::last(*stack, schema_.arguments().size()).vec();
  }

  void run() {
    size_t first = stack_->size() - arguments_.size();
    for (size_t i = 0; i < arguments_.size(); ++i) (*stack_)[first + i] = on_cpu(arguments_[i]);
    if (device_ < 0) device_ = current_device();
    choose_generator(first);
    TORCH_CHECK(
        !(has_host_tensor_ && !aliases_.empty() && !takes_tensors_of_the_host(name_)),
        "Expected all tensors to be on the same device, but found at least two devices, cuda:", device_, " and cpu! (",
        name_, ")");
    stream_ = current_key(device_);
    record();
    Tensor float16_result = convert_arguments_of_softmax(first);
    op_.redispatchBoxed(kOnCPU, stack_);
    if (float16_result.defined()) stack_->back() = float16_result.copy_(stack_->back().toTensor());
    for (auto& [original, alias] : aliases_) adopt_new_size(original, alias);
    size_t results = stack_->size() - schema_.returns().size();
    for (size_t i = 0; i < schema_.returns().size(); ++i) (*stack_)[results + i] = on_device_again(i, (*stack_)[results + i]);
  }

 private:
  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  const std::string name_;
  torch::jit::Stack* stack_;
  std::vector<IValue> arguments_;
  std::vector<std::pair<Tensor, Tensor>> aliases_;  // of the device, of the CPU
  std::unordered_map<const StorageImpl*, std::pair<Storage, Storage>> storages_;
  int device_ = -1;
  StreamKey stream_ = 0;
  bool has_host_tensor_ = false;

  IValue on_cpu(const IValue& value) {
    if (value.isTensor()) return alias(value.toTensor());
    if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) list.push_back(alias(tensor));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (auto tensor : value.toOptionalTensorVector())
        list.push_back(tensor ? std::optional<Tensor>(alias(*tensor)) : std::nullopt);
      return list;
    }
    if (value.isDevice() && value.toDevice().type() == c10::kCUDA) {
      device_ = DeviceIndexOf(value.toDevice());
      return c10::Device(c10::kCPU);
    }
    return value;
  }

  static int DeviceIndexOf(c10::Device device) { return device.has_index() ? device.index() : current_device(); }

  Tensor alias(const Tensor& tensor) {
    if (!on_device(tensor)) {
      has_host_tensor_ |= tensor.defined() && tensor.device().is_cpu() && tensor.dim() > 0 && tensor.layout() == at::kStrided;
      return tensor;
    }
    if (device_ < 0) device_ = tensor.device().index();
    TORCH_CHECK(
        tensor.dim() == 0 || tensor.device().index() == device_,
        "Expected all tensors to be on the same device, but found at least two devices, cuda:", device_, " and cuda:",
        tensor.device().index(), "! (", name_, ")");
    const auto* storage = tensor.storage().unsafeGetStorageImpl();
    auto found = storages_.find(storage);
    if (found == storages_.end())
      found = storages_.emplace(storage, std::make_pair(cpu_storage_over(storage), tensor.storage())).first;
    Tensor made = tensor_over(found->second.first, kOnCPU, tensor);
    aliases_.emplace_back(tensor, made);
    return made;
  }

  // Operators that draw random numbers get a CPU generator derived from the device's generator.
  void choose_generator(size_t first) {
    for (size_t i = 0; i < arguments_.size(); ++i) {
      const auto& type = schema_.arguments()[i].type();
      auto optional = type->cast<c10::OptionalType>();
      if (!optional || optional->getElementType()->kind() != c10::TypeKind::GeneratorType) continue;
      auto& value = (*stack_)[first + i];
      if (value.isNone())
        value = generator_of_operation(std::nullopt, device_);
      else if (value.toGenerator().device().is_cuda())
        value = generator_of_operation(value.toGenerator(), device_);
      else
        TORCH_CHECK(false, "Expected a 'cuda' device type for generator but found 'cpu'");
    }
  }

  // Kernels of a GPU read float16 and write float32, and the reverse in the backward pass; those of a CPU do not.
  // Returns the tensor for the result of such a backward pass, which is its `out` argument.
  Tensor convert_arguments_of_softmax(size_t first) {
    IValue* arguments = &(*stack_)[first];
    if ((name_ == "aten::_softmax" || name_ == "aten::_log_softmax") && arguments[2].toBool()) {
      TORCH_CHECK(arguments[0].toTensor().scalar_type() == at::kHalf, "conversion is supported for Half type only");
      arguments[0] = arguments[0].toTensor().to(at::kFloat);
      arguments[2] = false;
    }
    if ((name_ == "aten::_softmax_backward_data" || name_ == "aten::_log_softmax_backward_data") &&
        arguments[0].toTensor().scalar_type() == at::kFloat && arguments[3].toScalarType() == at::kHalf) {
      Tensor result = arguments[4].toTensor();
      arguments[3] = at::kFloat;
      arguments[4] = at::empty_like(result, result.options().dtype(at::kFloat));
      return result;
    }
    return Tensor();
  }

  void record() {
    Lock lock(state().mutex);
    raise_device_error();
    if (returns_view()) return;
    launch(stream_, name_.c_str());
    auto written = written_storages();
    for (auto& [tensor, alias] : aliases_) {
      if (!tensor.numel()) continue;
      const auto* storage = tensor.storage().unsafeGetStorageImpl();
      note_use(storage->data(), stream_, written.count(storage) > 0, name_.c_str());
    }
    if (waits_for_content()) host_waits(state().order.of(stream_), name_.c_str(), true);
  }

  bool returns_view() const {
    if (schema_.returns().size() != 1) return false;
    auto* alias = schema_.returns()[0].alias_info();
    return alias && !alias->isWrite();
  }

  // Results whose size or value the host needs.
  bool waits_for_content() const {
    if (changes_size_with_content(name_)) return true;
    for (auto& returned : schema_.returns())
      if (returned.type()->kind() == c10::TypeKind::NumberType || returned.type()->kind() == c10::TypeKind::BoolType) return true;
    if (name_ != "aten::index" && name_ != "aten::index_put_" && name_ != "aten::_index_put_impl_") return false;
    for (auto& tensor : arguments_.at(1).toOptionalTensorVector())
      if (tensor && (tensor->scalar_type() == at::kBool || tensor->scalar_type() == at::kByte)) return true;
    return false;
  }

  std::set<const StorageImpl*> written_storages() const {
    std::set<const StorageImpl*> all;
    for (size_t i = 0; i < arguments_.size(); ++i) {
      auto* alias = schema_.arguments()[i].alias_info();
      if (!alias || !alias->isWrite()) continue;
      auto add = [&](const Tensor& tensor) {
        if (on_device(tensor)) all.insert(tensor.storage().unsafeGetStorageImpl());
      };
      if (arguments_[i].isTensor()) add(arguments_[i].toTensor());
      if (arguments_[i].isTensorList())
        for (const auto& tensor : arguments_[i].toTensorVector()) add(tensor);
    }
    return all;
  }

  // out= arguments and resize_ may have given the alias another storage or shape.
  void adopt_new_size(const Tensor& original, const Tensor& alias) {
    auto* storage = original.storage().unsafeGetStorageImpl();
    if (alias.storage().data() != storage->data() || alias.storage().nbytes() != storage->nbytes()) {
      Storage grown = device_storage_from(alias.storage(), device_);
      size_t size = grown.nbytes();
      storage->set_data_ptr_noswap(grown.set_data_ptr(c10::DataPtr()));
      storage->set_nbytes(size);
    }
    if (alias.sizes() != original.sizes() || alias.strides() != original.strides() ||
        alias.storage_offset() != original.storage_offset())
      original.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides(), alias.storage_offset());
  }

  IValue on_device_again(size_t number, const IValue& value) {
    auto* alias = schema_.returns()[number].alias_info();
    if (alias && alias->isWrite())
      for (size_t i = 0; i < arguments_.size(); ++i) {
        auto* argument = schema_.arguments()[i].alias_info();
        if (argument && *argument == *alias) return arguments_[i];
      }
    if (value.isTensor()) return result(value.toTensor());
    if (!value.isTensorList()) return value;
    c10::List<Tensor> list;
    for (const Tensor& tensor : value.toTensorVector()) list.push_back(result(tensor));
    return list;
  }

  Tensor result(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.device().is_cpu()) return tensor;
    for (auto& [original, pair] : storages_)
      if (pair.first.unsafeGetStorageImpl() == tensor.storage().unsafeGetStorageImpl())
        return tensor_over(pair.second, kOnDevice, tensor);
    Storage storage = device_storage_from(tensor.storage(), device_);
    Lock lock(state().mutex);
    if (storage.nbytes()) note_use(storage.data(), stream_, true, name_.c_str());
    return tensor_over(storage, kOnDevice, tensor);
  }
};

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) { Call(op, stack).run(); }

// One kernel on a device; between the host and a device one copy per tensor, like in torch.
void foreach_copy(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  size_t first = stack->size() - 3;
  auto to = (*stack)[first].toTensorVector(), from = (*stack)[first + 1].toTensorVector();
  bool non_blocking = (*stack)[first + 2].toBool();
  auto all_on_device = [](const std::vector<Tensor>& tensors) { return std::all_of(tensors.begin(), tensors.end(), on_device); };
  if (all_on_device(to) && all_on_device(from)) return run_on_cpu(op, stack);
  torch::jit::drop(*stack, 3);
  for (size_t i = 0; i < to.size(); ++i) to[i].copy_(from[i], non_blocking);
}

c10::Device device_or_current(std::optional<c10::Device> device) {
  return device && device->has_index() ? *device : c10::Device(c10::kCUDA, current_device());
}

Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<c10::Device> device,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device_or_current(device));
  return at::detail::empty_generic(size, device_allocator(), kOnDevice, at::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<c10::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device_or_current(device));
  return at::detail::empty_strided_generic(size, stride, device_allocator(), kOnDevice, at::dtype_or_default(dtype));
}

Tensor& set_storage(Tensor& tensor, Storage storage, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto strides = C10_AS_INTARRAYREF_SLOW(stride);
  if (strides.size() == sizes.size()) {
    impl->set_sizes_and_strides(sizes, strides, offset.expect_int());
  } else {
    impl->set_sizes_contiguous(sizes);
    impl->set_storage_offset(offset.expect_int());
  }
  return tensor;
}

Tensor& set_whole_storage(Tensor& tensor, Storage storage) {
  int64_t elements = static_cast<int64_t>(storage.nbytes() / tensor.dtype().itemsize());
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(0);
  impl->set_sizes_contiguous({elements});
  return tensor;
}

Tensor& set_from_tensor(Tensor& tensor, const Tensor& source) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(source.storage());
  impl->set_sizes_and_strides(source.sizes(), source.strides(), source.storage_offset());
  return tensor;
}

void record_tensor_on_stream(Tensor& tensor, c10::Stream stream) {
  record_stream(tensor.storage().data(), key_of(stream));
}

bool is_plain(const Tensor& tensor) { return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg(); }

// CUDA stages a copy of so much pageable memory without waiting for the device.
constexpr size_t kStagedAtOnce = 64 * 1024;

// Copies between the host and a device, and between devices. The host waits for a blocking copy. A non-blocking copy from or
// to page-locked memory is complete only after the host has synchronized; one of pageable memory is staged, as in CUDA. A
// tensor with gaps counts as pageable, because torch copies it to a contiguous one first.
Tensor& copy(Tensor& to, const Tensor& from, bool non_blocking) {
  if (!to.numel()) return to;
  bool to_device = on_device(to), from_device = on_device(from);
  int device = to_device ? to.device().index() : from.device().index();
  StreamKey stream = current_key(device);
  Lock lock(state().mutex);
  raise_device_error();
  int64_t operation = launch(stream, "aten::copy_");
  if (from_device) note_use(from.storage().data(), stream, false, "aten::copy_");
  if (to_device) note_use(to.storage().data(), stream, true, "aten::copy_");
  Tensor source = from_device ? alias_of(from) : from;
  Tensor target = to_device ? alias_of(to) : to.detach();
  at::NoGradGuard no_grad;
  at::AutoDispatchBelowADInplaceOrView below;
  if (to_device == from_device) {
    target.copy_(source);
    return to;
  }
  state().counters.copied_bytes[to_device ? 0 : 1] += static_cast<int64_t>(to.nbytes());
  const Tensor& on_host = to_device ? from : to;
  bool is_late = non_blocking && is_pinned(on_host.storage().data()) && is_plain(on_host);
  if (is_late && !to_device) {
    Tensor content = source.to(to.scalar_type()).expand(to.sizes()).contiguous();
    copy_arrives_late(stream, operation, to.mutable_data_ptr(), content.data_ptr(), to.nbytes());
    return to;
  }
  target.copy_(source);
  if (is_late)
    copy_reads_late(stream, operation, from.data_ptr(), from.nbytes());
  else if (!non_blocking)
    host_waits(state().order.of(stream), "cudaMemcpy", true);
  else if (!to_device || to.nbytes() > kStagedAtOnce)
    host_waits(state().order.of(stream), "cudaMemcpyAsync of pageable memory", false);
  return to;
}

std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  if (train && !*train) return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  Tensor mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {input.mul(mask).mul(p < 1 ? 1 / (1 - p) : 0.0), mask};
}

// A GRU's cell, as torch's CUDA kernels compute it: gates (N, 3 H) in the order reset, update, new. The workspace (N, 5 H) keeps
// them, the previous hidden state, and the hidden gate of `new`.
std::tuple<Tensor, Tensor> gru_cell(
    const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& hx, const std::optional<Tensor>& input_bias,
    const std::optional<Tensor>& hidden_bias) {
  auto input = (input_bias ? input_gates.add(*input_bias) : input_gates).chunk(3, 1);
  auto hidden = (hidden_bias ? hidden_gates.add(*hidden_bias) : hidden_gates).chunk(3, 1);
  Tensor reset = input[0].add(hidden[0]).sigmoid(), update = input[1].add(hidden[1]).sigmoid();
  Tensor fresh = input[2].add(reset.mul(hidden[2])).tanh();
  return {fresh.lerp(hx, update), at::cat({reset, update, fresh, hx, hidden[2]}, 1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(
    const Tensor& gradient, const Tensor& workspace, bool has_bias) {
  auto kept = workspace.chunk(5, 1);
  const Tensor &reset = kept[0], &update = kept[1], &fresh = kept[2], &hx = kept[3], &hidden_fresh = kept[4];
  Tensor of_fresh = gradient.mul(update.neg().add(1)).mul(fresh.square().neg().add(1));
  Tensor of_reset = of_fresh.mul(hidden_fresh).mul(reset).mul(reset.neg().add(1));
  Tensor of_update = gradient.mul(hx.sub(fresh)).mul(update).mul(update.neg().add(1));
  Tensor of_input = at::cat({of_reset, of_update, of_fresh}, 1);
  Tensor of_hidden = at::cat({of_reset, of_update, of_fresh.mul(reset)}, 1);
  Tensor of_input_bias = has_bias ? of_input.sum(0) : Tensor(), of_hidden_bias = has_bias ? of_hidden.sum(0) : Tensor();
  return {of_input, of_hidden, gradient.mul(update), of_input_bias, of_hidden_bias};
}

int64_t math_attention(
    const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool, std::optional<double>, bool) {
  return 0;  // SDPBackend::math
}

// As TORCH_LIBRARY_IMPL does, whose header takes longer to compile than the dispatcher's.
struct Registration {
  std::vector<c10::RegistrationHandleRAII> handles;

  Registration() {
    auto on_cpu = c10::KernelFunction::makeFromBoxedFunction<&run_on_cpu>();
    handles.push_back(c10::Dispatcher::singleton().registerFallback(DispatchKey::CUDA, on_cpu, "stand-in"));
    add("empty", "memory_format", unboxed(TORCH_FN(empty)));
    add("empty_strided", "", unboxed(TORCH_FN(empty_strided)));
    add("copy_", "", unboxed(TORCH_FN(copy)));
    add("set_", "source_Storage_storage_offset", unboxed(TORCH_FN(set_storage)));
    add("set_", "source_Storage", unboxed(TORCH_FN(set_whole_storage)));
    add("set_", "source_Tensor", unboxed(TORCH_FN(set_from_tensor)));
    add("record_stream", "", unboxed(TORCH_FN(record_tensor_on_stream)));
    add("native_dropout", "", unboxed(TORCH_FN(native_dropout)));
    add("_thnn_fused_gru_cell", "", unboxed(TORCH_FN(gru_cell)));
    add("_thnn_fused_gru_cell_backward", "", unboxed(TORCH_FN(gru_cell_backward)));
    // For transposed convolutions, torch calls a kernel of the device without the dispatcher.
    add("convolution_backward", "", on_cpu);
    // Composite implementations of these would run the separate kernels of the CPU; a GPU has fewer, fused kernels.
    add("_foreach_norm", "Scalar", on_cpu);
    add("_foreach_copy_", "", c10::KernelFunction::makeFromBoxedFunction<&foreach_copy>());
  }

  template <class Function>
  static c10::KernelFunction unboxed(Function function) {
    return c10::KernelFunction::makeFromUnboxedFunction(function);
  }

  void add(const char* name, const char* overload, c10::KernelFunction kernel) {
    handles.push_back(c10::Dispatcher::singleton().registerImpl(
        {std::string("aten::") + name, overload}, DispatchKey::CUDA, std::move(kernel), std::nullopt, nullptr, "stand-in"));
  }
};

const auto* registration = new Registration;  // never destroyed: tensors may outlive static objects

}  // namespace

Tensor cpu_alias(const Tensor& tensor) { return alias_of(tensor); }

}  // namespace stand_in

namespace at::native {
REGISTER_CUDA_DISPATCH(_fused_sdp_choice_stub, &stand_in::math_attention)
}
