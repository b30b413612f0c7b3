// All CTAs leave a partial sum, and all add up all of them, twice. counts: atomic operations.
#include "graphfuse/atomics.cuh"
#include "graphfuse/grid.cuh"
#include "graphfuse/simt.cuh"
#include "generated.cuh"

struct Counts {
  gf::u64 wide;
  gf::u32 narrow;
  gf::u32 last;
  float real;
};

extern "C" GF_KERNEL(THREADS) grid(const float* input, float* partial, float* output, Counts* counts) {
  const gf::u32 cta = gf::block_index();
  for (gf::u32 round = 0; round < 2; ++round) {
    if (gf::thread_index() == 0) {
      partial[cta] = input[cta] + float(round);
      gf::atomic_add(&counts->wide, gf::u64(1) << 32);
      gf::atomic_add(&counts->narrow, 1u);
      gf::atomic_add(&counts->real, 0.5f);
      gf::atomic_exchange(&counts->last, 7);
    }
    gf::grid_barrier();  // all have written
    float sum = 0.0f;
    for (gf::u32 i = 0; i < gf::grid_size(); ++i) {
      sum += partial[i];
    }
    output[(round * gf::grid_size() + cta) * THREADS + gf::thread_index()] = sum;
    gf::grid_barrier();  // all have read
  }
}
