// A stack of one's own and switching between them, with AddressSanitizer and ThreadSanitizer told.
#pragma once
#include <sys/mman.h>

#include <cstddef>
#include <deque>
#include <new>
#include <vector>

#include "sanitizers.hpp"

#if !defined(__x86_64__) || defined(GF_PORTABLE_FIBERS)
#include <ucontext.h>
#define GF_UCONTEXT
#endif

#ifndef GF_UCONTEXT
// swapcontext makes two system calls, which would take most of a kernel's time.
extern "C" void gf_switch_stack(void** save, void* load);
asm(R"(
.text
.globl gf_switch_stack
.hidden gf_switch_stack
.type gf_switch_stack, @function
gf_switch_stack:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
.size gf_switch_stack, .-gf_switch_stack
)");
#endif

class Fiber {
 public:
  static constexpr std::size_t MOST_RACE_STATES = 6000;  // of the 8128 threads that ThreadSanitizer knows

  /// The stack that the caller runs on.
  Fiber() = default;
  Fiber(const Fiber&) = delete;
  ~Fiber() {
    if (stack_) munmap(stack_ - GUARD, GUARD + STACK);
  }

  /// Before the first switch away from the caller's own stack, and before each run.
  void adopt_current() {
    if (sanitizers::races()) race_state_ = __tsan_get_current_fiber();
  }

  /// Ready to run `entry` from its beginning, which must never return. To ThreadSanitizer a new thread, or one of an
  /// earlier launch; `entry` has to acquire what the caller did so far, and nothing else is ordered with it.
  void prepare(void (*entry)()) {
    if (!stack_) {
      void* const memory = mmap(nullptr, GUARD + STACK, PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (memory == MAP_FAILED) throw std::bad_alloc();
      stack_ = static_cast<char*>(memory) + GUARD;
      // Each guard splits a mapping, of which a process has 65530; the first stacks speak for all.
      static std::size_t guarded = 0;
      if (guarded < MOST_GUARDED && ++guarded) mprotect(memory, GUARD, PROT_NONE);
    }
    if (sanitizers::races()) {
      // Fresh pages: what an earlier thread did on this stack is no race with what the new one does.
      const sanitizers::Quiet quiet;
      mmap(stack_, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
      if (spare_race_states().empty()) spare_race_states().push_back(__tsan_create_fiber(0));
      race_state_ = spare_race_states().back();
      spare_race_states().pop_back();
      race_states().push_back(race_state_);
      if (race_states().size() > MOST_RACE_STATES) {
        __tsan_destroy_fiber(race_states().front());
        race_states().pop_front();
      }
    }
    kept_ = nullptr;
    sanitizers::unpoison(stack_, STACK);  // of frames that a run before left behind
#ifdef GF_UCONTEXT
    getcontext(&context_);
    context_.uc_stack.ss_sp = stack_;
    context_.uc_stack.ss_size = STACK;
    context_.uc_link = nullptr;
    makecontext(&context_, entry, 0);
#else
    void** top = reinterpret_cast<void**>(stack_ + STACK);
    *--top = nullptr;  // where a return address would be: entry sees an aligned stack
    *--top = reinterpret_cast<void*>(entry);
    for (int i = 0; i < 6; ++i) *--top = nullptr;
    saved_ = top;
#endif
  }

  /// From this fiber, which is running, to another; returns when someone switches back. `for_good`:
  /// nobody will.
  void switch_to(Fiber& other, bool for_good = false) {
    if (sanitizers::addresses()) {
      __sanitizer_start_switch_fiber(for_good ? nullptr : &kept_, other.bottom(), other.size());
    }
    if (sanitizers::races()) __tsan_switch_to_fiber(other.race_state_, NO_ORDER);
#ifdef GF_UCONTEXT
    swapcontext(&context_, &other.context_);
#else
    gf_switch_stack(&saved_, other.saved_);
#endif
    arrived(kept_);
  }

  /// First thing on a new stack. `outer`: the fiber that adopted the stack of the program.
  static void begin(Fiber& outer) {
    if (!sanitizers::addresses()) return;
    const void* bottom;
    std::size_t size;
    __sanitizer_finish_switch_fiber(nullptr, &bottom, &size);
    if (!outer.outer_bottom_) {
      outer.outer_bottom_ = bottom;
      outer.outer_size_ = size;
    }
  }

  void* race_state() const { return race_state_; }

  /// After a launch: its threads serve the next one, as making one takes ThreadSanitizer most of a millisecond.
  static void spare_all_race_states() {
    spare_race_states().insert(spare_race_states().end(), race_states().begin(), race_states().end());
    race_states().clear();
  }

 private:
  static constexpr std::size_t STACK = 128 << 10;
  static constexpr std::size_t GUARD = 4096;
  static constexpr std::size_t MOST_GUARDED = 8192;
  static constexpr unsigned NO_ORDER = 1;  // a switch does not order what the two threads do
  /// Of the threads of this launch, the first ones first: until its end ThreadSanitizer can say what they did.
  static std::deque<void*>& race_states() {
    static std::deque<void*> states;
    return states;
  }
  static std::vector<void*>& spare_race_states() {
    static std::vector<void*> states;
    return states;
  }

  static void arrived(void* kept) {
    if (sanitizers::addresses()) __sanitizer_finish_switch_fiber(kept, nullptr, nullptr);
  }
  const void* bottom() const { return stack_ ? stack_ : outer_bottom_; }
  std::size_t size() const { return stack_ ? STACK : outer_size_; }

  char* stack_ = nullptr;
  void* kept_ = nullptr;
  void* race_state_ = nullptr;
  const void* outer_bottom_ = nullptr;
  std::size_t outer_size_ = 0;
#ifdef GF_UCONTEXT
  ucontext_t context_;
#else
  void* saved_ = nullptr;
#endif
};
