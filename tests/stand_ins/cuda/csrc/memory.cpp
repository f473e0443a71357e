// Device memory, with torch's caching allocator, and page-locked host memory.
//
// Sizes, pools and splitting follow c10/cuda/CUDACachingAllocator.cpp (torch 2.13) without expandable segments, so that
// fragmentation, retries and statistics equal those of a GPU. Segments are host memory, mapped lazily.
#include "state.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/util/Exception.h>

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <memory>

namespace stand_in {
namespace {

constexpr size_t kMiB = 1 << 20;
constexpr size_t kMinBlock = 512;
constexpr size_t kSmallSize = kMiB;          // maximum of the small pool, which has segments of 2 MiB
constexpr size_t kSmallSegment = 2 * kMiB;
constexpr size_t kLargeSegment = 20 * kMiB;  // for 1 MiB to 10 MiB
constexpr size_t kMinLarge = 10 * kMiB;      // minimum of segments with their own size, rounded to 2 MiB
constexpr int kUninitialized = 0xff;         // NaN in every floating-point format

size_t rounded(size_t size, size_t to) { return (size + to - 1) / to * to; }

struct Block {
  int device;
  StreamKey stream;
  char* pointer;
  size_t size;
  size_t requested = 0;
  bool is_large;
  bool allocated = false;
  std::map<StreamKey, int64_t> awaited;  // freed, but not reused before the host knows that these operations are complete
  Block* before = nullptr;
  Block* after = nullptr;

  bool is_active() const { return allocated || !awaited.empty(); }
};

struct BySize {
  bool operator()(const Block* a, const Block* b) const {
    return std::tie(a->stream, a->size, a->pointer) < std::tie(b->stream, b->size, b->pointer);
  }
};

using Statistics = c10::CachingDeviceAllocator::DeviceStats;
using c10::CachingAllocator::StatArray;
using c10::CachingAllocator::StatType;

// Adds to a statistic in all of its pools.
void add(StatArray& statistic, const Block& block, int64_t amount) {
  auto pool = block.is_large ? StatType::LARGE_POOL : StatType::SMALL_POOL;
  for (auto type : {StatType::AGGREGATE, pool}) {
    auto& one = statistic[static_cast<size_t>(type)];
    if (amount >= 0)
      one.increase(amount);
    else
      one.decrease(-amount);
  }
}

std::string in_units(size_t bytes) {
  char text[32];
  double size = static_cast<double>(bytes);
  if (bytes >= 1024 * kMiB)
    snprintf(text, sizeof text, "%.2f GiB", size / (1024.0 * kMiB));
  else if (bytes >= kMiB)
    snprintf(text, sizeof text, "%.2f MiB", size / kMiB);
  else
    snprintf(text, sizeof text, "%.2f KiB", size / 1024.0);
  return text;
}

// Freed memory may be reused at once on the stream on which it was allocated. Any other stream that used it must either be
// recorded on the allocation, which then lives until that use is complete, or be synchronized with before the reuse.
void keep_leftovers(char* pointer, const Usage& usage) {
  Leftover left{usage.size, {}};
  auto keep = [&](StreamKey stream, int64_t when) {
    if (stream >= 0 && stream != usage.home && !usage.recorded.count(stream)) left.uses[stream] = when;
  };
  for (auto& [reader, when] : usage.readers) keep(reader, when);
  keep(usage.writer, usage.written);
  if (!left.uses.empty()) state().leftovers[pointer] = std::move(left);
}

std::map<StreamKey, int64_t> take_leftovers(char* pointer, size_t size) {
  std::map<StreamKey, int64_t> uses;
  auto& all = state().leftovers;
  for (auto next = all.begin(); next != all.end() && next->first < pointer + size;) {
    if (next->first + next->second.size <= pointer) {
      ++next;
      continue;
    }
    for (auto& [stream, when] : next->second.uses) uses[stream] = std::max(uses[stream], when);
    next = all.erase(next);
  }
  return uses;
}

// The memory of one device.
class Memory {
 public:
  size_t total = 0;
  size_t context = 0;
  double fraction = 1.0;
  Statistics statistics;

