// Storage types. They hold bits and compute nothing; convert.cuh goes to and from float.
#pragma once
#include "graphfuse/platform.cuh"

namespace gf {

struct bf16 {
  u16 bits;
};
struct half {  // IEEE binary16
  u16 bits;
};
struct e4m3 {  // FP8 without infinities, largest 448
  u8 bits;
};
struct e5m2 {  // FP8 with infinities, largest finite 57344
  u8 bits;
};
struct e8m0 {  // powers of two from 2^-127 to 2^127, and NaN
  u8 exponent;
};
struct e2m1 {  // FP4, largest 6; two to a byte, the even element in the low nibble
  u8 pair;
};

template <class T>
constexpr int bits_of = 8 * sizeof(T);
template <>
constexpr int bits_of<e2m1> = 4;

template <class T>
constexpr bool is_same_float = false;
template <>
constexpr bool is_same_float<float> = true;

/// A number as a type: what tells functions of one name apart.
template <int NUMBER>
struct Number {};

/// COUNT bytes of a row as they are in memory, held in registers: byte i in word[i / 4].
template <int COUNT>
struct Bytes {
  u32 word[(COUNT + 3) / 4];
};

}  // namespace gf
