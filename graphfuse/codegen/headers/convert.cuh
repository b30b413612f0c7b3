// Between float and the storage types: rounding to nearest, ties to even.
//
// FP8 and FP4 saturate, infinities included. NaN becomes 0x7fff (bf16, half) or 0x7f (FP8).
// Where the chip has a conversion instruction it is used; the code elsewhere gives the same
// bits, but for FP4, which encode_e2m1 tells about.
#pragma once
#include "graphfuse/platform.cuh"
#include "graphfuse/types.cuh"

#ifdef __CUDA_ARCH__
#if __CUDA_ARCH__ >= 890
#define GF_HARDWARE_FP8
#endif
// FP4 conversion is not part of the plain targets, only of the arch and family specific ones.
#if defined(__CUDA_ARCH_FEAT_SM100_ALL) || defined(__CUDA_ARCH_FEAT_SM103_ALL) || defined(__CUDA_ARCH_FEAT_SM120_ALL)
#define GF_HARDWARE_FP4
#elif defined(__CUDA_ARCH_SPECIFIC__) || defined(__CUDA_ARCH_FAMILY_SPECIFIC__)
#if __CUDA_ARCH__ >= 1000
#define GF_HARDWARE_FP4
#endif
#endif
#endif

namespace gf {

namespace software {

/// A finite magnitude, at most the format's largest value, rounded to its code: exponent and
/// mantissa bits. EXPONENT and MANTISSA are the widths of the fields (IEEE bias).
template <int EXPONENT, int MANTISSA>
GF_DEVICE u32 encode_magnitude(float magnitude) {
  constexpr u32 SMALLEST_NORMAL = u32(127 + 2 - (1 << (EXPONENT - 1))) << 23;
  // Adding a power of two whose last place is one code apart makes the float adder round,
  // subnormals of the format included.
  const u32 exponent = max(as_bits(magnitude) & 0x7f800000u, SMALLEST_NORMAL);
  const u32 anchor = exponent + (u32(23 - MANTISSA) << 23);
  const u32 places = as_bits(magnitude + as_float(anchor)) - anchor;
  return places + ((exponent - SMALLEST_NORMAL) >> (23 - MANTISSA));
}

/// The code with its sign in a format of 1 + EXPONENT + MANTISSA bits. Magnitudes beyond
/// `limit` become it; NaN becomes `nan`.
template <int EXPONENT, int MANTISSA>
GF_DEVICE u32 encode(float value, float limit, u32 nan) {
  constexpr int SIGN = EXPONENT + MANTISSA;
  const u32 code = encode_magnitude<EXPONENT, MANTISSA>(min_number(abs(value), limit));
  const u32 sign = (as_bits(value) >> (31 - SIGN)) & (1u << SIGN);
  return is_nan(value) ? nan : code | sign;
}

GF_DEVICE u32 encode_bf16(float value) {
  const u32 bits = as_bits(value);
  return is_nan(value) ? 0x7fffu : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}

GF_DEVICE u32 encode_half(float value) {
  // 65536 has the code that means infinity; what rounds to it overflows to infinity.
  return encode<5, 10>(value, 65536.0f, 0x7fffu);
}

GF_DEVICE u32 encode_e4m3(float value) { return encode<4, 3>(value, 448.0f, 0x7fu); }
GF_DEVICE u32 encode_e5m2(float value) { return encode<5, 2>(value, 57344.0f, 0x7fu); }

GF_DEVICE float decode_half(u32 bits) {
  // The fields of a half, placed in a float, are 2^112 too small; the product is exact.
  const float magnitude = as_float((bits & 0x7fffu) << 13) * 0x1p112f;
  const float special = as_float(0x7f800000u | ((bits & 0x3ffu) << 13));
  const float value = (bits & 0x7c00u) == 0x7c00u ? special : magnitude;
  return as_float(as_bits(value) | (bits & 0x8000u) << 16);
}

}  // namespace software

/// Two elements in storage form, `low` in the low bits.
template <class T>
GF_DEVICE u32 encode_pair(float low, float high);

template <>
GF_DEVICE u32 encode_pair<bf16>(float low, float high) {
#ifdef __CUDA_ARCH__
  u32 bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
#else
  return software::encode_bf16(low) | software::encode_bf16(high) << 16;
#endif
}

template <>
GF_DEVICE u32 encode_pair<half>(float low, float high) {
#ifdef __CUDA_ARCH__
  u32 bits;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
#else
  return software::encode_half(low) | software::encode_half(high) << 16;
#endif
}

template <>
GF_DEVICE u32 encode_pair<e4m3>(float low, float high) {
#ifdef GF_HARDWARE_FP8
  u16 bits;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bits) : "f"(high), "f"(low));
  return bits;
