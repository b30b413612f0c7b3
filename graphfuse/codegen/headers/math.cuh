// float32 functions of the op table and of normalization. Fast where the hardware approximates.
#pragma once
#include "graphfuse/platform.cuh"

// Of CUDA's own functions, sqrtf and the operator / are rounded to nearest, fmodf, ceilf and floorf exact, expf, logf,
// erff, expm1f and log1pf within 2 ulp, powf within 4.
#ifndef __CUDACC__
extern "C" {
float ceilf(float) noexcept;
float erff(float) noexcept;
float exp2f(float) noexcept;
float expf(float) noexcept;
float expm1f(float) noexcept;
float floorf(float) noexcept;
float fmodf(float, float) noexcept;
float log1pf(float) noexcept;
float logf(float) noexcept;
float powf(float, float) noexcept;
float sqrtf(float) noexcept;
float tanhf(float) noexcept;
}
#endif

namespace gf {

/// 2^x to 2 ulp. Results below 2^-126 are zero on a GPU.
GF_DEVICE float exp2_approx(float x) {
#ifdef __CUDA_ARCH__
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return exp2f(x);
#endif
}

/// 1 / x to 1 ulp. x and 1 / x must be normal numbers, zero, infinite or NaN.
GF_DEVICE float reciprocal_approx(float x) {
#ifdef __CUDA_ARCH__
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return 1.0f / x;
#endif
}

/// Whether ``quotient`` and ``narrow_quotient`` can divide by b.
GF_DEVICE bool has_reciprocal(float b) { return b >= 0x1p-62f && b <= 0x1p23f; }

/// 1 / b rounded to nearest, if there is a use for it, else NaN.
GF_DEVICE float reciprocal_of_divisor(float b) { return has_reciprocal(b) ? 1.0f / b : as_float(0x7fffffffu); }

/// a / b rounded to nearest, by that reciprocal: the second correction is of a quotient less than 1 ulp off, and exact
/// (Markstein's theorem). `exact` becomes false where a remainder, or the quotient, might not be a normal number.
GF_DEVICE float quotient(float a, float b, float reciprocal, bool& exact) {
  const float size = abs(a);
  exact &= (reciprocal == reciprocal) & (size <= 0x1p64f) & ((size >= 0x1p-102f) | (a == 0.0f));
  float q = a * reciprocal;
  q = fma(fma(q, b, -a), -reciprocal, q);  // so signed that -0 stays -0
  return fma(fma(q, b, -a), -reciprocal, q);
}

/// The largest number that is not above 1 / b, if there is a use for it.
GF_DEVICE float reciprocal_below(float b) {
  const float nearest = reciprocal_of_divisor(b);
  return fma(-b, nearest, 1.0f) < 0.0f ? as_float(as_bits(nearest) - 1) : nearest;
}

/// 1 / b less that, and no less than 2^-60 of it: infinity times both is infinity.
GF_DEVICE float reciprocal_rest(float b, float below) {
  const float rest = fma(-b, below, 1.0f) / b, least = below * 0x1p-60f;
  return rest > least ? rest : least;
}

/// What rounds to a type of up to 8 bits as a / b rounded to nearest does, if a has up to 11 bits: it is on the same side
/// of every number of 9 bits, if it is no smaller than 2^-106. `exact` becomes false where b has no such reciprocal.
GF_DEVICE float narrow_quotient(float a, float b, float below, float rest, bool& exact) {
  exact &= has_reciprocal(b);
  return fma(a, below, a * rest);
}

/// 1 / sqrt(x) to 2 ulp, subnormal x included.
GF_DEVICE float rsqrt(float x) {
#ifdef __CUDA_ARCH__
  float y;
  asm("rsqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return 1.0f / sqrtf(x);
#endif
}

/// The larger of the two, 0 being larger than -0; NaN if either is.
GF_DEVICE float max(float a, float b) {
#ifdef __CUDA_ARCH__
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
#else
  if (is_nan(a) || is_nan(b)) return as_float(0x7fffffffu);
  if (a == b) return as_float(as_bits(a) & as_bits(b));
  return a > b ? a : b;
#endif
}

/// The smaller of the two, -0 being smaller than 0; NaN if either is.
GF_DEVICE float min(float a, float b) {
#ifdef __CUDA_ARCH__
  float y;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
#else
  if (is_nan(a) || is_nan(b)) return as_float(0x7fffffffu);
  if (a == b) return as_float(as_bits(a) | as_bits(b));
  return a < b ? a : b;
#endif
}

/// 1 / (1 + e^-x). Relative error below 5e-7 + 8e-8 |x| for x >= -87, of which 7.3e-8 |x| are those of the exponent:
/// its rounding and that of log2 e. On a GPU zero from -87.4 on, where the result would be subnormal. No select,
/// so NaN and infinities pass through the arithmetic.
GF_DEVICE float sigmoid(float x) { return reciprocal_approx(1.0f + exp2_approx(x * -1.44269504088896341f)); }

/// tanh of a bfloat16 number, to the bit once it is rounded to bfloat16. Up to 0.0898 it is rounded to the number itself.
/// From 0.0903 on it is 12.7 2^-24 or more from where rounding changes, and the error is below 8 2^-24. NaN and
/// infinities pass through the arithmetic.
GF_DEVICE float tanh_of_bf16(float x) {
  const float far = fma(reciprocal_approx(1.0f + exp2_approx(x * 2.88539008f)), -2.0f, 1.0f);
  return abs(x) < 0.09f ? x : far;
}

/// min(x, upper) above lower, else lower + slope * (x - lower). NaN stays NaN.
GF_DEVICE float relu(float x, float slope, float lower, float upper) {
  // With slope 0 the product would turn an infinite x into NaN.
  const float below = slope == 0.0f ? max(x, lower) : lower + slope * (x - lower);
  return x > lower ? min(x, upper) : below;
}

/// x above zero, else alpha (e^x - 1).
GF_DEVICE float elu(float x, float alpha) { return x > 0.0f ? x : alpha * expm1f(x); }

/// log(1 + e^x), without the overflow of e^x.
GF_DEVICE float softplus(float x) { return max(x, 0.0f) + log1pf(expf(-abs(x))); }

// Sine, cosine and tangent. CUDA's own keep the digits of a large angle in local memory, which every kernel would
// reserve; these have them in registers.

/// An angle: quarter turns, of which only the last two bits are meant, and the rest, from -pi/4 to pi/4.
struct Angle {
  u32 quarters;
  float rest;
};

/// That of |x| >= 2^16, by Payne and Hanek: x is an integer m times a power of two, and of m 2/pi the digits from those
/// of weight 2 on are left. 62 of them are exact, of which a float has at most 30 zeros before the first other.
GF_DEVICE Angle far_angle(float x) {
  // 2/pi after 32 zeros.
  constexpr u32 DIGITS[8] = {0,           0xa2f9836eu, 0x4e441529u, 0xfc2757d1u,
                             0xf534ddc0u, 0xdb629599u, 0x3c439041u, 0xfe5163abu};
  const u32 exponent = (as_bits(x) >> 23) & 0xffu, m = (as_bits(x) & 0x7fffffu) | 0x800000u;
  if (exponent == 0xffu) return {0, x - x};
  const u32 first = exponent - 120;  // of the bits that count; x = m 2^(exponent - 150)
  u32 word[4];
#pragma unroll
  for (u32 i = 0; i < 5; i++) {
    if (first >> 5 == i) {
#pragma unroll
      for (u32 j = 0; j < 4; j++) word[j] = i + j < 8 ? DIGITS[i + j] : 0;
    }
  }
  u64 window[3];
#pragma unroll
  for (u32 j = 0; j < 3; j++) window[j] = u32(((u64(word[j]) << 32 | word[j + 1]) << (first & 31)) >> 32);
  const u64 low = window[2] * m, middle = window[1] * m + (low >> 32), high = window[0] * m + (middle >> 32);
  const u64 turns = high << 32 | u32(middle);  // in units of 2^-62 quarters
  const u32 quarters = u32((turns + (u64(1) << 61)) >> 62);
  const float rest = float(double(i64(turns << 2)) * 8.5153039502163873e-20);  // pi/2 2^-64
  return x < 0.0f ? Angle{0u - quarters, -rest} : Angle{quarters, rest};
}

/// Below 2^16 by three parts of pi/2, after Cody and Waite. The first has so few digits that its product is taken off
/// exactly; with all of them above zero, -0 stays -0.
GF_DEVICE Angle angle(float x) {
  if (!(abs(x) < 65536.0f)) return far_angle(x);
  const float shifted = fma(x, 0x1.45f306p-1f, 0x1.8p23f);  // the sum's last digit is 1
  const float quarters = shifted - 0x1.8p23f;
  float rest = fma(quarters, -0x1.921fb4p+0f, x);
  rest = fma(quarters, -0x1.4442dp-24f, rest);
  return {as_bits(shifted), fma(quarters, -0x1.84698ap-48f, rest)};
}

/// Of a rest, with a polynomial whose own relative error is 5e-9.
GF_DEVICE float sine_of_rest(float x) {
  const float square = x * x;
  const float sum = fma(fma(-1.9488727e-4f, square, 8.331961e-3f), square, -0.16666651f);
  return x * fma(sum, square, 1.0f);  // so formed that -0 stays -0
}

/// As that.
GF_DEVICE float cosine_of_rest(float x) {
  const float square = x * x;
  const float sum = fma(fma(2.4402797e-5f, square, -1.3887045e-3f), square, 4.1666642e-2f);
  return fma(fma(sum, square, -0.5f), square, 1.0f);
}

GF_DEVICE float sine(Angle of) {
  const float size = of.quarters & 1 ? cosine_of_rest(of.rest) : sine_of_rest(of.rest);
  return of.quarters & 2 ? -size : size;
}

/// Relative error below 3e-7, whatever x; NaN of infinities.
GF_DEVICE float sin(float x) { return sine(angle(x)); }

/// As sin.
GF_DEVICE float cos(float x) {
  const Angle of = angle(x);
  return sine({of.quarters + 1, of.rest});
}

/// Relative error below 5e-7, whatever x; NaN of infinities.
GF_DEVICE float tan(float x) {
  const Angle of = angle(x);
  const float sine = sine_of_rest(of.rest), cosine = cosine_of_rest(of.rest);
  return of.quarters & 1 ? -cosine / sine : sine / cosine;
}

// Backward of activations: loss times the slope at x. At an infinite x the slope is its limit; NaN stays NaN. Where a
// slope is a product of what grows and what vanishes, x is held within bounds beyond which what vanishes is zero.

/// sigmoid(x) and sigmoid(-x), from one exponential: 1 - sigmoid(x) would cancel.
struct Sigmoids {
  float plus, minus;
};

/// Both with sigmoid's relative error, and zero where that is.
GF_DEVICE Sigmoids sigmoids(float x) {
  const float power = exp2_approx(abs(x) * -1.44269504088896341f);
  const float large = reciprocal_approx(1.0f + power), small = power * large;
  return x < 0.0f ? Sigmoids{small, large} : Sigmoids{large, small};
}

/// Above lower and up to upper loss, below slope * loss, above zero: chosen, not multiplied, so that an infinite loss
/// leaves no NaN.
GF_DEVICE float relu_backward(float loss, float x, float slope, float lower, float upper) {
  const float below = slope == 0.0f ? 0.0f : slope * loss;
  return x > upper ? 0.0f : x > lower ? loss : x <= lower ? below : x;
}

/// Relative error below 1e-6 + 8e-8 |x| for |x| <= 87.
GF_DEVICE float sigmoid_backward(float loss, float x) {
  const float power = exp2_approx(abs(x) * -1.44269504088896341f);
  const float large = reciprocal_approx(1.0f + power), small = power * large;
  return loss * (large * small);  // whichever of the sigmoids of x and -x these are
}

/// The slope of x sigmoid(x), of which s are the sigmoids. Error below 1e-6 + 8e-8 |x| of sigmoid(x) (1 + |x sigmoid(-x)|)
/// for x >= -87.
GF_DEVICE float swish_backward(float loss, float x, Sigmoids s) {
  const float bounded = min(max(x, -1000.0f), 1000.0f);
  return loss * (s.plus * (1.0f + bounded * s.minus));
}

/// Above zero loss, chosen as by relu_backward, else loss alpha e^x.
GF_DEVICE float elu_backward(float loss, float x, float alpha) { return x > 0.0f ? loss : loss * (alpha * expf(x)); }

/// Of the normal distribution: e^(-x^2/2), and tail, how much of it lies beyond |x|.
struct Normal {
  float power, tail;
};

/// The tail's relative error is below 6e-7 + 6e-8 x^2; it is zero beyond |x| = 13. It is power times a polynomial in
/// 1 / (1 + 0.4 |x| / sqrt 2), of degree 9, fitted to (1 - Phi(|x|)) / power with a relative error of 1.3e-7.
GF_DEVICE Normal normal(float x) {
  const float power = exp2_approx(x * x * -0.72134752f);
  const float t = reciprocal_approx(fma(0.28284271f, abs(x), 1.0f));
  float sum = 0.025131069f;
  sum = fma(sum, t, -0.091450758f);
  sum = fma(sum, t, 0.084542751f);
  sum = fma(sum, t, -0.0028037962f);
  sum = fma(sum, t, 0.070715733f);
  sum = fma(sum, t, 0.084270983f);
  sum = fma(sum, t, 0.10392135f);
  sum = fma(sum, t, 0.11283480f);
  sum = fma(sum, t, 0.11283793f);
  return {power, power * t * sum};
}

/// x Phi(x): below zero x times the tail, above it x less that, so that nothing cancels.
GF_DEVICE float gelu(float x) {
  const float below = (x > 100.0f ? 100.0f : x) * normal(x).tail;
  return x < 0.0f ? below : x - below;
}

/// gelu of a bfloat16 number, to the bit once it is rounded to bfloat16; on a GPU -0 below -13.2. The polynomial is fitted
/// so that results stay 5e-6 of them away from where rounding changes; at t = 1 it is 0.5, which halves of the smallest
/// numbers need. NaN passes through the maximum.
GF_DEVICE float gelu_of_bf16(float x) {
  const float size = min_number(abs(x), 100.0f);
  const float power = exp2_approx(size * size * -0.72134752f);
  const float t = reciprocal_approx(fma(size, 0.36f, 1.0f));
  float sum = -0.09266436f;
  sum = fma(sum, t, 0.23709652f);
  sum = fma(sum, t, 0.054224674f);
  sum = fma(sum, t, 0.1589588f);
  sum = fma(sum, t, 0.14238437f);
  return fma(size * t * -sum, power, max(x, -0.0f));
}

/// Error below 2e-6 + 1e-7 x^2 of Phi(x) + |x phi(x)| for x >= -13.
GF_DEVICE float gelu_backward(float loss, float x) {
  const float bounded = min(max(x, -100.0f), 100.0f);
  const Normal n = normal(bounded);
  const float below = x < 0.0f ? n.tail : 1.0f - n.tail;
  return loss * (below + bounded * (0.398942280f * n.power));
}

/// The slope of x sigmoid(u), of which s are the sigmoids, with the u of the tanh form. Error below 2e-6 + 4e-7 |u| of
/// sigmoid(u) (1 + |x u' sigmoid(-u)|) for u >= -87.
GF_DEVICE float gelu_approx_tanh_backward(float loss, float x, Sigmoids s) {
  const float bounded = min(max(x, -100.0f), 100.0f);
  const float inner = bounded * (1.5957691216057308f + 0.2140644488178007f * bounded * bounded);  // x u'
  return loss * (s.plus * (1.0f + inner * s.minus));
}

/// Whether a random number of 16 bits is `least` or more, by Philox 4x32 of seven rounds, the fewest that pass its authors'
/// tests (Salmon et al., SC 2011). Neighbours, of which column / 8 is the same, have the halves of the words of one
/// counter, which a compiler works out once.
GF_DEVICE bool random_at_least(float seed, float offset, i64 row, i64 column, float least) {
  u32 c0 = u32(column) >> 3, c1 = u32(row), c2 = u32(u64(row) >> 32), c3 = 0;
  u32 key0 = u32(i64(seed)), key1 = u32(i64(offset));
#pragma unroll
  for (int round = 0; round < 7; round++) {
    const u64 product0 = u64(c0) * 0xD2511F53u, product1 = u64(c2) * 0xCD9E8D57u;
    c0 = u32(product1 >> 32) ^ c1 ^ key0;
    c1 = u32(product1);
    c2 = u32(product0 >> 32) ^ c3 ^ key1;
    c3 = u32(product0);
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  const u32 place = u32(column) >> 1 & 3;
  const u32 word = place < 2 ? (place == 0 ? c0 : c1) : (place == 2 ? c2 : c3);
  return (u32(column) & 1 ? word >> 16 : word & 0xFFFFu) >= u32(least);
}

}  // namespace gf
