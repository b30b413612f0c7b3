// The main function of a program with the machine and a sanitizer: loads the library of a kernel built for that, reads
// a problem from a file, runs it in each of its schedules from fresh memory and writes what the buffers hold after each.
//
// The file, in the machine's own byte order: GfProblem; schedules; per buffer its GfBuffer; relocations; packed arguments; the
// buffers' contents. Each buffer is an allocation of its own, so that AddressSanitizer guards it.
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "launch.hpp"
#include "sanitizers.hpp"

// No variable of the environment decides what a check finds. Who allocated what says nothing of the kernel.
extern "C" const char* __asan_default_options() {
  return "detect_leaks=0:detect_stack_use_after_return=0:exitcode=10:allocator_may_return_null=0:malloc_context_size=0";
}
extern "C" const char* __ubsan_default_options() { return "print_stacktrace=1:halt_on_error=1:exitcode=11"; }
extern "C" const char* __tsan_default_options() {
  // No other thread is there whose races the program could wait for, by default a second, before it ends.
  return "halt_on_error=1:exitcode=12:report_thread_leaks=0:atexit_sleep_ms=0";
}

namespace {

using u64 = unsigned long long;

struct GfProblem {
  GfLaunch launch;  // its schedule aside
  u64 schedules, buffers, relocations, argument_bytes;
};

/// before: bytes by which it misses a multiple of 256.
struct GfBuffer {
  u64 bytes, before;
};

/// The pointer `at` bytes into a buffer, or into the arguments if that is number `buffers`, becomes the address of
/// `buffer` plus `offset`.
struct GfRelocation {
  u64 within, at, buffer, offset;
};

template <class T>
std::vector<T> read(std::FILE* file, u64 count) {
  std::vector<T> values(count);
  if (count && std::fread(values.data(), sizeof(T), count, file) != count) {
    std::fputs("the problem's file is cut short\n", stderr);
    std::exit(2);
  }
  return values;
}

}  // namespace

int main(int, char** names) {
  void* const library = dlopen(names[1], RTLD_NOW);
  const auto run = library ? reinterpret_cast<decltype(&gf_run)>(dlsym(library, "gf_run")) : nullptr;
  if (!run) {
    std::fprintf(stderr, "the kernel's library: %s\n", dlerror());
    return 2;
  }
  std::FILE* const in = std::fopen(names[2], "rb");
  std::FILE* const out = std::fopen(names[3], "wb");
  if (!in || !out) {
    std::perror("the problem's files");
    return 2;
  }
  const GfProblem problem = read<GfProblem>(in, 1)[0];
  const auto schedules = read<u64>(in, problem.schedules);
  const auto buffers = read<GfBuffer>(in, problem.buffers);
  const auto relocations = read<GfRelocation>(in, problem.relocations);
  const auto arguments = read<unsigned char>(in, problem.argument_bytes);
  std::vector<std::vector<unsigned char>> contents;
  for (const GfBuffer& buffer : buffers) contents.push_back(read<unsigned char>(in, buffer.bytes));

  for (const u64 schedule : schedules) {
    std::vector<unsigned char*> memory;
    for (std::size_t i = 0; i < buffers.size(); ++i) {
      void* allocation;
      if (posix_memalign(&allocation, 256, buffers[i].before + buffers[i].bytes + 1)) return 2;
      unsigned char* const begin = static_cast<unsigned char*>(allocation) + buffers[i].before;
      std::memcpy(begin, contents[i].data(), buffers[i].bytes);
      sanitizers::poison(allocation, buffers[i].before);
      sanitizers::poison(begin + buffers[i].bytes, 1);
      memory.push_back(begin);
    }
    auto filled = arguments;
    for (const GfRelocation& r : relocations) {
      const unsigned char* const address = memory[r.buffer] + r.offset;
      std::memcpy((r.within == buffers.size() ? filled.data() : memory[r.within]) + r.at, &address, sizeof address);
    }
    GfLaunch launch = problem.launch;
    launch.schedule = schedule;
    if (const char* const error = run(&launch, filled.data())) {
      std::fprintf(stderr, "schedule %llu: %s\n", schedule, error);
      std::fflush(stderr);
      std::_Exit(13);
    }
    for (std::size_t i = 0; i < buffers.size(); ++i) {
      std::fwrite(memory[i], 1, buffers[i].bytes, out);
      unsigned char* const allocation = memory[i] - buffers[i].before;
      sanitizers::unpoison(allocation, buffers[i].before + buffers[i].bytes + 1);
      std::free(allocation);
    }
  }
  if (std::fclose(out)) {
    std::perror("the results");
    return 2;
  }
  return 0;
}