#else
  return software::encode_e4m3(low) | software::encode_e4m3(high) << 8;
#endif
}

template <>
GF_DEVICE u32 encode_pair<e5m2>(float low, float high) {
#ifdef GF_HARDWARE_FP8
  u16 bits;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(bits) : "f"(high), "f"(low));
  return bits;
#else
  return software::encode_e5m2(low) | software::encode_e5m2(high) << 8;
#endif
}

/// COUNT elements, 4 or 8, of value * factor as E2M1, the first in the low nibble. What NaN becomes, and the
/// bits above COUNT elements, are undefined.
///
/// Where there is no instruction, by way of E5M2. Its steps double every four codes and those of E2M1 every
/// two from 2 on: 4 + 2q up to q = 4 and 8 + q beyond runs through the eight codes from 4 to 14 as q runs
/// through those of E2M1, ties and saturation included. The sum rounds q, the exact product, to a multiple of
/// 2^-22 below 2, of 2^-21 below 4 and of 2^-20 beyond; the instruction does not, so that it rounds away from a
/// midpoint of two codes what is closer to it than half of that, and here it is a tie.
template <int COUNT>
GF_DEVICE u32 encode_e2m1(const float (&values)[COUNT], float factor) {
#ifdef GF_HARDWARE_FP4
  u32 codes = 0;
#pragma unroll
  for (int i = 0; i < COUNT; i += 2) {
    u16 pair;
    asm("{ .reg .b8 pair;\n\t"
        "cvt.rn.satfinite.e2m1x2.f32 pair, %1, %2;\n\t"
        "mov.b16 %0, {pair, 0}; }"
        : "=h"(pair)
        : "f"(values[i + 1] * factor), "f"(values[i] * factor));
    codes |= pair << 4 * i;
  }
  return codes;
#else
  constexpr float ONE = 4096.0f;  // makes 14 the largest finite number of E5M2
  constexpr u32 ZERO = 0x74747474u;  // the codes of 4
  const float once = factor * ONE, twice = once * 2.0f;
  float shifted[COUNT];
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    const float magnitude = abs(values[i]);
    shifted[i] = min_number(fma(magnitude, twice, 4.0f * ONE), fma(magnitude, once, 8.0f * ONE));
  }
  u32 even = 0, odd = 0, even_signs = 0, odd_signs = 0;
#pragma unroll
  for (int i = 0; i < COUNT; i += 4) {
    even |= encode_pair<e5m2>(shifted[i], shifted[i + 2]) << 4 * i;
    odd |= encode_pair<e5m2>(shifted[i + 1], shifted[i + 3]) << 4 * i;
    even_signs |= encode_pair<e5m2>(values[i], values[i + 2]) << 4 * i;
    odd_signs |= encode_pair<e5m2>(values[i + 1], values[i + 3]) << 4 * i;
  }
  return (even + 16 * odd - 17 * ZERO) | (even_signs >> 4 & 0x08080808u) | (odd_signs & 0x80808080u);
#endif
}

/// One element in storage form.
template <class T>
GF_DEVICE u32 encode(float value) {
  if constexpr (is_same_float<T>) {
    u32 bits = as_bits(value);
#ifdef __CUDA_ARCH__
    asm("" : "+r"(bits));  // the compiler would split a wide store of words that it knows to be floats
#endif
    return bits;
  } else {
    return encode_pair<T>(value, 0.0f) & ((1u << bits_of<T>) - 1);
  }
}

