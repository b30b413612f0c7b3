// Each cluster adds up rows: every CTA sends its part of a row to all, itself too, into one of two slots.
#include "graphfuse/send.cuh"
#include "graphfuse/simt.cuh"
#include "generated.cuh"

struct Slot {
  gf::Mbarrier arrived;
  float parts[CTAS][THREADS];
};

extern "C" GF_KERNEL(THREADS) send(const float* input, float* output, int rows) {
  GF_SHARED(Slot, slots, 2);
  const gf::u32 rank = gf::cluster_rank();
  const gf::u32 thread = gf::thread_index();
  if (thread == 0) {
    slots[0].arrived.init(1);
    slots[1].arrived.init(1);
    gf::mbarrier_fence_init();
  }
  gf::cluster_arrive_relaxed();
  gf::cluster_wait();
  const gf::i64 first = gf::i64(gf::block_index()) * rows * THREADS + thread;
  for (int row = 0; row < rows; ++row) {
    Slot& slot = slots[row % 2];
    if (thread == 0) {
      slot.arrived.arrive_expect(sizeof(slot.parts));
    }
    for (gf::u32 to = 0; to < CTAS; ++to) {
      gf::send(input[first + row * THREADS], &slot.parts[rank][thread], slot.arrived, to);
    }
    slot.arrived.wait(row / 2 % 2);
    float sum = 0.0f;
    for (int cta = 0; cta < CTAS; ++cta) {
      sum += slot.parts[cta][thread] * float(cta + 1);
    }
    output[first + row * THREADS] = sum;
  }
}
