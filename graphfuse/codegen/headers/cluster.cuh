// Thread block clusters: CTAs that run at the same time, and read and write each other's shared memory. Compute
// capability 9.0.
//
// Another CTA's shared memory may be accessed only between two cluster barriers: behind the first one it runs for sure,
// and before the second it has not ended.
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

/// Orders no earlier accesses of the thread, except to mbarriers that it initialized before mbarrier_fence_init.
GF_DEVICE void cluster_arrive_relaxed(GF_SITE_ONLY) {
  GF_GPU_OR_CPU(asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"), host::arrive_cluster(site));
}

GF_DEVICE void cluster_wait(GF_SITE_ONLY) {
  GF_GPU_OR_CPU(asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"), host::wait_cluster(site));
}

/// A barrier of all threads of the cluster. Memory written before it is visible after it.
GF_DEVICE void cluster_barrier(GF_SITE_ONLY) {
  cluster_arrive(GF_FROM_ONLY);
  cluster_wait(GF_FROM_ONLY);
}

/// The address in the CTA of this rank that corresponds to `shared` in this CTA, for plain reads and writes.
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