  Block* allocate(int device, StreamKey stream, size_t requested) {
    free_completed();
    size_t size = rounded(std::max<size_t>(requested, 1), kMinBlock);
    bool is_large = size > kSmallSize;
    Block* block = take_free(stream, size, is_large);
    if (!block) block = new_segment(device, stream, size, is_large, requested);
    split(block, size);
    block->allocated = true;
    block->requested = requested;
    count_allocated(*block, 1);
    count_active(*block, 1);
    return block;
  }

  // awaited: last operations of the other streams that the memory was recorded on
  void release(Block* block, std::map<StreamKey, int64_t> awaited) {
    count_allocated(*block, -1);
    block->allocated = false;
    block->awaited = std::move(awaited);
    if (block->awaited.empty())
      make_free(block);
    else
      waiting_.push_back(block);
  }

  void empty_cache() {
    for (auto* block : waiting_) state().order.host_waits_for(block->awaited);
    free_completed();
    release_segments();
  }

  size_t reserved() { return statistics.reserved_bytes[0].current; }
  size_t allocated() { return statistics.allocated_bytes[0].current; }
  size_t limit() { return static_cast<size_t>(static_cast<double>(total) * fraction); }
  const std::map<char*, std::pair<size_t, Block*>>& all_segments() { return segments_; }

 private:
  std::set<Block*, BySize> free_[2];
  std::vector<Block*> waiting_;
  std::map<char*, std::pair<size_t, Block*>> segments_;

  std::set<Block*, BySize>& free(bool is_large) { return free_[is_large]; }

  void free_completed() {
    std::erase_if(waiting_, [&](Block* block) {
      for (auto& [stream, operation] : block->awaited)
        if (!state().order.host_has_seen(stream, operation)) return false;
      block->awaited.clear();
      make_free(block);
      return true;
    });
  }

  void make_free(Block* block) {
    count_active(*block, -1);
    block = merged(block);
    if (block->before || block->after) {
      add(statistics.inactive_split, *block, 1);
      add(statistics.inactive_split_bytes, *block, static_cast<int64_t>(block->size));
    }
    free(block->is_large).insert(block);
  }

  void release_segments() {
    for (bool is_large : {false, true}) {
      auto& blocks = free(is_large);
      for (auto next = blocks.begin(); next != blocks.end();) {
        Block* block = *next;
        if (block->before || block->after) {
          ++next;
          continue;
        }
        next = blocks.erase(next);
        add(statistics.reserved_bytes, *block, -static_cast<int64_t>(block->size));
        add(statistics.segment, *block, -1);
        ++statistics.num_device_free;
        take_leftovers(block->pointer, block->size);  // cudaFree waits for the device
        ::munmap(block->pointer, block->size);
        segments_.erase(block->pointer);
        delete block;
      }
    }
  }

  Block* take_free(StreamKey stream, size_t size, bool is_large) {
    Block key{0, stream, nullptr, size, 0, is_large};
    auto& blocks = free(is_large);
    auto found = blocks.lower_bound(&key);
    if (found == blocks.end() || (*found)->stream != stream) return nullptr;
    Block* block = *found;
    blocks.erase(found);
    if (block->before || block->after) {
      add(statistics.inactive_split, *block, -1);
      add(statistics.inactive_split_bytes, *block, -static_cast<int64_t>(block->size));
    }
    return block;
  }

  static size_t segment_size(size_t size) {
    if (size <= kSmallSize) return kSmallSegment;
    return size < kMinLarge ? kLargeSegment : rounded(size, kSmallSegment);
  }

  bool fits(size_t size) {
    size_t used = reserved() + size;
    return used <= limit() && used + context <= total;
  }

  Block* new_segment(int device, StreamKey stream, size_t size, bool is_large, size_t requested) {
    size_t bytes = segment_size(size);
    if (total && !fits(bytes)) {
      ++statistics.num_alloc_retries;
      empty_cache();
      if (!fits(bytes)) out_of_memory(device, requested);
    }
    void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(memory != MAP_FAILED, "the host has no memory for the stand-in device");
    auto* block = new Block{device, stream, static_cast<char*>(memory), bytes, 0, is_large};
    segments_[block->pointer] = {bytes, block};
    add(statistics.reserved_bytes, *block, static_cast<int64_t>(bytes));
    add(statistics.segment, *block, 1);
    ++statistics.num_device_alloc;
    return block;
  }

