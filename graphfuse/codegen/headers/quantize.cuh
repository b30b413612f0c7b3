// NVFP4: blocks of 16 FP4 E2M1 elements with one FP8 E4M3 scale.
//
// scale = E4M3(max|x| * (1 / 6)), element = E2M1(x * (1 / scale as stored)), inverses and products rounded
// to float32, elements then as encode_e2m1 says. A scale that rounds to zero makes the block zero; a NaN
// makes the scale NaN and the elements +6.
#pragma once
#include "graphfuse/convert.cuh"
#include "graphfuse/math.cuh"
#include "graphfuse/platform.cuh"
#include "graphfuse/types.cuh"

namespace gf {

/// The largest magnitude of `values`; NaN if one is NaN.
template <int COUNT, int FIRST = 0, int STRIDE = 1>
GF_DEVICE float max_magnitude(const float (&values)[COUNT]) {
  if constexpr (FIRST + STRIDE < COUNT) {
    return max(max_magnitude<COUNT, FIRST, 2 * STRIDE>(values), max_magnitude<COUNT, FIRST + STRIDE, 2 * STRIDE>(values));
  } else {
    return abs(values[FIRST]);
  }
}

/// The E4M3 code of the scale for a block whose largest magnitude is amax.
GF_DEVICE u32 block_scale(float amax) { return encode<e4m3>(amax * (1.0f / 6.0f)); }

/// COUNT elements of a block as E2M1, for a scale by its E4M3 code, which is neither 0 nor NaN.
template <int COUNT>
GF_DEVICE Bytes<COUNT / 2> quantize_block(const float (&values)[COUNT], u32 scale_code) {
  constexpr int PER_WORD = COUNT < 8 ? COUNT : 8;
  const float scale = decode<e4m3>(scale_code);
  const float near = reciprocal_approx(scale);
  const float inverse = fma(near, fma(-near, scale, 1.0f), near);  // 1 / scale to the nearest float32
  Bytes<COUNT / 2> chunk = {};
#pragma unroll
  for (int word = 0; word < COUNT / PER_WORD; ++word) {
    float part[PER_WORD];
#pragma unroll
    for (int i = 0; i < PER_WORD; ++i) {
      part[i] = values[word * PER_WORD + i];
    }
    chunk.word[word] = encode_e2m1(part, inverse);
  }
  return chunk;
}

/// Whether a scale, by its E4M3 code, is neither 0 nor NaN.
GF_DEVICE bool is_usual_scale(u32 scale_code) { return decode<e4m3>(scale_code) > 0.0f; }

/// All elements of a block whose scale is zero or NaN: zero or +6.
template <int COUNT>
GF_DEVICE Bytes<COUNT / 2> constant_block(u32 scale_code) {
  Bytes<COUNT / 2> chunk = {};
#pragma unroll
  for (int word = 0; word < (COUNT + 7) / 8; ++word) {
    chunk.word[word] = scale_code == 0 ? 0u : 0x77777777u;
  }
  return chunk;
}

}  // namespace gf
