"""The software conversions against ml_dtypes and numpy, over every upper half of a float and what decides ties."""

import ctypes

import ml_dtypes
import numpy as np
import pytest

from graphfuse import data_type
from support import oracle, small_integers

SOURCE = """
#include "graphfuse/convert.cuh"
#include "graphfuse/quantize.cuh"
#include "graphfuse/small_integers.cuh"
#define ENCODE(type)                                                        \\
  extern "C" void encode_##type(const float* in, gf::u32* out, long count) { \\
    for (long i = 0; i < count; ++i) out[i] = gf::encode<gf::type>(in[i]);    \\
  }
ENCODE(bf16) ENCODE(half) ENCODE(e4m3) ENCODE(e5m2)
#define DECODE(type)                                                        \\
  extern "C" void decode_##type(const gf::u32* in, float* out, long count) { \\
    for (long i = 0; i < count; ++i) out[i] = gf::decode<gf::type>(in[i]);    \\
  }
DECODE(bf16) DECODE(half) DECODE(e4m3)
template <class T, int COUNT>
void pack(const float* in, gf::Bytes<COUNT * gf::bits_of<T> / 8>* out) {
  float values[COUNT];
  for (int i = 0; i < COUNT; ++i) values[i] = in[i];
  *out = gf::pack<T>(values);
}
#define INTEGER(name, type)                                                        \\
  extern "C" void encode_##name(const float* in, gf::u32* out, long count) {         \\
    for (long i = 0; i < count; ++i) out[i] = gf::encode<type>(in[i]);                \\
  }                                                                                  \\
  extern "C" void decode_##name(const gf::u32* in, float* out, long count) {         \\
    for (long i = 0; i < count; ++i) out[i] = gf::decode<type>(in[i] | 0xabcdef00u);  \\
  }                                                                                  \\
  extern "C" void pack_##name(const float* in, void* out) { pack<type, 8>(in, (gf::Bytes<8>*)out); }
INTEGER(int8, signed char) INTEGER(uint8, unsigned char)
extern "C" void pack_e4m3(const float* in, void* out) { pack<gf::e4m3, 8>(in, (gf::Bytes<8>*)out); }
extern "C" void pack_e5m2_odd(const float* in, void* out) { pack<gf::e5m2, 3>(in, (gf::Bytes<3>*)out); }
extern "C" void pack_half(const float* in, void* out) { pack<gf::half, 8>(in, (gf::Bytes<16>*)out); }
extern "C" void pack_bf16(const float* in, void* out) { pack<gf::bf16, 8>(in, (gf::Bytes<16>*)out); }
extern "C" void encode_e2m1(const float* in, gf::u32* out, long count) {
  for (long i = 0; i < count; ++i) {
    float eight[8] = {0, 0, 0, 0, 0, 0, 0, 0}, four[4] = {0, 0, 0, 0};
    eight[i % 8] = four[i % 4] = in[i];
    const gf::u32 code = gf::encode_e2m1(eight, 1.0f), same = gf::encode_e2m1(four, 1.0f) & 0xffffu;
    out[i] = code >> 4 * (i % 8);
    if (code != out[i] << 4 * (i % 8) || same != out[i] << 4 * (i % 4)) out[i] = ~0u;  // the others stay zero
  }
}
template <int COUNT>
gf::u32 block(const float (&values)[COUNT], gf::u32 scale, int word) {
  const auto made = gf::is_usual_scale(scale) ? gf::quantize_block(values, scale) : gf::constant_block<COUNT>(scale);
  return made.word[word];
}
extern "C" void quantize(const float* in, gf::u32* scale, gf::u32* codes, long blocks) {
  for (long i = 0; i < blocks; ++i) {
    float low[8], high[8];
    for (int k = 0; k < 8; ++k) low[k] = in[16 * i + k], high[k] = in[16 * i + 8 + k];
    scale[i] = gf::block_scale<gf::e2m1>(gf::max(gf::max_magnitude(low), gf::max_magnitude(high)));
    codes[2 * i] = block(low, scale[i], 0);
    codes[2 * i + 1] = block(high, scale[i], 0);
  }
}
// The same with 16 elements to a thread, and with 4.
extern "C" void quantize_16(const float* in, gf::u32* scale, gf::u32* codes, long blocks) {
  for (long i = 0; i < blocks; ++i) {
    float all[16];
    for (int k = 0; k < 16; ++k) all[k] = in[16 * i + k];
    scale[i] = gf::block_scale<gf::e2m1>(gf::max_magnitude(all));
    codes[2 * i] = block(all, scale[i], 0);
    codes[2 * i + 1] = block(all, scale[i], 1);
  }
}
extern "C" void quantize_4(const float* in, gf::u32* scale, gf::u32* codes, long blocks) {
  for (long i = 0; i < blocks; ++i) {
    float part[4][4], amax = 0.0f;
    for (int k = 0; k < 16; ++k) part[k / 4][k % 4] = in[16 * i + k];
    for (int k = 0; k < 4; ++k) amax = gf::max(amax, gf::max_magnitude(part[k]));
    scale[i] = gf::block_scale<gf::e2m1>(amax);
    for (int k = 0; k < 2; ++k) {
      codes[2 * i + k] = (block(part[2 * k], scale[i], 0) & 0xffffu) | block(part[2 * k + 1], scale[i], 0) << 16;
    }
  }
}
extern "C" void encode_e8m0_up(const float* in, gf::u32* out, long count) {
  for (long i = 0; i < count; ++i) out[i] = gf::encode_e8m0_up(in[i]);
}
extern "C" void reciprocal_of_e8m0(const gf::u32* in, float* out, long count) {
  for (long i = 0; i < count; ++i) out[i] = gf::reciprocal_of_e8m0(in[i]);
}
template <class T>
void quantize_mx(const float* in, gf::u32* scale, gf::Bytes<8>* codes, long blocks) {
  for (long i = 0; i < blocks; ++i) {
    float part[4][8], amax = 0.0f;
    for (int k = 0; k < 32; ++k) part[k / 8][k % 8] = in[32 * i + k];
    for (int k = 0; k < 4; ++k) amax = gf::max(amax, gf::max_magnitude(part[k]));
    scale[i] = gf::block_scale<T>(amax);
    for (int k = 0; k < 4; ++k) codes[4 * i + k] = gf::Blocks<T>::quantized(part[k], scale[i]);
  }
}
extern "C" void quantize_e4m3(const float* in, gf::u32* scale, void* codes, long blocks) {
  quantize_mx<gf::e4m3>(in, scale, (gf::Bytes<8>*)codes, blocks);
}
extern "C" void quantize_e5m2(const float* in, gf::u32* scale, void* codes, long blocks) {
  quantize_mx<gf::e5m2>(in, scale, (gf::Bytes<8>*)codes, blocks);
}
"""