  [[noreturn]] void out_of_memory(int device, size_t requested) {
    ++statistics.num_ooms;
    size_t in_use = reserved() + context;
    size_t free = total > in_use ? total - in_use : 0;
    std::string cap = fraction < 1 ? in_units(limit()) + " allowed; " : "";
    TORCH_CHECK_WITH(
        OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", in_units(requested), ". GPU ", device,
        " has a total capacity of ", in_units(total), " of which ", in_units(free), " is free. ",
        "Including non-PyTorch memory, this process has ", in_units(in_use), " memory in use. ", cap,
        "Of the allocated memory ", in_units(allocated()), " is allocated by PyTorch, and ",
        in_units(reserved() - allocated()), " is reserved by PyTorch but unallocated. If reserved but unallocated memory "
        "is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.");
    std::abort();
  }

  void split(Block* block, size_t size) {
    size_t rest = block->size - size;
    if (rest < (block->is_large ? kSmallSize + 1 : kMinBlock)) return;
    auto* remaining = new Block{block->device, block->stream, block->pointer + size, rest, 0, block->is_large};
    remaining->before = block;
    remaining->after = block->after;
    if (block->after) block->after->before = remaining;
    block->after = remaining;
    block->size = size;
    add(statistics.inactive_split, *remaining, 1);
    add(statistics.inactive_split_bytes, *remaining, static_cast<int64_t>(rest));
    free(block->is_large).insert(remaining);
  }

  // Merges a free block with its free neighbors.
  Block* merged(Block* block) {
    for (Block* other : {block->before, block->after}) {
      if (!other || other->is_active()) continue;
      free(other->is_large).erase(other);
      add(statistics.inactive_split, *other, -1);
      add(statistics.inactive_split_bytes, *other, -static_cast<int64_t>(other->size));
      Block* first = other == block->before ? other : block;
      Block* second = first == block ? other : block;
      first->size += second->size;
      first->after = second->after;
      if (second->after) second->after->before = first;
      delete second;
      block = first;
    }
    return block;
  }

  void count_allocated(const Block& block, int sign) {
    add(statistics.allocation, block, sign);
    add(statistics.allocated_bytes, block, sign * static_cast<int64_t>(block.size));
  }

