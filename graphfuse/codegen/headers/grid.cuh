// A barrier among all CTAs of a grid, for launches that are cooperative: all CTAs run at the same time.
#pragma once
#include "graphfuse/atomics.cuh"
#include "graphfuse/platform.cuh"
#include "graphfuse/simt.cuh"

namespace gf {

/// All threads of the grid arrive before any goes on; memory written before is seen by them after.
///
/// counter: in global memory, at first a multiple of the number of CTAs; it only grows, by their
/// number at each barrier, so that one counter serves barrier after barrier and launch after launch.
GF_DEVICE void grid_barrier(u64* counter GF_SITE) {
  barrier(GF_FROM_ONLY);
  if (thread_index() == 0) {
    const u64 ctas = grid_size();
    const u64 before = atomic_add_release(counter, 1 GF_FROM);
    const u64 all = (before / ctas + 1) * ctas;
    while (load_acquire(counter GF_FROM) < all) {
      spin(GF_FROM_ONLY);
    }
  }
  barrier(GF_FROM_ONLY);
}

}  // namespace gf
