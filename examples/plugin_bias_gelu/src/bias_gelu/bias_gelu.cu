// gelu(x + bias): CTAs of THREADS threads, STEPS elements a thread. The prelude, generated.cuh, has these numbers and
// the types X, Bias, Output and Total.
#include "graphfuse/convert.cuh"
#include "graphfuse/math.cuh"
#include "graphfuse/simt.cuh"
#include "generated.cuh"

extern "C" GF_KERNEL(THREADS)
    bias_gelu_kernel(const X* x, const Bias* bias, Output* output, gf::i64 n, gf::i64 columns) {
  const gf::i64 first = gf::i64(gf::block_index()) * (THREADS * STEPS) + gf::thread_index();
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    const gf::i64 i = first + step * THREADS;
    if (i < n) {
      const float sum = gf::rounded<Total>(gf::scalar(x + i) + gf::scalar(bias + i % columns));
      const float result = gf::gelu(sum);
      gf::store<sizeof(Output), sizeof(Output)>(output + i, gf::Bytes<sizeof(Output)>{{gf::encode<Output>(result)}});
    }
  }
}
