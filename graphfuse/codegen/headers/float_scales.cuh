// Blocks of FP8 with a scale in float32: of 128 elements what DeepSeek's models and DeepGEMM's products read.
//
// scale = max|x| * (1 / largest element), never below 2^-126, element = FP8(x * (1 / scale)). A NaN makes scale and
// elements NaN; an infinity makes the scale infinite, so that what is finite becomes zero and the infinity NaN.
// Inverses and products are rounded to float32.
#pragma once
#include "graphfuse/math.cuh"
#include "graphfuse/platform.cuh"
#include "graphfuse/quantize.cuh"
#include "graphfuse/types.cuh"

namespace gf {

// What store_blocks takes for FP8 where scales are float32; for e4m3 and e5m2 themselves they are E8M0.
struct e4m3_by_float {};
struct e5m2_by_float {};

template <>
constexpr int bits_of<e4m3_by_float> = bits_of<e4m3>;
template <>
constexpr int bits_of<e5m2_by_float> = bits_of<e5m2>;

template <>
struct Blocks<e4m3_by_float> : ScaledBlocks<e4m3, float> {};
template <>
struct Blocks<e5m2_by_float> : ScaledBlocks<e5m2, float> {};

/// The bits of a scale that has an inverse, and of infinity and NaN.
GF_DEVICE u32 float_scale(float scale) { return as_bits(max(scale, 0x1p-126f)); }

template <>
GF_DEVICE u32 block_scale<e4m3_by_float>(float amax) {
  return float_scale(amax * (1.0f / 448.0f));
}

template <>
GF_DEVICE u32 block_scale<e5m2_by_float>(float amax) {
  return float_scale(amax * (1.0f / 57344.0f));
}

}  // namespace gf
