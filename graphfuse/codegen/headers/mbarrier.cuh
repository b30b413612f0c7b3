// Mbarriers: barriers in shared memory that count arrivals of threads and bytes of copies. Compute capability 9.0.
//
// A phase ends when the arrivals that the mbarrier was initialized for, and the bytes they announced, have come. Then
// the next begins by itself. The first phase has parity 0, and parities alternate.
#pragma once
#include "graphfuse/platform.cuh"

namespace gf {

struct Mbarrier {
  u64 state;

  /// Called by one thread. Others may use the mbarrier behind a barrier that follows mbarrier_fence_init.
  GF_DEVICE void init(u32 arrivals GF_SITE) {
    GF_GPU_OR_CPU(asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address()), "r"(arrivals) : "memory"),
                  host::mbarrier_init(&state, arrivals, site));
  }

  GF_DEVICE void arrive(GF_SITE_ONLY) {
    GF_GPU_OR_CPU(asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address()) : "memory"),
                  host::mbarrier_arrive(&state, 0, site));
  }

  /// Arrives, and makes the phase wait for `bytes` more.
  GF_DEVICE void arrive_expect(u32 bytes GF_SITE) {
    GF_GPU_OR_CPU(asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address()), "r"(bytes)
                               : "memory"),
                  host::mbarrier_arrive(&state, bytes, site));
  }

  /// Waits until the phase of this parity has ended. The phase before the first counts as ended.
  GF_DEVICE void wait(u32 parity GF_SITE) {
#ifdef __CUDACC__
    u32 over;
    do {
      asm volatile(
          "{ .reg .pred over;\n\t"
          "mbarrier.try_wait.parity.shared::cta.b64 over, [%1], %2;\n\t"
          "selp.u32 %0, 1, 0, over; }"
          : "=r"(over)
          : "r"(address()), "r"(parity)
          : "memory");
    } while (!over);
#else
    host::mbarrier_wait(&state, parity, site);
#endif
  }

#ifdef __CUDACC__
  GF_DEVICE u32 address() const { return u32(__cvta_generic_to_shared(this)); }
#endif
};

/// Makes the mbarriers that this thread initialized visible to bulk copies and to the whole cluster.
GF_DEVICE void mbarrier_fence_init(GF_SITE_ONLY) {
  GF_GPU_OR_CPU(asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"), host::mbarrier_fence_init(site));
}

}  // namespace gf
