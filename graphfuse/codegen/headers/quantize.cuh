// NVFP4: blocks of 16 FP4 E2M1 elements with one FP8 E4M3 scale.
//
// scale = E4M3(max|x| / 6), element = E2M1(x / scale as stored). A scale that rounds to zero
// makes the block zero; a NaN makes the scale NaN and the elements +6.
#pragma once
#include "graphfuse/convert.cuh"
#include "graphfuse/math.cuh"
#include "graphfuse/platform.cuh"
#include "graphfuse/types.cuh"

namespace gf {

/// The larger of `amax` and the magnitudes of `values`; NaN if one is NaN.
template <int COUNT>
GF_DEVICE float max_magnitude(const float (&values)[COUNT]) {
  float amax = 0.0f;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    amax = max(amax, abs(values[i]));
  }
  return amax;
}

/// x / divisor from inverse, which is 1 / divisor to 1 ulp: within 2^-44 before the last rounding.
///
/// That is enough to round on to a code as the IEEE quotient does: with a divisor of at most four
/// significant bits, a quotient is either a midpoint of two codes exactly or off it by half a
/// last place of float32 and more.
GF_DEVICE float quotient(float x, float divisor, float inverse) {
  const float near = x * inverse;
  const float excess = fma(near, divisor, -x);  // exact; +0 for either zero, which keeps the sign of near
  return fma(-excess, inverse, near);
}

/// The E4M3 code of the scale for a block whose largest magnitude is amax.
GF_DEVICE u32 block_scale(float amax) {
  // Everything from 448 * 6 on saturates; an infinite quotient would become NaN.
  return encode<e4m3>(quotient(min(amax, 4096.0f), 6.0f, 1.0f / 6.0f));
}

/// COUNT elements of a block as E2M1, for a scale by its E4M3 code.
template <int COUNT>
GF_DEVICE Bytes<COUNT / 2> quantize_block(const float (&values)[COUNT], u32 scale_code) {
  const float scale = decode<e4m3>(scale_code);
  const float inverse = reciprocal_approx(scale);
  float codes[COUNT];
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    codes[i] = values[i];
  }
  if (scale_code == 0x7eu) {  // 448: everything beyond 6 * 448 saturates; an infinite quotient would become NaN
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      codes[i] = max(min(values[i], 4096.0f), -4096.0f);
    }
  }
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    codes[i] = quotient(codes[i], scale, inverse);
  }
  Bytes<COUNT / 2> chunk = pack<e2m1>(codes);
#pragma unroll
  for (int i = 0; i < (COUNT + 7) / 8; ++i) {
    chunk.word[i] = scale_code == 0 ? 0u : chunk.word[i];
  }
  return chunk;
}

}  // namespace gf
