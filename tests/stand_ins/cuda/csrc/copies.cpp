// Asynchronous copies between page-locked memory and a device.
//
// Kernels of the stand-in are complete when they are launched, but copies are not. A copy to the host writes its
// destination when the host first waits for it. A copy from the host requires its source to be unchanged until then.
#include "state.h"

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstring>
#include <deque>

namespace stand_in {
namespace {

struct ToHost {
  StreamKey stream;
  int64_t operation;
  char* to;
  std::vector<char> content;
};

struct FromHost {
  StreamKey stream;
  int64_t operation;
  const char* from;
  std::vector<char> content;
};

std::deque<ToHost>& to_host() {
  static auto* all = new std::deque<ToHost>;
  return *all;
}
std::deque<FromHost>& from_host() {
  static auto* all = new std::deque<FromHost>;
  return *all;
}

// Pages whose content has not arrived are inaccessible. An access raises SIGSEGV; the handler records it and opens the
// page, so that the program continues with the stale bytes that it would have read on a GPU.
constexpr size_t kMaxClosed = 4096;
struct Pages {
  std::atomic<char*> begin{nullptr};
  size_t size = 0;
};
Pages closed_pages[kMaxClosed];
std::atomic<int> num_early_reads{0};
struct sigaction next_handler;

void open_if_touched(int signal, siginfo_t* info, void* context) {
  auto* address = static_cast<char*>(info->si_addr);
  for (auto& pages : closed_pages) {
    char* begin = pages.begin.load();
    if (!begin || address < begin || address >= begin + pages.size) continue;
    ::mprotect(begin, pages.size, PROT_READ | PROT_WRITE);
    pages.begin.store(nullptr);
    ++num_early_reads;
    return;
  }
  ::sigaction(SIGSEGV, &next_handler, nullptr);  // not one of these pages: the retried access gets the previous handler
  (void)signal, (void)context;
}

void install_handler() {
  static std::once_flag once;
  std::call_once(once, [] {
    struct sigaction ours {};
    ours.sa_sigaction = &open_if_touched;
    ours.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
    ::sigaction(SIGSEGV, &ours, &next_handler);
  });
}

// Makes the pages that belong to [to, to + size) alone inaccessible.
void close_pages(char* to, size_t size) {
  size_t page = ::sysconf(_SC_PAGESIZE);
  auto first = (reinterpret_cast<size_t>(to) + page - 1) / page * page;
  auto last = (reinterpret_cast<size_t>(to) + size + (is_whole_pinned_allocation(to, size) ? page - 1 : 0)) / page * page;
  if (first >= last) return;
  install_handler();
  for (auto& pages : closed_pages) {
    if (pages.begin.load()) continue;
    pages.size = last - first;
    pages.begin.store(reinterpret_cast<char*>(first));
    ::mprotect(reinterpret_cast<void*>(first), last - first, PROT_NONE);
    return;
  }
}

void open_pages(char* to, size_t size) {
  for (auto& pages : closed_pages) {
    char* begin = pages.begin.load();
    if (!begin || begin < to || begin >= to + size) continue;
    ::mprotect(begin, pages.size, PROT_READ | PROT_WRITE);
    pages.begin.store(nullptr);
  }
}

}  // namespace

void copy_arrives_late(StreamKey stream, int64_t operation, void* to, const void* from, size_t size) {
  auto* source = static_cast<const char*>(from);
  open_pages(static_cast<char*>(to), size);
  to_host().push_back({stream, operation, static_cast<char*>(to), {source, source + size}});
  close_pages(static_cast<char*>(to), size);
}

void copy_reads_late(StreamKey stream, int64_t operation, const void* from, size_t size) {
  auto* source = static_cast<const char*>(from);
  from_host().push_back({stream, operation, source, {source, source + size}});
}

void forget_copies(const void* pointer, size_t size) {
  auto* begin = static_cast<const char*>(pointer);
  auto inside = [&](const char* address) { return address >= begin && address < begin + size; };
  open_pages(const_cast<char*>(begin), size);
  std::erase_if(to_host(), [&](auto& copy) { return inside(copy.to); });
  std::erase_if(from_host(), [&](auto& copy) { return inside(copy.from); });
}

void complete_copies() {
  auto& order = state().order;
  for (int seen = num_early_reads.exchange(0); seen > 0; --seen)
    report_misuse("early-host-access", "page-locked memory touched by the host before the copy into it was complete");
  auto& arriving = to_host();
  for (auto next = arriving.begin(); next != arriving.end();) {
    if (!order.host_has_seen(next->stream, next->operation)) {
      ++next;
      continue;
    }
    open_pages(next->to, next->content.size());
    std::memcpy(next->to, next->content.data(), next->content.size());
    next = arriving.erase(next);
  }
  auto& reading = from_host();
  for (auto next = reading.begin(); next != reading.end();) {
    if (!order.host_has_seen(next->stream, next->operation)) {
      ++next;
      continue;
    }
    if (std::memcmp(next->from, next->content.data(), next->content.size()) != 0)
      report_misuse("pinned-reuse", "page-locked memory changed by the host before the copy from it was complete");
    next = reading.erase(next);
  }
}

}  // namespace stand_in
