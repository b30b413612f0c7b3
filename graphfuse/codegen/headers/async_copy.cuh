// Asynchronous copies from global to shared memory (cp.async). Each thread starts its own and waits for them.
//
// A thread may read what it copied after async_wait. Other threads may only behind a barrier after that.
#pragma once
#include "graphfuse/platform.cuh"
#include "graphfuse/simt.cuh"
#include "graphfuse/types.cuh"

namespace gf {

/// Starts a copy of BYTES, 4, 8 or 16; both addresses are multiples of it.
template <int BYTES>
GF_DEVICE void copy_async(void* shared, const void* global GF_SITE) {
  static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "no copy of this width");
#ifdef __CUDACC__
  const u32 to = u32(__cvta_generic_to_shared(shared));
  if constexpr (BYTES == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(global), "n"(BYTES) : "memory");
  }
#else
  host::copy_async(shared, global, BYTES, site);
#endif
}

/// Starts copies of COUNT bytes in accesses of WIDTH, to places that are APART bytes from each other.
template <int COUNT, int WIDTH, int APART>
GF_DEVICE void copy_apart(void* shared, const void* global GF_SITE) {
  static_assert(COUNT % WIDTH == 0, "accesses must fill the chunk");
#pragma unroll
  for (int i = 0; i < COUNT / WIDTH; ++i) {
    copy_async<WIDTH>(offset(shared, i * APART), offset(global, i * WIDTH) GF_FROM);
  }
}

/// Reads what copy_apart copied.
template <int COUNT, int WIDTH, int APART>
GF_DEVICE Bytes<COUNT> load_apart(const void* shared GF_SITE) {
  Bytes<COUNT> chunk;
#pragma unroll
  for (int i = 0; i < COUNT / WIDTH; ++i) {
    const Pack<WIDTH> pack = load_pack<WIDTH, Access::USUAL>(offset(shared, i * APART) GF_FROM);
#pragma unroll
    for (int word = 0; word < WIDTH / 4; ++word) {
      chunk.word[i * WIDTH / 4 + word] = pack.word[word];
    }
  }
  return chunk;
}

/// Closes the group of copies that the thread started since the last group. It may be empty.
GF_DEVICE void async_commit(GF_SITE_ONLY) {
  GF_GPU_OR_CPU(asm volatile("cp.async.commit_group;" ::: "memory"), host::commit_copies(site));
}

/// Waits until all groups of the thread but the last PENDING have arrived.
template <int PENDING>
GF_DEVICE void async_wait(GF_SITE_ONLY) {
  GF_GPU_OR_CPU(asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"), host::wait_copies(PENDING, site));
}

}  // namespace gf
