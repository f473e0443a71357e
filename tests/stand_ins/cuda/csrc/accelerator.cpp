// Preloaded before torch, because a CPU build of torch reports no accelerator and creates its CUDA hooks only once. These
// two functions return those of the stand-in as soon as it is loaded.
#include <dlfcn.h>

#include <cstdint>
#include <optional>

namespace c10 {
enum class DeviceType : int8_t { CPU = 0, CUDA = 1 };
}

extern "C" {
void* stand_in_cuda_hooks = nullptr;  // set by the module
}

namespace at {
struct CUDAHooksInterface;

namespace accelerator {
std::optional<c10::DeviceType> getAccelerator(bool) { return c10::DeviceType::CUDA; }
bool isAccelerator(c10::DeviceType type) { return type == c10::DeviceType::CUDA; }
}  // namespace accelerator

namespace detail {
const CUDAHooksInterface& getCUDAHooks() {
  if (stand_in_cuda_hooks) return *static_cast<const CUDAHooksInterface*>(stand_in_cuda_hooks);
  using Original = const CUDAHooksInterface& (*)();
  static auto original = reinterpret_cast<Original>(
      dlsym(dlopen("libtorch_cpu.so", RTLD_NOLOAD | RTLD_LAZY), "_ZN2at6detail12getCUDAHooksEv"));
  return original();
}
}  // namespace detail
}  // namespace at
