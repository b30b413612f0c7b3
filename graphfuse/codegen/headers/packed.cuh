// Arithmetic on packed elements of 16 bits, two an instruction. Each result is rounded once, and zeros keep their signs.
#pragma once
#include "graphfuse/convert.cuh"
#include "graphfuse/platform.cuh"
#include "graphfuse/types.cuh"

namespace gf {

constexpr u32 SIGNS = 0x80008000u;  // of two elements: two of -0
template <class T>
constexpr u32 ONES = 0;
template <>
constexpr u32 ONES<bf16> = 0x3f803f80u;
template <>
constexpr u32 ONES<half> = 0x3c003c00u;

template <class T>
GF_DEVICE u32 fma_pair(u32 x, u32 y, u32 z);

#ifdef __CUDA_ARCH__

template <>
GF_DEVICE u32 fma_pair<bf16>(u32 x, u32 y, u32 z) {
  u32 made;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(made) : "r"(x), "r"(y), "r"(z));
  return made;
}

template <>
GF_DEVICE u32 fma_pair<half>(u32 x, u32 y, u32 z) {
  u32 made;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(made) : "r"(x), "r"(y), "r"(z));
  return made;
}

#else

/// One of the product and the sum is exact in float32.
template <class T>
GF_DEVICE u32 fma_pair(u32 x, u32 y, u32 z) {
  const float low = decode<T>(x) * decode<T>(y) + decode<T>(z);
  const float high = decode<T>(x >> 16) * decode<T>(y >> 16) + decode<T>(z >> 16);
  return encode_pair<T>(low, high);
}

#endif

template <class T, int COUNT>
GF_DEVICE Bytes<COUNT> fma_pairs(const Bytes<COUNT>& x, const Bytes<COUNT>& y, const Bytes<COUNT>& z) {
  Bytes<COUNT> made;
#pragma unroll
  for (int i = 0; i < (COUNT + 3) / 4; ++i) {
    made.word[i] = fma_pair<T>(x.word[i], y.word[i], z.word[i]);
  }
  return made;
}

template <int COUNT>
GF_DEVICE Bytes<COUNT> every(u32 pair) {
  Bytes<COUNT> made;
#pragma unroll
  for (int i = 0; i < (COUNT + 3) / 4; ++i) {
    made.word[i] = pair;
  }
  return made;
}

template <class T, int COUNT>
GF_DEVICE Bytes<COUNT> products(const Bytes<COUNT>& a, const Bytes<COUNT>& b) {
  return fma_pairs<T>(a, b, every<COUNT>(SIGNS));
}

template <class T, int COUNT>
GF_DEVICE Bytes<COUNT> sums(const Bytes<COUNT>& a, const Bytes<COUNT>& b) {
  return fma_pairs<T>(a, every<COUNT>(ONES<T>), b);
}

template <class T, int COUNT>
GF_DEVICE Bytes<COUNT> differences(const Bytes<COUNT>& a, const Bytes<COUNT>& b) {
  return fma_pairs<T>(b, every<COUNT>(ONES<T> ^ SIGNS), a);
}

}  // namespace gf
