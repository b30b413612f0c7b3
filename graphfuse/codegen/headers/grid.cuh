// A barrier among all CTAs of a grid, for cooperative launches, whose CTAs all run at the same time.
#pragma once
#include "graphfuse/atomics.cuh"
#include "graphfuse/platform.cuh"
#include "graphfuse/simt.cuh"

/// A kernel of which `ctas` CTAs can be resident on an SM.
#ifdef __CUDACC__
#define GF_RESIDENT_KERNEL(threads, ctas) __global__ void __launch_bounds__(threads, ctas)
#else
#define GF_RESIDENT_KERNEL(threads, ctas) void
#endif

namespace gf {

/// The driver's word for the barrier of a cooperative launch. All its bits but the highest are zero between two
/// barriers. So launches leave nothing behind, whether they end, run side by side or are aborted.
GF_DEVICE u32* grid_word(GF_SITE_ONLY) {
#ifdef __CUDACC__
  // The address of the launch's workspace, whose second word it is, as in CUDA's own cooperative groups.
  u32 high, low;
  asm("mov.u32 %0, %%envreg1;" : "=r"(high));
  asm("mov.u32 %0, %%envreg2;" : "=r"(low));
  return reinterpret_cast<u32*>(u64(high) << 32 | low) + 1;
#else
  return host::grid_word(site);
#endif
}

/// A barrier of all threads of the grid. Memory written before it is visible after it.
GF_DEVICE void grid_barrier(GF_SITE_ONLY) {
  constexpr u32 TOP = 0x80000000u;
  barrier(GF_FROM_ONLY);
  if (thread_index() == 0) {
    u32* const word = grid_word(GF_FROM_ONLY);
    // The additions of all CTAs make TOP, so the last CTA to arrive flips the highest bit.
    const u32 before = atomic_add_release(word, block_index() == 0 ? TOP - (grid_size() - 1) : 1u GF_FROM);
    while (((load_acquire(word GF_FROM) ^ before) & TOP) == 0) {
      spin(GF_FROM_ONLY);
    }
  }
  barrier(GF_FROM_ONLY);
}

}  // namespace gf
