// Each CTA adds up one row, which comes through two stages of shared memory. Threads read what others copied.
#include "graphfuse/async_copy.cuh"
#include "graphfuse/dependent_launch.cuh"
#include "graphfuse/simt.cuh"
#include "generated.cuh"

constexpr int WORDS = BYTES / 4;
constexpr int STAGE = THREADS * WORDS;

GF_DEVICE void fetch(float* stages, const float* row, int step) {
  const int at = gf::thread_index() * WORDS;
  if (step < STEPS) {
    gf::copy_async<BYTES>(stages + step % 2 * STAGE + at, row + step * STAGE + at);
  }
  gf::async_commit();
}

extern "C" GF_KERNEL(THREADS) async_copy(const float* input, float* output) {
  GF_DYNAMIC_SHARED(float, stages);
  gf::wait_for_previous_kernel();
  const float* const row = input + gf::i64(gf::block_index()) * STEPS * STAGE;
  const int other = (gf::thread_index() + 33) % THREADS;
  float sum[WORDS] = {};
  fetch(stages, row, 0);
  for (int step = 0; step < STEPS; ++step) {
    fetch(stages, row, step + 1);
    gf::async_wait<1>();
    gf::barrier();  // after write
    for (int i = 0; i < WORDS; ++i) {
      sum[i] += stages[step % 2 * STAGE + other * WORDS + i];
    }
    gf::barrier();  // before write
  }
  gf::async_wait<0>();
  gf::let_next_kernel_begin();
  for (int i = 0; i < WORDS; ++i) {
    output[gf::i64(gf::block_index()) * STAGE + other * WORDS + i] = sum[i];
  }
}
