// Each CTA adds up rows that one thread has brought to two stages of shared memory.
#include "graphfuse/bulk_copy.cuh"
#include "graphfuse/simt.cuh"
#include "generated.cuh"

struct Shared {
  alignas(16) float stages[2][COLUMNS];
  gf::Mbarrier arrived[2];
};

GF_DEVICE void fetch(Shared& shared, const float* input, int row) {
  gf::Mbarrier& arrived = shared.arrived[row % 2];
  arrived.arrive_expect(COLUMNS * 4);
  gf::bulk_load(shared.stages[row % 2], input + row * COLUMNS, COLUMNS * 4, arrived);
}

extern "C" GF_KERNEL(THREADS) bulk_copy(const float* input, float* output, int rows) {
  GF_DYNAMIC_SHARED(Shared, shared);
  const bool fetches = gf::thread_index() == 0;
  input += gf::i64(gf::block_index()) * rows * COLUMNS;
  if (fetches) {
    shared->arrived[0].init(1);
    shared->arrived[1].init(1);
    gf::mbarrier_fence_init();
  }
  gf::barrier();  // after init
  if (fetches && rows > 0) {
    fetch(*shared, input, 0);
  }
  float sum[(COLUMNS + THREADS - 1) / THREADS] = {};
  for (int row = 0; row < rows; ++row) {
    if (fetches && row + 1 < rows) {
      fetch(*shared, input, row + 1);
    }
    shared->arrived[row % 2].wait(row / 2 % 2);
    for (int i = 0; i * THREADS + int(gf::thread_index()) < COLUMNS; ++i) {
      sum[i] += shared->stages[row % 2][i * THREADS + gf::thread_index()];
    }
    gf::barrier();  // before refill
  }
  for (int i = 0; i * THREADS + int(gf::thread_index()) < COLUMNS; ++i) {
    output[gf::i64(gf::block_index()) * COLUMNS + i * THREADS + gf::thread_index()] = sum[i];
  }
}
