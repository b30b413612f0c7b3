// Stores to the shared memory of other CTAs of a cluster (st.async). Compute capability 9.0.
#pragma once
#include "graphfuse/cluster.cuh"
#include "graphfuse/mbarrier.cuh"
#include "graphfuse/platform.cuh"

namespace gf {

/// Writes `value` to the address in the CTA of this rank that corresponds to `shared` in this CTA. Its four bytes count
/// towards the phase of that CTA's `mbarrier`, and are visible there when the phase has ended. Unlike a cluster
/// barrier, it does not wait for earlier writes of the thread.
GF_DEVICE void send(float value, float* shared, Mbarrier& mbarrier, u32 rank GF_SITE) {
#ifdef __CUDACC__
  u32 to, at;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(u32(__cvta_generic_to_shared(shared))), "r"(rank));
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(mbarrier.address()), "r"(rank));
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to),
               "r"(__float_as_uint(value)), "r"(at)
               : "memory");
#else
  host::send(value, map_shared(shared, rank, site), &map_shared(&mbarrier, rank, site)->state, site);
#endif
}

}  // namespace gf
