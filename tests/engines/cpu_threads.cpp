// Runs one kernel on the CPU: follows the rendered kernel source in one translation unit.
//
// The threads of a CTA are contexts that run in turn from one meeting point (shuffle or barrier)
// to the next; CTAs run one after another. A meeting that some threads miss, an access outside
// the buffers that were allowed and a misaligned access end the process with a message.
#include <ucontext.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <utility>
#include <vector>

namespace {

enum class State { RUNNING, SHUFFLE, BARRIER, DONE };

struct Thread {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  State state = State::RUNNING;
  gf::u32 value = 0, lane_mask = 0, received = 0;
};

struct Region {
  const char* begin;
  const char* end;
  bool writable;
};

constexpr std::size_t STACK_BYTES = 64 << 10;
std::vector<Region> regions;
std::vector<Thread> threads;
std::map<const void*, std::unique_ptr<char[]>> shared;
ucontext_t scheduler;
gf::u32 current, block, grid;
void** kernel_arguments;

[[noreturn]] void fault(const char* what) {
  std::fprintf(stderr, "thread %u of CTA %u: %s\n", current, block, what);
  std::_Exit(3);
}

void meet(State state) {
  threads[current].state = state;
  swapcontext(&threads[current].context, &scheduler);
}

/// Lets those go on who have all met; true if someone may run.
bool release() {
  bool any = false;
  bool all_at_barrier = true;
  for (std::size_t first = 0; first < threads.size(); first += gf::WARP) {
    bool all_at_shuffle = true;
    for (std::size_t i = first; i < first + gf::WARP; ++i) {
      all_at_shuffle &= threads[i].state == State::SHUFFLE && threads[i].lane_mask == threads[first].lane_mask;
      all_at_barrier &= threads[i].state == State::BARRIER;
    }
    for (std::size_t i = first; all_at_shuffle && i < first + gf::WARP; ++i) {
      threads[i].received = threads[first + ((i - first) ^ threads[i].lane_mask)].value;
      threads[i].state = State::RUNNING;
      any = true;
    }
  }
  for (Thread& thread : threads) {
    if (all_at_barrier) {
      thread.state = State::RUNNING;
      any = true;
    }
  }
  return any;
}

template <class... A, std::size_t... I>
void call(void (*kernel)(A...), std::index_sequence<I...>) {
  kernel(*static_cast<A*>(kernel_arguments[I])...);
}

template <class... A>
void call(void (*kernel)(A...)) {
  call(kernel, std::index_sequence_for<A...>{});
}

void thread_main() {
  call(KERNEL);
  meet(State::DONE);
}

}  // namespace

namespace gf::host {
u32 thread_index() { return current; }
u32 block_index() { return block; }
u32 grid_size() { return grid; }

u32 shuffle_xor(u32 value, u32 lane_mask) {
  threads[current].value = value;
  threads[current].lane_mask = lane_mask;
  meet(State::SHUFFLE);
  return threads[current].received;
}

void barrier() { meet(State::BARRIER); }

void* shared_memory(const void* site, u64 bytes) {
  auto& memory = shared[site];
  if (!memory) {
    memory.reset(new char[bytes]);
    __builtin_memset(memory.get(), 0xff, bytes);  // NaN
  }
  return memory.get();
}

void check_access(const void* address, u32 width, bool write) {
  const char* const at = static_cast<const char*>(address);
  if (reinterpret_cast<std::uintptr_t>(at) % width != 0) fault("misaligned access");
  for (const Region& region : regions) {
    if (region.begin <= at && at + width <= region.end && (region.writable || !write)) return;
  }
  fault(write ? "store outside the buffers" : "load outside the buffers");
}
}  // namespace gf::host

extern "C" void forget_buffers() { regions.clear(); }

extern "C" void allow_buffer(const char* begin, gf::u64 bytes, int writable) {
  regions.push_back({begin, begin + bytes, writable != 0});
}

extern "C" void run(gf::u32 ctas, gf::u32 block_threads, void** arguments) {
  grid = ctas;
  kernel_arguments = arguments;
  for (block = 0; block < grid; ++block) {
    shared.clear();
    threads = std::vector<Thread>(block_threads);
    for (Thread& thread : threads) {
      thread.stack.reset(new char[STACK_BYTES]);
      getcontext(&thread.context);
      thread.context.uc_stack.ss_sp = thread.stack.get();
      thread.context.uc_stack.ss_size = STACK_BYTES;
      thread.context.uc_link = nullptr;
      makecontext(&thread.context, thread_main, 0);
    }
    do {
      for (current = 0; current < block_threads; ++current) {
        if (threads[current].state == State::RUNNING) swapcontext(&scheduler, &threads[current].context);
      }
    } while (release());
    for (current = 0; current < block_threads; ++current) {
      if (threads[current].state != State::DONE) fault("waits for threads that do not come");
    }
  }
}
