// Between float and integers of 8 bits: rounding to nearest, ties to even. What is beyond their range becomes its end, NaN
// becomes 0.
#pragma once
#include "graphfuse/convert.cuh"
#include "graphfuse/platform.cuh"
#include "graphfuse/types.cuh"

namespace gf {

namespace software {

/// The low 8 bits of a whole number near `value`, between these.
GF_DEVICE u32 encode_integer(float value, float least, float most) {
  const float number = is_nan(value) ? 0.0f : value;
  const float bounded = -min_number(-min_number(number, most), -least);
  return as_bits(bounded + 0x1.8p23f) & 0xffu;  // of the sum the last digit is 1
}

}  // namespace software

template <>
GF_DEVICE u32 encode_pair<signed char>(float low, float high) {
#ifdef __CUDA_ARCH__
  u32 bits;
  asm("{ .reg .s32 low, high;\n\t"
      "cvt.rni.s32.f32 low, %1;\n\t"
      "cvt.rni.s32.f32 high, %2;\n\t"
      "cvt.pack.sat.s8.s32.b32 %0, high, low, 0; }"
      : "=r"(bits)
      : "f"(low), "f"(high));
  return bits;
#else
  return software::encode_integer(low, -128.0f, 127.0f) | software::encode_integer(high, -128.0f, 127.0f) << 8;
#endif
}

template <>
GF_DEVICE u32 encode_pair<unsigned char>(float low, float high) {
#ifdef __CUDA_ARCH__
  u32 bits;
  asm("{ .reg .s32 low, high;\n\t"
      "cvt.rni.s32.f32 low, %1;\n\t"
      "cvt.rni.s32.f32 high, %2;\n\t"
      "cvt.pack.sat.u8.s32.b32 %0, high, low, 0; }"
      : "=r"(bits)
      : "f"(low), "f"(high));
  return bits;
#else
  return software::encode_integer(low, 0.0f, 255.0f) | software::encode_integer(high, 0.0f, 255.0f) << 8;
#endif
}

template <>
GF_DEVICE float decode<signed char>(u32 bits) {
  return float(static_cast<signed char>(bits & 0xffu));
}

template <>
GF_DEVICE float decode<unsigned char>(u32 bits) {
  return float(bits & 0xffu);
}

}  // namespace gf
