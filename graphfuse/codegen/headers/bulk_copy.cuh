// Bulk copies from global to shared memory (cp.async.bulk). One thread starts each. Compute capability 9.0.
#pragma once
#include "graphfuse/mbarrier.cuh"
#include "graphfuse/platform.cuh"

namespace gf {

/// Starts a copy into this CTA's memory. Its bytes count towards the mbarrier's phase, and are visible to threads that
/// waited for the end of the phase. Addresses and `bytes` are multiples of 16.
GF_DEVICE void bulk_load(void* shared, const void* global, u32 bytes, Mbarrier& mbarrier GF_SITE) {
#ifdef __CUDACC__
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   u32(__cvta_generic_to_shared(shared))),
               "l"(__cvta_generic_to_global(global)), "r"(bytes), "r"(mbarrier.address())
               : "memory");
#else
  host::bulk_load(shared, global, bytes, &mbarrier.state, site);
#endif
}

}  // namespace gf
