// What the machine tells AddressSanitizer and ThreadSanitizer. Weak references: the same object file
// goes into programs with either and with neither. The machine itself is never instrumented.
#pragma once
#include <cstddef>
#include <cstdint>

extern "C" {
#define WEAK __attribute__((weak))
WEAK void __sanitizer_start_switch_fiber(void** kept, const void* bottom, std::size_t size);
WEAK void __sanitizer_finish_switch_fiber(void* kept, const void** bottom, std::size_t* size);
WEAK void __asan_poison_memory_region(const volatile void* begin, std::size_t bytes);
WEAK void __asan_unpoison_memory_region(const volatile void* begin, std::size_t bytes);
WEAK void* __asan_region_is_poisoned(void* begin, std::size_t bytes);
WEAK void* __tsan_get_current_fiber();
WEAK void* __tsan_create_fiber(unsigned flags);
WEAK void __tsan_destroy_fiber(void* fiber);
WEAK void __tsan_switch_to_fiber(void* fiber, unsigned flags);
WEAK void __tsan_acquire(void* clock);
WEAK void __tsan_release(void* clock);
WEAK void __tsan_ignore_thread_begin();
WEAK void __tsan_ignore_thread_end();
WEAK void __tsan_read_range_pc(void* begin, std::size_t bytes, void* pc);
WEAK void __tsan_write_range_pc(void* begin, std::size_t bytes, void* pc);
#undef WEAK
}

namespace sanitizers {

inline bool addresses() { return __asan_poison_memory_region != nullptr; }
inline bool races() { return __tsan_get_current_fiber != nullptr; }

/// Any access of a kernel to these bytes is reported from now on.
inline void poison(const void* begin, std::size_t bytes) {
  if (addresses()) __asan_poison_memory_region(begin, bytes);
}
inline void unpoison(const void* begin, std::size_t bytes) {
  if (addresses()) __asan_unpoison_memory_region(begin, bytes);
}
inline bool poisoned(const void* begin, std::size_t bytes) {
  return addresses() && __asan_region_is_poisoned(const_cast<void*>(begin), bytes) != nullptr;
}

/// All that threads did before release(clock) happened before what they do after acquire(clock).
inline void release(char& clock) {
  if (races()) __tsan_release(&clock);
}
inline void acquire(char& clock) {
  if (races()) __tsan_acquire(&clock);
}

/// While the machine works on the stack of a kernel's thread: allocating and moving memory would
/// count as that thread's accesses. Each thread that is switched away from is inside one, too.
class Quiet {
 public:
  Quiet() {
    if (races()) __tsan_ignore_thread_begin();
  }
  ~Quiet() {
    if (races()) __tsan_ignore_thread_end();
  }
  Quiet(const Quiet&) = delete;
};

/// An access that the machine makes for the kernel's instruction at pc. Outside of any Quiet.
inline void reads(const void* begin, std::size_t bytes, void* pc) {
  if (races()) __tsan_read_range_pc(const_cast<void*>(begin), bytes, pc);
}
inline void writes(void* begin, std::size_t bytes, void* pc) {
  if (races()) __tsan_write_range_pc(begin, bytes, pc);
}

/// What `work` does is done by a thread of its own, ordered by clocks alone. outer: the race state that
/// the threads of the kernel are made from.
template <class Work>
void as_another_thread(void* outer, const Work& work) {
  if (!races()) return;
  constexpr unsigned NO_ORDER = 1;
  void* const self = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(outer, NO_ORDER);  // a new thread is ordered after all that its maker did
  void* const other = __tsan_create_fiber(0);
  __tsan_switch_to_fiber(other, NO_ORDER);
  work();
  __tsan_switch_to_fiber(self, NO_ORDER);
  __tsan_destroy_fiber(other);
}

}  // namespace sanitizers
