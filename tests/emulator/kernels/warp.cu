// What lanes of a warp tell each other: seven numbers a thread.
#include "graphfuse/simt.cuh"
#include "generated.cuh"

extern "C" GF_KERNEL(THREADS) warp(const gf::u32* input, gf::u32* output) {
  GF_SHARED(gf::u32, shared, THREADS);
  const gf::u32 thread = gf::thread_index();
  const gf::u32 value = input[gf::block_index() * THREADS + thread];
  const gf::u32 warp_start = thread - gf::lane();
  shared[thread] = value;
  gf::warp_barrier();
  const gf::u32 neighbour = shared[warp_start + (gf::lane() + 1) % gf::WARP];
  const gf::u32 found[7] = {
      gf::ballot(value % 3 == 0),
      gf::u32(gf::any_lane(value == 7)),
      gf::u32(gf::all_lanes(value > 1)),
      gf::shuffle_xor(value, 5),
      gf::u32(gf::shuffle_down(gf::u64(value) << 32, 3) >> 32),
      gf::u32(gf::shuffle(float(value % 1024), value)),
      neighbour,
  };
  for (int i = 0; i < 7; ++i) {
    output[(gf::block_index() * THREADS + thread) * 7 + i] = found[i];
  }
}
