// What differs between a GPU compiler and a plain C++ one: qualifiers, bit casts, fused multiply-add.
// Needs no header of the system's.
#pragma once
#include "graphfuse/host.cuh"

// GF_GPU_OR_CPU: the first of two expressions or asm statements on a GPU, the second on a CPU.
#ifdef __CUDACC__
#define GF_DEVICE __device__ __forceinline__
#define GF_KERNEL(threads) __global__ void __launch_bounds__(threads)
#define GF_GPU_OR_CPU(gpu, cpu) gpu
#else
// GF_INLINED: every call becomes a part of the kernel, as on a GPU.
#ifdef GF_INLINED
#define GF_DEVICE inline __attribute__((always_inline))
#else
#define GF_DEVICE inline
#endif
#define GF_KERNEL(threads) void
#define GF_GPU_OR_CPU(gpu, cpu) cpu
#endif

// On a CPU, functions whose misuse is reported take the place of their call as a last parameter, which
// callers leave out: GF_SITE after other parameters, GF_SITE_ONLY where there are none. Those that call
// one another hand it on with GF_FROM or GF_FROM_ONLY. Nothing on a GPU.
#ifdef __CUDACC__
#define GF_SITE
#define GF_SITE_ONLY
#define GF_FROM
#define GF_FROM_ONLY
#else
#define GF_SITE , gf::Site site = gf::Site::here()
#define GF_SITE_ONLY gf::Site site = gf::Site::here()
#define GF_FROM , site
#define GF_FROM_ONLY site
#endif

namespace gf {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

GF_DEVICE u32 as_bits(float value) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(value);
#else
  u32 bits;
  __builtin_memcpy(&bits, &value, 4);
  return bits;
#endif
}

GF_DEVICE float as_float(u32 bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
#endif
}

/// a * b + c rounded once. Kernels are compiled without contraction, so this is the only fused form.
GF_DEVICE float fma(float a, float b, float c) { return GF_GPU_OR_CPU(__fmaf_rn(a, b, c), __builtin_fmaf(a, b, c)); }

GF_DEVICE float abs(float value) { return GF_GPU_OR_CPU(fabsf(value), __builtin_fabsf(value)); }

/// The smaller of the two, or the one that is not NaN.
GF_DEVICE float min_number(float a, float b) { return GF_GPU_OR_CPU(fminf(a, b), __builtin_fminf(a, b)); }

GF_DEVICE bool is_nan(float value) { return value != value; }

GF_DEVICE constexpr u32 max(u32 a, u32 b) { return a > b ? a : b; }

}  // namespace gf
