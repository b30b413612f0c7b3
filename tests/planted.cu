// One bug for each tool of the compute-sanitizer, so that a tool that finds nothing elsewhere is known to look.
// 64 threads; memory holds 64 words that nothing wrote.
extern "C" __global__ void memcheck(unsigned* memory) { memory[threadIdx.x + 1] = 1u; }  // the last one is outside

extern "C" __global__ void racecheck(unsigned* memory) {
  __shared__ unsigned shared[64];
  shared[threadIdx.x] = threadIdx.x;  // and no barrier
  memory[threadIdx.x] = shared[63 - threadIdx.x];
}

extern "C" __global__ void initcheck(unsigned* memory) {
  const unsigned value = memory[63 - threadIdx.x];
  __syncthreads();
  memory[threadIdx.x] = value + 1u;
}

extern "C" __global__ void synccheck(unsigned* memory) {
  __shared__ unsigned shared[64];
  shared[threadIdx.x] = threadIdx.x;
  if (threadIdx.x < 48) __syncthreads();  // part of a warp does not come
  memory[threadIdx.x] = shared[63 - threadIdx.x];
}
