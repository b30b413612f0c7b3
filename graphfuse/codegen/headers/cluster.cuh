// CTAs that run at the same time and read and write each other's shared memory. Compute capability 9.0.
//
// A CTA's shared memory may be touched between two cluster barriers: behind the first, its CTA
// surely runs; until the second, it has not ended.
#pragma once
#include "graphfuse/platform.cuh"

namespace gf {

GF_DEVICE u32 cluster_rank() {
#ifdef __CUDACC__
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
#else
  return host::cluster_rank();
#endif
}

GF_DEVICE u32 cluster_size() {
#ifdef __CUDACC__
  u32 size;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
#else
  return host::cluster_size();
#endif
}

// Each thread of the cluster arrives, then waits, then may arrive again.
GF_DEVICE void cluster_arrive(GF_SITE_ONLY) {
  GF_GPU_OR_CPU(asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"), host::arrive_cluster(site));
}

/// Orders nothing that the thread did before but mbarriers that it made, behind mbarrier_fence_init.
GF_DEVICE void cluster_arrive_relaxed(GF_SITE_ONLY) {
  GF_GPU_OR_CPU(asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"), host::arrive_cluster(site));
}

GF_DEVICE void cluster_wait(GF_SITE_ONLY) {
  GF_GPU_OR_CPU(asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"), host::wait_cluster(site));
}

/// All threads of the cluster arrive before any goes on; memory written before is seen by them after.
GF_DEVICE void cluster_barrier(GF_SITE_ONLY) {
  cluster_arrive(GF_FROM_ONLY);
  cluster_wait(GF_FROM_ONLY);
}

/// Where the CTA of this rank has what this CTA has at `shared`; for plain reads and writes.
template <class T>
GF_DEVICE T* map_shared(T* shared, u32 rank GF_SITE) {
#ifdef __CUDACC__
  u64 mapped;
  asm("mapa.u64 %0, %1, %2;" : "=l"(mapped) : "l"(shared), "r"(rank));
  return reinterpret_cast<T*>(mapped);
#else
  return static_cast<T*>(host::map_shared(shared, rank, site));
#endif
}

}  // namespace gf
