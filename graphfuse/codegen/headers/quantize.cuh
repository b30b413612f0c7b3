// Blocks of elements that share a scale.
//
// NVFP4: 16 elements of FP4 E2M1, scale = E4M3(max|x| * (1 / 6)), element = E2M1(x * (1 / scale as stored)),
// elements then as encode_e2m1 says. A scale that rounds to zero makes the block zero; a NaN makes the scale
// NaN and the elements +6.
// MXFP8: 32 elements of FP8, scale = max|x| * (1 / largest element) rounded up to a power of two in E8M0,
// element = FP8(x / scale). A NaN makes scale and elements NaN.
// Inverses are rounded to float32, and products, but those that encode_e2m1 adds to.
#pragma once
#include "graphfuse/convert.cuh"
#include "graphfuse/math.cuh"
#include "graphfuse/platform.cuh"
#include "graphfuse/simt.cuh"
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

/// The largest of `values`; NaN if one is NaN.
template <int COUNT, int FIRST = 0, int STRIDE = 1>
GF_DEVICE float largest(const float (&values)[COUNT]) {
  if constexpr (FIRST + STRIDE < COUNT) {
    return max(largest<COUNT, FIRST, 2 * STRIDE>(values), largest<COUNT, FIRST + STRIDE, 2 * STRIDE>(values));
  } else {
    return values[FIRST];
  }
}

/// The code of the scale for a block of T whose largest magnitude is amax.
template <class T>
GF_DEVICE u32 block_scale(float amax);

template <>
GF_DEVICE u32 block_scale<e2m1>(float amax) {
  return encode<e4m3>(amax * (1.0f / 6.0f));
}

template <>
GF_DEVICE u32 block_scale<e4m3>(float amax) {
  return encode_e8m0_up(amax * (1.0f / 448.0f));
}

template <>
GF_DEVICE u32 block_scale<e5m2>(float amax) {
  return encode_e8m0_up(amax * (1.0f / 57344.0f));
}

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

/// 1 / what the code of a scale means: a byte of an E8M0, of a float32 its bits.
template <class Scale>
GF_DEVICE float reciprocal_of_scale(u32 code) {
  if constexpr (is_same_float<Scale>) {
    return 1.0f / as_float(code);
  } else {
    return reciprocal_of_e8m0(code);
  }
}

/// How blocks of FP8 are stored: COUNT elements of one, for the code of its scale.
template <class ELEMENT, class SCALE>
struct ScaledBlocks {
  using Scale = SCALE;

  template <int COUNT>
  GF_DEVICE static Bytes<COUNT> quantized(const float (&values)[COUNT], u32 scale) {
    const float inverse = reciprocal_of_scale<Scale>(scale);
    float scaled[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      scaled[i] = values[i] * inverse;
    }
    return pack<ELEMENT>(scaled);
  }
};

/// How blocks of T are stored: an element type by its usual scales, or a tag for both. All lanes of a warp call
/// `quantized` together.
template <class T>
struct Blocks : ScaledBlocks<T, u8> {};

template <>
struct Blocks<e2m1> {
  using Scale = u8;

  template <int COUNT>
  GF_DEVICE static Bytes<COUNT / 2> quantized(const float (&values)[COUNT], u32 scale) {
    const Bytes<COUNT / 2> elements = quantize_block(values, scale);
    // Asked of the warp, because a branch of each lane's own costs more.
    if (any_lane(!is_usual_scale(scale))) {
      return is_usual_scale(scale) ? elements : constant_block<COUNT>(scale);
    }
    return elements;
  }
};

}  // namespace gf
