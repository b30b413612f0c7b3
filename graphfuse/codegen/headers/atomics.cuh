// Atomic operations on one word of global or shared memory.
#pragma once
#include "graphfuse/platform.cuh"

namespace gf {

// These are relaxed, and return the previous value. Additions of floats come in any order, so their sum differs from
// run to run. They are not for results.

template <class T>
GF_DEVICE T atomic_add(T* address, T value GF_SITE) {
#ifdef __CUDACC__
  return atomicAdd(address, value);
#else
  host::check_atomic(address, sizeof(T), true, site);
  if constexpr (T(1) / T(2) == T(0)) {
    return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
  } else {
    T before;
    T after;
    __atomic_load(address, &before, __ATOMIC_RELAXED);
    do {
      after = before + value;
    } while (!__atomic_compare_exchange(address, &before, &after, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return before;
  }
#endif
}

GF_DEVICE u32 atomic_max(u32* address, u32 value GF_SITE) {
#ifdef __CUDACC__
  return atomicMax(address, value);
#else
  host::check_atomic(address, 4, true, site);
  u32 before;
  __atomic_load(address, &before, __ATOMIC_RELAXED);
  while (before < value &&
         !__atomic_compare_exchange(address, &before, &value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  return before;
#endif
}

/// A relaxed load: the word's value at some moment.
GF_DEVICE u32 load_relaxed(const u32* address GF_SITE) {
#ifdef __CUDACC__
  u32 value;
  asm volatile("ld.relaxed.gpu.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
#else
  host::check_atomic(address, 4, false, site);
  return __atomic_load_n(address, __ATOMIC_RELAXED);
#endif
}

GF_DEVICE u32 atomic_exchange(u32* address, u32 value GF_SITE) {
#ifdef __CUDACC__
  return atomicExch(address, value);
#else
  host::check_atomic(address, 4, true, site);
  return __atomic_exchange_n(address, value, __ATOMIC_RELAXED);
#endif
}

/// atomic_add with release: a thread that acquires the sum sees what this thread wrote, or had seen, before.
GF_DEVICE u32 atomic_add_release(u32* address, u32 value GF_SITE) {
#ifdef __CUDACC__
  u32 before;
  asm volatile("atom.add.release.gpu.u32 %0, [%1], %2;" : "=r"(before) : "l"(address), "r"(value) : "memory");
  return before;
#else
  host::check_atomic(address, 4, true, site);
  return __atomic_fetch_add(address, value, __ATOMIC_RELEASE);
#endif
}

/// atomic_add_release that also acquires: what others wrote, or had seen, before they added is visible after it.
GF_DEVICE u32 atomic_add_acq_rel(u32* address, u32 value GF_SITE) {
#ifdef __CUDACC__
  u32 before;
  asm volatile("atom.add.acq_rel.gpu.u32 %0, [%1], %2;" : "=r"(before) : "l"(address), "r"(value) : "memory");
  return before;
#else
  host::check_atomic(address, 4, true, site);
  return __atomic_fetch_add(address, value, __ATOMIC_ACQ_REL);
#endif
}

/// A load with acquire: what was written before the release of the value is visible after it.
GF_DEVICE u32 load_acquire(const u32* address GF_SITE) {
#ifdef __CUDACC__
  u32 value;
  asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
#else
  host::check_atomic(address, 4, false, site);
  return __atomic_load_n(address, __ATOMIC_ACQUIRE);
#endif
}

// Between GPUs and hosts, where other functions order threads of one GPU.

GF_DEVICE void store_release_system(u32* address, u32 value GF_SITE) {
#ifdef __CUDACC__
  asm volatile("st.release.sys.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
#else
  host::check_atomic(address, 4, true, site);
  __atomic_store_n(address, value, __ATOMIC_RELEASE);
#endif
}

/// Orders nothing of this kernel: it announces what kernels wrote that ended before. On a CPU they end without making
/// that visible, so it releases.
GF_DEVICE void store_relaxed_system(u32* address, u32 value GF_SITE) {
#ifdef __CUDACC__
  asm volatile("st.relaxed.sys.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
#else
  host::check_atomic(address, 4, true, site);
  __atomic_store_n(address, value, __ATOMIC_SEQ_CST);
#endif
}

GF_DEVICE u32 load_acquire_system(const u32* address GF_SITE) {
#ifdef __CUDACC__
  u32 value;
  asm volatile("ld.acquire.sys.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
#else
  host::check_atomic(address, 4, false, site);
  return __atomic_load_n(address, __ATOMIC_ACQUIRE);
#endif
}

/// To be called in each round of a loop that waits for another thread's write.
GF_DEVICE void spin(GF_SITE_ONLY) {
#ifndef __CUDACC__
  host::spin(site);
#endif
}

}  // namespace gf
