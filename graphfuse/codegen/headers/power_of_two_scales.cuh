// Blocks of FP4 E2M1 with a scale in E8M0, a power of two: of 32 elements MXFP4 (OCP Microscaling Formats 1.0).
//
// scale = max|x| * (1 / 6) rounded up to a power of two, element = E2M1(x / scale), as encode_e2m1 says. A NaN makes
// the scale NaN and the elements +6.
#pragma once
#include "graphfuse/convert.cuh"
#include "graphfuse/platform.cuh"
#include "graphfuse/quantize.cuh"
#include "graphfuse/types.cuh"

namespace gf {

/// What store_blocks takes for E2M1 where scales are E8M0; for e2m1 itself they are E4M3.
struct e2m1_by_e8m0 {};

template <>
constexpr int bits_of<e2m1_by_e8m0> = bits_of<e2m1>;

template <>
GF_DEVICE u32 block_scale<e2m1_by_e8m0>(float amax) {
  return encode_e8m0_up(amax * (1.0f / 6.0f));
}

template <>
struct Blocks<e2m1_by_e8m0> {
  using Scale = u8;

  template <int COUNT>
  GF_DEVICE static Bytes<COUNT / 2> quantized(const float (&values)[COUNT], u32 scale) {
    constexpr int PER_WORD = COUNT < 8 ? COUNT : 8;
    const float inverse = reciprocal_of_e8m0(scale);
    Bytes<COUNT / 2> chunk = {};
#pragma unroll
    for (int word = 0; word < COUNT / PER_WORD; ++word) {
      float part[PER_WORD];
#pragma unroll
      for (int i = 0; i < PER_WORD; ++i) {
        part[i] = values[word * PER_WORD + i] * inverse;  // here: the largest inverses are no factor for encode_e2m1
      }
      chunk.word[word] = scale == 0xffu ? 0x77777777u : encode_e2m1(part, 1.0f);
    }
    return chunk;
  }
};

}  // namespace gf