  void count_active(const Block& block, int sign) {
    add(statistics.active, block, sign);
    add(statistics.active_bytes, block, sign * static_cast<int64_t>(block.size));
    add(statistics.requested_bytes, block, sign * static_cast<int64_t>(block.requested));
  }
};

std::array<Memory, kMaxDevices>& memories() {
  static auto* all = new std::array<Memory, kMaxDevices>;
  return *all;
}

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  Lock lock(state().mutex);
  std::map<StreamKey, int64_t> awaited;
  auto found = state().allocations.find(block->pointer);
  if (found != state().allocations.end()) {
    for (auto stream : found->second.recorded)
      if (stream != block->stream) awaited[stream] = state().order.last(stream);
    keep_leftovers(found->first, found->second);
    state().allocations.erase(found);
  }
  memories()[block->device].release(block, std::move(awaited));
}

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override {
    Lock lock(state().mutex);
    raise_device_error();
    int device = current_device();
    state().contexts.insert(device);
    if (!size) return {nullptr, nullptr, &c10::detail::deleteNothing, c10::Device(c10::kCUDA, device)};
    StreamKey stream = current_key(device);
    Block* block = memories()[device].allocate(device, stream, size);
    std::memset(block->pointer, kUninitialized, size);
    auto& usage = state().allocations[block->pointer] = Usage{block->size, device, stream};
    usage.previous = take_leftovers(block->pointer, block->size);
    return {block->pointer, block, &free_block, c10::Device(c10::kCUDA, device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override { empty_cache(); }
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    record_stream(pointer.get(), key_of(stream));
  }
  Statistics getDeviceStats(c10::DeviceIndex device) override {
    Lock lock(state().mutex);
    return memories()[device].statistics;
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override { each(device, [](auto& one) { one.reset_accumulated(); }); }
  void resetPeakStats(c10::DeviceIndex device) override { each(device, [](auto& one) { one.reset_peak(); }); }

 private:
  template <class Change>
  void each(int device, Change change) {
    Lock lock(state().mutex);
    auto& all = memories()[device].statistics;
    for (auto* statistic : {&all.allocation, &all.segment, &all.active, &all.inactive_split, &all.allocated_bytes,
                            &all.reserved_bytes, &all.active_bytes, &all.inactive_split_bytes, &all.requested_bytes})
      for (auto& one : *statistic) change(one);
  }
};

// Page-locked memory, allocated in complete pages, so that they can be inaccessible until a pending copy arrives.
struct PinnedMemory final : at::HostAllocator {
  static std::map<char*, size_t>& all() {
    static auto* found = new std::map<char*, size_t>;
    return *found;
  }
  static std::map<char*, size_t>& requested() {  // requested sizes, without the padding of the last page
    static auto* found = new std::map<char*, size_t>;
    return *found;
  }
  static void release(void* context) {
    auto* pointer = static_cast<char*>(context);
    Lock lock(state().mutex);
    requested().erase(pointer);
    auto found = all().find(pointer);
    forget_copies(pointer, found->second);
    ::munmap(pointer, found->second);
    all().erase(found);
  }
  c10::DataPtr allocate(size_t size) override {
    size_t bytes = rounded(std::max<size_t>(size, 1), ::sysconf(_SC_PAGESIZE));
    void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(memory != MAP_FAILED, "CUDA error: out of memory (page-locked memory of the host)");
    Lock lock(state().mutex);
    all()[static_cast<char*>(memory)] = bytes;
    requested()[static_cast<char*>(memory)] = size;
    return {memory, memory, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

}  // namespace

c10::DeviceAllocator* device_allocator() {
  static auto* allocator = new DeviceMemory;
  return allocator;
}

c10::Allocator* pinned_allocator() {
  static auto* allocator = [] {
    auto* made = new PinnedMemory;
    at::setHostAllocator(c10::kCUDA, made);
    return made;
  }();
  return allocator;
}

bool is_whole_pinned_allocation(const void* pointer, size_t size) {
  Lock lock(state().mutex);
  auto& all = PinnedMemory::requested();
  auto found = all.find(static_cast<char*>(const_cast<void*>(pointer)));
  return found != all.end() && found->second == size;
}

bool is_pinned(const void* pointer) {
  Lock lock(state().mutex);
  auto& all = PinnedMemory::all();
  auto* address = static_cast<char*>(const_cast<void*>(pointer));
  auto next = all.upper_bound(address);
  return next != all.begin() && address < std::prev(next)->first + std::prev(next)->second;
}

void register_host_memory(void* pointer, size_t size) {
  Lock lock(state().mutex);
  PinnedMemory::all()[static_cast<char*>(pointer)] = size;
}

bool unregister_host_memory(void* pointer) {
  Lock lock(state().mutex);
  complete_copies();
  return PinnedMemory::all().erase(static_cast<char*>(pointer)) > 0;
}

void set_device_memory(int device, size_t total, size_t context) {
  Lock lock(state().mutex);
  memories()[device].total = total;
  memories()[device].context = context;
}

void set_memory_fraction(int device, double fraction) {
  Lock lock(state().mutex);
  memories()[device].fraction = fraction;
}

std::pair<size_t, size_t> free_and_total(int device) {
  Lock lock(state().mutex);
  auto& memory = memories()[device];
  size_t used = memory.reserved() + memory.context;
  return {memory.total > used ? memory.total - used : 0, memory.total};
}

void empty_cache() {
  Lock lock(state().mutex);
  for (auto& memory : memories()) memory.empty_cache();
}

void record_stream(const void* pointer, StreamKey stream) {
  Lock lock(state().mutex);
  if (auto* usage = usage_of(pointer)) usage->recorded.insert(stream);
}

std::vector<Segment> segments() {
  Lock lock(state().mutex);
  std::vector<Segment> all;
  for (int device = 0; device < kMaxDevices; ++device)
    for (auto& [address, segment] : memories()[device].all_segments()) {
      size_t allocated = 0;
      for (auto next = state().allocations.lower_bound(address);
           next != state().allocations.end() && next->first < address + segment.first; ++next)
        allocated += next->second.size;
      all.push_back({device, reinterpret_cast<size_t>(address), segment.first, allocated, segment.second->is_large,
                     segment.second->stream & 0xffffffff});
    }
  return all;
}

}  // namespace stand_in
