// Each cluster adds up one row: its CTAs exchange partial sums through their shared memory, and each
// leaves its number in the memory of the next.
#include "graphfuse/cluster.cuh"
#include "graphfuse/simt.cuh"
#include "generated.cuh"

extern "C" GF_KERNEL(THREADS) cluster(const float* input, float* output, float* neighbours) {
  GF_SHARED(float, partial, THREADS);
  GF_DYNAMIC_SHARED(float, mailbox);
  const gf::u32 rank = gf::cluster_rank();
  const gf::u32 thread = gf::thread_index();
  partial[thread] = input[gf::i64(gf::block_index()) * THREADS + thread];
  gf::cluster_barrier();  // all have written
  float sum = 0.0f;
  for (gf::u32 other = 0; other < gf::cluster_size(); ++other) {
    sum += gf::map_shared(partial, other)[thread];
  }
  gf::map_shared(mailbox, (rank + 1) % gf::cluster_size())[thread] = float(rank);
  gf::cluster_arrive();
  output[gf::i64(gf::block_index()) * THREADS + thread] = sum;
  gf::cluster_wait();  // all have read
  neighbours[gf::i64(gf::block_index()) * THREADS + thread] = mailbox[thread];
}