FORMATS = {
    "bf16": (ml_dtypes.bfloat16, 16, None, 0x7FFF),
    "half": (np.float16, 16, None, 0x7FFF),
    "e4m3": (ml_dtypes.float8_e4m3fn, 8, 448.0, 0x7F),
    "e5m2": (ml_dtypes.float8_e5m2, 8, 57344.0, 0x7F),
}


@pytest.fixture(scope="module")
def library(host_library):
    return host_library(SOURCE)


def through(function, values: np.ndarray, dtype) -> np.ndarray:
    out = np.empty(values.shape, dtype)
    function(values.ctypes.data_as(ctypes.c_void_p), out.ctypes.data_as(ctypes.c_void_p), ctypes.c_long(values.size))
    return out


def floats() -> np.ndarray:
    """All 2^16 upper halves with lower halves that decide ties, and a random sample of the rest."""
    upper = np.arange(2**16, dtype=np.uint32) << 16
    lower = np.array([0, 1, 0x0FFF, 0x1000, 0x1001, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    drawn = np.random.default_rng(0).integers(0, 2**32, 2**20, dtype=np.uint32)
    return np.concatenate([(upper[:, None] | lower).ravel(), drawn]).view(np.float32)


@pytest.mark.parametrize("name", FORMATS)
def test_encode(library, name):
    dtype, bits, limit, nan = FORMATS[name]
    values = floats()
    with np.errstate(over="ignore", invalid="ignore"):
        bounded = values if limit is None else np.clip(values, -limit, limit)
        expected = bounded.astype(dtype).view(np.uint16 if bits == 16 else np.uint8).astype(np.uint32)
    expected &= (1 << bits) - 1
    expected[np.isnan(values)] = nan
    np.testing.assert_array_equal(through(library[f"encode_{name}"], values, np.uint32), expected)


def test_encode_e2m1(library):
    values = floats()
    values = values[~np.isnan(values)]
    with np.errstate(over="ignore"):
        expected = np.clip(oracle.kept_places(values), -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
    np.testing.assert_array_equal(through(library.encode_e2m1, values, np.uint32), expected)


@pytest.mark.parametrize(
    "name, value, code",
    [
        ("bf16", np.inf, 0x7F80),
        ("bf16", 3.4028235e38, 0x7F80),
        ("half", 65519.996, 0x7BFF),
        ("half", 65520.0, 0x7C00),
        ("half", -np.inf, 0xFC00),
        ("half", 2.0**-25, 0),
        ("half", 2.0**-25 * 1.0001, 1),
        ("e4m3", np.inf, 0x7E),
        ("e4m3", -1e9, 0xFE),
        ("e4m3", 2.0**-10, 0),
        ("e4m3", 2.0**-10 * 1.0001, 1),
        ("e5m2", np.inf, 0x7B),
        ("e5m2", -61440.0, 0xFB),
        ("e2m1", 5.0, 6),
        ("e2m1", 5.0001, 7),
        ("e2m1", 0.25, 0),
        ("e2m1", -0.25, 8),
        ("e2m1", 2.5, 4),
        ("e2m1", -np.inf, 15),
        ("e2m1", -0.0, 8),
        ("e2m1", 0.25 + 2.0**-24, 0),  # nearer to 1/4 than the places that are kept
        ("e2m1", 0.25 + 2.0**-22, 1),
        ("e2m1", 5.0 - 2.0**-20, 6),
        ("e4m3", -np.nan, 0x7F),
        ("e5m2", np.nan, 0x7F),
        ("bf16", -np.nan, 0x7FFF),
        ("half", np.nan, 0x7FFF),
    ],
)
def test_boundaries(library, name, value, code):
    assert through(library[f"encode_{name}"], np.array([value], np.float32), np.uint32)[0] == code


@pytest.mark.parametrize("name", ["bf16", "half", "e4m3"])
def test_decode_is_exact_for_every_code(library, name):
    dtype, bits, _, _ = FORMATS[name]
    codes = np.arange(1 << bits, dtype=np.uint32)
    expected = codes.astype(np.uint16 if bits == 16 else np.uint8).view(dtype).astype(np.float32)
    found = through(library[f"decode_{name}"], codes, np.float32)
    np.testing.assert_array_equal(found, expected)
    numbers = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(found)[numbers], np.signbit(expected)[numbers])


@pytest.mark.parametrize("name, count", [("e4m3", 8), ("e5m2_odd", 3), ("half", 8), ("bf16", 8)])
def test_pack_puts_the_first_element_lowest(library, name, count):
    dtype, bits, _, _ = FORMATS[name.removesuffix("_odd")]
    values = np.array([0.5, -1.0, 2.0, 3.0, -4.0, 6.0, 0.0, 1.5], np.float32)[:count]
    codes = values.astype(dtype).view(np.uint16 if bits == 16 else np.uint8)
    out = np.zeros(16, np.uint8)
    library[f"pack_{name}"](values.ctypes.data_as(ctypes.c_void_p), out.ctypes.data_as(ctypes.c_void_p))
    assert out[: codes.nbytes].tobytes() == codes.tobytes()


@pytest.mark.parametrize("dtype", [data_type.INT8, data_type.UINT8])
def test_integers(library, dtype):
    values, name = np.concatenate([small_integers.values(), floats()]), dtype.facts.numpy
    want = small_integers.stored(values, dtype)
    np.testing.assert_array_equal(through(library[f"encode_{name}"], values, np.uint32), want.view(np.uint8))
    codes = np.arange(256, dtype=np.uint32)
    numbers = codes.astype(np.uint8).view(want.dtype)
    np.testing.assert_array_equal(through(library[f"decode_{name}"], codes, np.float32), numbers)
    out, eight = np.zeros(8, want.dtype), np.array([-300, -2, 2.5, 3.5, 99, 254, 1e9, np.nan], np.float32)
    library[f"pack_{name}"](eight.ctypes.data_as(ctypes.c_void_p), out.ctypes.data_as(ctypes.c_void_p))
    np.testing.assert_array_equal(out, small_integers.stored(eight, dtype))


def quantizer_inputs() -> np.ndarray:
    """Blocks of 16 with every E4M3 scale, elements on each midpoint and up to nine steps of float32 beside it, of
    both signs, and special values."""
    random = np.random.default_rng(1)
    scales = np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    midpoints = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
    ties = []
    for scale in scales:
        # Half of what is kept is up to four steps at 1/4, one at 5. Zero steps away is a tie, where the
        # product with 1 / scale is one.
        bits = (midpoints * scale).view(np.int32)[:, None] + np.arange(-9, 10, dtype=np.int32)
        around = np.where(scale > 0, np.maximum(bits, 0), np.arange(19)).astype(np.int32).view(np.float32).ravel()
        around = np.concatenate([around, -around, np.full(-2 * around.size % 15, -0.0, np.float32)]).reshape(-1, 15)
        ties.append(np.hstack([around, np.full((len(around), 1), -6 * scale)]))  # makes the scale what was meant
    edges = np.arange(1, 0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    halfway = ((edges[1:] + edges[:-1]) / 2 * np.float32(6)).astype(np.float32)
    edge_blocks = np.zeros((3 * halfway.size, 16), np.float32)
    edge_blocks[:, 3] = np.concatenate(
        [halfway, np.nextafter(halfway, np.float32(9e9)), np.nextafter(halfway, np.float32(0))]
    )
    values = [np.inf, -np.inf, np.nan, -np.nan, -0.0, 3e38, -3e38, 1e-45, -1e-45, 2688, 2689, 1e-3, -5e-4, 5.8e-3]
    special = np.zeros((2 * len(values), 16), np.float32)
    for i, value in enumerate(values):
        special[i, i] = value
        special[len(values) + i] = np.linspace(-3, 3, 16)  # the same beside usual elements
        special[len(values) + i, i] = value
    special[9, 3] = np.inf
    spread = random.standard_normal((20000, 16)) * np.exp2(random.integers(-30, 16, (20000, 1)))
    return np.concatenate([*ties, edge_blocks, special, spread.astype(np.float32)])


@pytest.mark.parametrize("function", ["quantize", "quantize_16", "quantize_4"])
def test_quantizer(library, function):
    blocks = quantizer_inputs()
    scale_bits = np.empty(len(blocks), np.uint32)
    words = np.empty((len(blocks), 2), np.uint32)
    pointers = [a.ctypes.data_as(ctypes.c_void_p) for a in (blocks, scale_bits, words)]
    library[function](*pointers, ctypes.c_long(len(blocks)))

    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        amax = np.abs(blocks).max(axis=1)
        scales = np.minimum(amax * (1 / np.float32(6)), np.float32(448)).astype(ml_dtypes.float8_e4m3fn)
        expected_scale = np.where(np.isnan(amax), 0x7F, scales.view(np.uint8))
        wide = scales.astype(np.float32)[:, None]
        scaled = np.where(wide == 0, np.float32(0), oracle.kept_places(blocks * (1 / wide).astype(np.float64)))
        codes = np.clip(scaled, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
    codes = np.where(np.isnan(scaled), 7, codes).astype(np.uint64).reshape(-1, 2, 8)
    expected_words = (codes << (4 * np.arange(8, dtype=np.uint64))).sum(axis=2).astype(np.uint32)
    np.testing.assert_array_equal(scale_bits, expected_scale)
    np.testing.assert_array_equal(words, expected_words)

    # The bound that the engine states: half the widest gap of E2M1, or what saturation cuts off.
    step = scales.astype(np.float64)
    exact = np.isfinite(amax)
    stored = np.clip(scaled, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float64) * step[:, None]
    error = np.abs(stored[exact] - blocks[exact]).max(axis=1)
    bound = np.maximum(step, amax.astype(np.float64) - 6 * step)[exact]
    assert (error <= bound * (1 + 1e-6)).all()
    assert (error >= bound * 0.99).any()  # the bound is reached


def test_e8m0_rounds_up_to_powers_of_two(library):
    powers = np.ldexp(1.0, np.arange(-149, 128)).astype(np.float32)
    values = [floats(), powers, np.nextafter(powers, np.float32(np.inf)), np.nextafter(powers, np.float32(0))]
    values = np.abs(np.concatenate(values))  # amaxes are not negative
    np.testing.assert_array_equal(through(library.encode_e8m0_up, values, np.uint32), oracle.e8m0(values))


def test_the_reciprocal_of_e8m0_is_exact(library):
    codes = np.arange(256, dtype=np.uint32)
    found = through(library.reciprocal_of_e8m0, codes, np.float32)
    np.testing.assert_array_equal(found[:255], np.ldexp(1.0, 127 - np.arange(255)).astype(np.float32))
    assert np.isnan(found[255])


def mx_inputs() -> np.ndarray:
    """Blocks of 32 with every scale there is, elements on and beside midpoints of both formats, and special values."""
    random = np.random.default_rng(2)
    probes = oracle.probes()
    probes = np.concatenate([probes, np.zeros(-probes.size % 31, np.float32)]).reshape(-1, 31)
    blocks = []
    for largest in (448.0, 57344.0):  # as they are: with scale 1
        near = np.where(np.abs(probes) <= largest, probes, np.float32(0.0))
        blocks.append(np.hstack([near, np.full((len(near), 1), largest, np.float32)]))
    amax = np.ldexp(random.uniform(1, 2, 278), np.arange(-149, 129))
    with np.errstate(over="ignore"):
        spread = (random.uniform(-1, 1, (len(amax), 32)) * amax[:, None]).astype(np.float32)
        spread[:, 7] = amax  # infinite in the last
    values = [0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 3.4e38, -3.4e38, 1e-45]
    special = np.zeros((2 * len(values), 32), np.float32)
    for i, value in enumerate(values):
        special[i, 3 * i] = value
        special[len(values) + i] = np.linspace(-3, 3, 32)
        special[len(values) + i, 3 * i] = value
    return np.concatenate([*blocks, spread, -spread, special]).astype(np.float32)


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_mx_quantizer(library, name):
    blocks = mx_inputs()
    scales, codes = np.empty(len(blocks), np.uint32), np.empty(blocks.shape, np.uint8)
    pointers = [a.ctypes.data_as(ctypes.c_void_p) for a in (blocks, scales, codes)]
    library[f"quantize_{name}"](*pointers, ctypes.c_long(len(blocks)))
    with np.errstate(over="ignore"):
        expected, expected_scales = oracle.mxfp8(blocks, name)
    np.testing.assert_array_equal(scales, expected_scales[:, 0])
    np.testing.assert_array_equal(codes, expected)