/// The float that the low bits of `bits` stand for. Bits above the element are ignored.
template <class T>
GF_DEVICE float decode(u32 bits);

template <>
GF_DEVICE float decode<float>(u32 bits) {
  return as_float(bits);
}

template <>
GF_DEVICE float decode<bf16>(u32 bits) {
  return as_float(bits << 16);
}

template <>
GF_DEVICE float decode<half>(u32 bits) {
#ifdef __CUDA_ARCH__
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(u16(bits)));
  return value;
#else
  return software::decode_half(bits & 0xffffu);
#endif
}

template <>
GF_DEVICE float decode<e4m3>(u32 bits) {
#ifdef GF_HARDWARE_FP8
  u32 halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(u16(bits)));
  return decode<half>(halves);
#else
  // As decode_half, from 2^120; the one code that is NaN stays NaN.
  const float magnitude = (bits & 0x7fu) == 0x7fu ? as_float(0x7fffffffu) : as_float((bits & 0x7fu) << 20) * 0x1p120f;
  return as_float(as_bits(magnitude) | (bits & 0x80u) << 24);
#endif
}

template <>
GF_DEVICE float decode<e5m2>(u32 bits) {
  return decode<half>((bits & 0xffu) << 8);
}

template <>
GF_DEVICE float decode<bool>(u32 bits) {
  return (bits & 0xffu) != 0u ? 1.0f : 0.0f;
}

/// `value` rounded to what T holds.
template <class T>
GF_DEVICE float rounded(float value) {
  return decode<T>(encode<T>(value));
}

/// The upper half of a pair is that of a float.
template <>
GF_DEVICE float rounded<bf16>(float value) {
  return as_float(encode_pair<bf16>(0.0f, value));
}

/// The code in E8M0 of the smallest power of two that it has and that is not below `value`, which is not negative; NaN stays NaN.
GF_DEVICE u32 encode_e8m0_up(float value) {
  const u32 bits = as_bits(value);
  const u32 exponent = bits >> 23;
  const u32 half_way = exponent == 0 ? 0x400000u : 0u;  // code 0 is 2^-127, half of the smallest normal number
  const u32 code = exponent + ((bits & 0x7fffffu) > half_way ? 1u : 0u);
  return is_nan(value) ? 0xffu : code > 254u ? 254u : code;
}

/// 1 / what the code of an E8M0 means, which float32 holds exactly.
GF_DEVICE float reciprocal_of_e8m0(u32 code) {
  return as_float(code == 0xffu ? 0x7fc00000u : code == 254u ? 0x400000u : (254u - code) << 23);
}

/// COUNT elements out of a chunk of a row.
template <class T, int COUNT>
GF_DEVICE void unpack(const Bytes<COUNT * bits_of<T> / 8>& chunk, float (&values)[COUNT]) {
  constexpr int PER_WORD = 32 / bits_of<T>;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    values[i] = decode<T>(chunk.word[i / PER_WORD] >> (i % PER_WORD * bits_of<T>));
  }
}

/// A chunk of a row out of COUNT elements.
template <class T, int COUNT>
GF_DEVICE Bytes<COUNT * bits_of<T> / 8> pack(const float (&values)[COUNT]) {
  Bytes<COUNT * bits_of<T> / 8> chunk = {};
  constexpr int PER_WORD = 32 / bits_of<T>;
  if constexpr (COUNT % 2 == 0 && !is_same_float<T>) {
#pragma unroll
    for (int i = 0; i < COUNT; i += 2) {
      chunk.word[i / PER_WORD] |= encode_pair<T>(values[i], values[i + 1]) << (i % PER_WORD * bits_of<T>);
    }
  } else {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      chunk.word[i / PER_WORD] |= encode<T>(values[i]) << (i % PER_WORD * bits_of<T>);
    }
  }
  return chunk;
}

}  // namespace gf
