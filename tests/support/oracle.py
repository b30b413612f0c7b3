"""What results are held against: float64 references and quantizers that share nothing with the library.

The references are torch's own functions in float64. The quantizers exist twice: in numpy
with ml_dtypes, and as a search over the list of representable values that runs on any
torch device; test_oracle.py holds the two against each other.
"""

import warnings

import numpy as np
import torch
from torch.nn import functional

# References


def rmsnorm(x, weight, eps, bias=None, axes=(-1,)):
    """(Y, inverse RMS) in float64; `axes` are those normalized over. weight: None for 1."""
    x = x.double()
    inverse = 1 / torch.sqrt(x.square().mean(dim=axes, keepdim=True) + eps)
    y = x * inverse if weight is None else x * inverse * weight.double()
    return (y if bias is None else y + bias.double()), inverse


def rmsnorm_gradients(grad, x, weight, eps, axes=(-1,)):
    """(dx, dscale, dbias) in float64, by torch.autograd. weight: None for 1, which leaves the others out."""
    leaves = [t.double().detach().clone().requires_grad_() for t in (x, weight) if t is not None]
    if weight is not None:
        leaves.append(torch.zeros_like(leaves[1], requires_grad=True))
    y, _ = rmsnorm(leaves[0], None if weight is None else leaves[1], eps, *leaves[2:], axes=axes)
    return torch.autograd.grad(y, leaves, grad.double())


def rotated(x, cos, sin, interleaved=False):
    """Pairs of x's columns as complex numbers, each times that of its cosine and sine, in float64."""
    pairs, x = cos.shape[-1], x.double()
    turned, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    turned = turned.unflatten(-1, (pairs, 2) if interleaved else (2, pairs))
    turned = turned if interleaved else turned.transpose(-1, -2)
    turned = torch.complex(turned[..., 0], turned[..., 1]) * torch.complex(cos.double(), sin.double())
    turned = torch.stack((turned.real, turned.imag), -1)
    turned = turned if interleaved else turned.transpose(-1, -2)
    return torch.cat((turned.flatten(-2), rest), -1)


def swish(x, beta=1.0):
    x = x.double()
    return functional.silu(x) if beta == 1 else x * torch.special.expit(beta * x)


def softplus(x, beta=1.0):
    return torch.logaddexp(beta * x, torch.zeros_like(x)) / beta


def relu(x, negative_slope=0.0, lower_clip=0.0, upper_clip=float("inf")):
    x = x.double()
    below = (
        lower_clip + functional.leaky_relu(x - lower_clip, negative_slope)
        if negative_slope
        else x.clamp(min=lower_clip)
    )
    return torch.where(x > lower_clip, x.clamp(max=upper_clip), below)


def gradient(forward):
    """(loss, input, attributes of `forward`) -> the gradient with respect to input, by torch.autograd in float64."""

    def backward(loss, x, **attributes):
        loss, x = (t.double().detach() for t in torch.broadcast_tensors(loss, x))
        x = x.clone().requires_grad_()
        return torch.autograd.grad(forward(x, **attributes), x, loss)[0]

    return backward


def _clipped(x, negative_slope=0.0, lower_clip=0.0, upper_clip=float("inf")):
    # As relu, of torch's functions with a gradient: at lower_clip negative_slope, at upper_clip 1 (of torch's own
    # clamp 0 from 2.15 on).
    rectified, most = functional.leaky_relu(x - lower_clip, negative_slope), upper_clip - lower_clip
    return lower_clip + torch.where(rectified > most, most, rectified)


POINTWISE = {
    "add": lambda a, b: torch.add(a.double(), b.double()),
    "sub": lambda a, b: torch.sub(a.double(), b.double()),
    "mul": lambda a, b: torch.mul(a.double(), b.double()),
    "div": lambda a, b: torch.div(a.double(), b.double()),
    "scale": lambda a, b: torch.mul(a.double(), b.double()),
    "max": lambda a, b: torch.maximum(a.double(), b.double()),
    "min": lambda a, b: torch.minimum(a.double(), b.double()),
    "abs": lambda x: torch.abs(x.double()),
    "neg": lambda x: torch.neg(x.double()),
    "reciprocal": lambda x: 1 / x.double(),
    "sqrt": lambda x: torch.sqrt(x.double()),
    "rsqrt": lambda x: 1 / torch.sqrt(x.double()),
    "exp": lambda x: torch.exp(x.double()),
    "log": lambda x: torch.log(x.double()),
    "identity": lambda x: x.double(),
    "relu": relu,
    "sigmoid": lambda x: torch.special.expit(x.double()),
    "tanh": lambda x: torch.tanh(x.double()),
    "swish": lambda x, swish_beta=1.0: swish(x, swish_beta),
    "gelu": lambda x: functional.gelu(x.double()),
    "gelu_approx_tanh": lambda x: functional.gelu(x.double(), approximate="tanh"),
    "cmp_eq": lambda a, b: torch.eq(a.double(), b.double()).double(),
    "cmp_neq": lambda a, b: torch.ne(a.double(), b.double()).double(),
    "cmp_gt": lambda a, b: torch.gt(a.double(), b.double()).double(),
    "cmp_ge": lambda a, b: torch.ge(a.double(), b.double()).double(),
    "cmp_lt": lambda a, b: torch.lt(a.double(), b.double()).double(),
    "cmp_le": lambda a, b: torch.le(a.double(), b.double()).double(),
    "binary_select": lambda a, b, mask: torch.where(mask.double() == 0, b.double(), a.double()),
    "add_square": lambda a, b: torch.addcmul(a.double(), b.double(), b.double()),
    "mod": lambda a, b: torch.from_numpy(np.fmod(*(t.double().cpu().numpy() for t in (a, b)))).to(a.device),
    "pow": lambda a, b: torch.from_numpy(np.float_power(*(t.double().cpu().numpy() for t in (a, b)))).to(a.device),
    "log1p": lambda x: torch.log1p(x.double()),
    "expm1": lambda x: torch.expm1(x.double()),
    "ceil": lambda x: torch.ceil(x.double()),
    "floor": lambda x: torch.floor(x.double()),
    "round": lambda x: torch.from_numpy(np.rint(x.double().cpu().numpy())).to(x.device),
    "trunc": lambda x: torch.trunc(x.double()),
    "exp2": lambda x: torch.exp2(x.double()),
    "log2": lambda x: torch.log2(x.double()),
    "sin": lambda x: torch.sin(x.double()),
    "cos": lambda x: torch.cos(x.double()),
    "tan": lambda x: torch.tan(x.double()),
    "erf": lambda x: torch.special.erf(x.double()),
    "elu": lambda x, elu_alpha=1.0: functional.elu(x.double(), elu_alpha),
    "softplus": lambda x, softplus_beta=1.0: softplus(x.double(), softplus_beta),
    "logical_and": lambda a, b: torch.logical_and(a.double(), b.double()).double(),
    "logical_or": lambda a, b: torch.logical_or(a.double(), b.double()).double(),
    "logical_not": lambda x: torch.logical_not(x.double()).double(),
    "relu_backward": gradient(_clipped),
    "elu_backward": gradient(lambda x, elu_alpha=1.0: functional.elu(x, elu_alpha)),
    "softplus_backward": gradient(lambda x, softplus_beta=1.0: softplus(x, softplus_beta)),
    "sigmoid_backward": gradient(torch.sigmoid),
    "tanh_backward": gradient(torch.tanh),
    "swish_backward": gradient(lambda x, swish_beta=1.0: swish(x, swish_beta)),
    "gelu_backward": gradient(functional.gelu),
    "gelu_approx_tanh_backward": gradient(lambda x: functional.gelu(x, approximate="tanh")),
}
"""Every pointwise op: operands as tensors, attributes by name; float64 results."""

REDUCTION = {
    "ADD": lambda x, axes: np.sum(x, axes, keepdims=True),
    "MUL": lambda x, axes: np.prod(x, axes, keepdims=True),
    "MIN": lambda x, axes: np.min(x, axes, keepdims=True, initial=np.inf),
    "MAX": lambda x, axes: np.max(x, axes, keepdims=True, initial=-np.inf),
    "AMAX": lambda x, axes: np.max(np.abs(x), axes, keepdims=True, initial=0),
    "AVG": lambda x, axes: np.mean(x, axes, keepdims=True),
    "NORM1": lambda x, axes: np.sum(np.abs(x), axes, keepdims=True),
    "NORM2": lambda x, axes: np.sqrt(np.sum(np.square(x), axes, keepdims=True)),
    "MUL_NO_ZEROS": lambda x, axes: np.prod(x, axes, keepdims=True, where=x != 0),
}


def reduction(x, mode: str, dim) -> torch.Tensor:
    """`x` reduced to extents `dim`, each that of x or 1; float64."""
    axes = tuple(axis for axis, extent in enumerate(dim) if extent == 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the mean of nothing
        return torch.from_numpy(np.asarray(REDUCTION[mode](x.double().numpy(), axes)))


# Distances

_INTEGERS = {4: torch.int32, 2: torch.int16, 1: torch.int8}
_LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def rounded(exact, dtype):
    """A float64 reference in the type of an output; FP8 saturates."""
    limit = _LARGEST.get(dtype)
    return (exact if limit is None else exact.clamp(-limit, limit)).to(dtype)


def ulps(got, want):
    """How many representable values apart, elementwise: int64. Two NaNs are 0 apart, one NaN 2^31."""
    assert got.dtype == want.dtype, (got.dtype, want.dtype)
    apart = (_ordered(got) - _ordered(want)).abs()
    nan = (got.float().isnan().to(torch.int8), want.float().isnan().to(torch.int8))
    return torch.where(nan[0] != nan[1], 1 << 31, torch.where((nan[0] & nan[1]).bool(), 0, apart))


def _ordered(values):
    width = values.element_size()
    bits = values.contiguous().view(_INTEGERS[width]).long()
    return torch.where(bits < 0, -(bits & ((1 << (8 * width - 1)) - 1)), bits)


# Quantizers in numpy: float32 in, bytes out


def fp8(values: np.ndarray, name: str) -> np.ndarray:
    """FP8 codes (uint8): nearest even, saturating; NaN is 0x7f. name: "e4m3" or "e5m2"."""
    import ml_dtypes

    kind, limit = {"e4m3": (ml_dtypes.float8_e4m3fn, 448.0), "e5m2": (ml_dtypes.float8_e5m2, 57344.0)}[name]
    codes = np.clip(values, -limit, limit).astype(kind).view(np.uint8)
    return np.where(np.isnan(values), np.uint8(0x7F), codes)


def mxfp4(values: np.ndarray, size: int = 32) -> tuple[np.ndarray, np.ndarray]:
    """Blocks of `size` along the last axis: (codes packed low nibble first, E8M0 scales), both uint8.

    The scale is the E8M0 of max|block| * (1 / 6), in float32, elements are E2M1 of value / scale, in float64, of which
    `kept_places` are kept.
    """
    import ml_dtypes

    values = np.asarray(values, np.float32)
    blocks = values.reshape(*values.shape[:-1], -1, size)
    scales = e8m0(np.abs(blocks).max(axis=-1) * (1 / np.float32(6)))
    power = np.where(scales == 255, np.nan, np.ldexp(1.0, scales.astype(int) - 127))[..., None]
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = kept_places(blocks / power)
    codes = np.clip(scaled, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
    codes = np.where(np.isnan(scaled), np.uint8(7), codes).reshape(values.shape)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), scales


def nvfp4(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Blocks of 16 along the last axis: (codes packed low nibble first, E4M3 scales), both uint8.

    The scale is the E4M3 of max|block| * (1 / 6), elements are E2M1 of value * (1 / scale), of which `kept_places` are
    kept; all but that product in float32.
    """
    import ml_dtypes

    values = np.asarray(values, np.float32)
    blocks = values.reshape(*values.shape[:-1], -1, 16)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        scales = fp8(np.abs(blocks).max(axis=-1) * (1 / np.float32(6)), "e4m3")
        scale = scales.view(ml_dtypes.float8_e4m3fn).astype(np.float32)[..., None]
        scaled = np.where(scale == 0, np.float32(0), kept_places(blocks * (1 / scale).astype(np.float64)))
    codes = np.clip(scaled, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
    codes = np.where(np.isnan(scaled), np.uint8(7), codes).reshape(values.shape)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), scales


def kept_places(scaled: np.ndarray) -> np.ndarray:
    """float64 rounded to 21 significant bits more than E2M1 has, and to 2^-22 below 1: by a sum, in float32, with a
    number whose last place is that of the result, once for each binade."""
    magnitude = np.abs(np.asarray(scaled, np.float64))
    with np.errstate(invalid="ignore", over="ignore"):
        places = [(magnitude + anchor).astype(np.float32) - np.float64(anchor) for anchor in (2, 4, 8)]
        kept = np.select([magnitude < 2, magnitude < 4, magnitude < 8], places, magnitude)
    return np.copysign(kept, scaled)


def e8m0(values: np.ndarray) -> np.ndarray:
    """E8M0 codes (uint8) of float32: magnitudes rounded up to a power of two from 2^-127 to 2^127; NaN is 0xff."""
    bits = np.abs(values).astype(np.float32).view(np.uint32)
    exponent, fraction = bits >> 23, bits & 0x7FFFFF
    codes = np.where(exponent == 0, fraction > 0x400000, exponent + (fraction != 0))
    return np.where(np.isnan(values), 255, np.minimum(codes, 254)).astype(np.uint8)


def mxfp8(values: np.ndarray, name: str, size: int = 32) -> tuple[np.ndarray, np.ndarray]:
    """Blocks of `size` along the last axis: (FP8 codes, E8M0 scales), both uint8.

    The scale is the E8M0 of max|block| * (1 / largest element), elements are FP8 of value / scale, in float32.
    """
    values = np.asarray(values, np.float32)
    blocks = values.reshape(*values.shape[:-1], -1, size)
    largest = np.float32({"e4m3": 448.0, "e5m2": 57344.0}[name])
    scales = e8m0(np.abs(blocks).max(axis=-1) * (1 / largest))
    factor = np.where(scales == 255, np.nan, np.ldexp(1.0, 127 - scales.astype(int))).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        return fp8(blocks * factor[..., None], name).reshape(values.shape), scales


def fp8_by_groups(values: np.ndarray, name: str, size: int = 128) -> tuple[np.ndarray, np.ndarray]:
    """Blocks of `size` along the last axis: (FP8 codes as uint8, float32 scales).

    The scale is max|block| * (1 / largest element), 2^-126 at least, elements are FP8 of value * (1 / scale), each
    operation rounded to float32.
    """
    values = np.asarray(values, np.float32)
    blocks = values.reshape(*values.shape[:-1], -1, size)
    largest = np.float32({"e4m3": 448.0, "e5m2": 57344.0}[name])
    scales = np.maximum(np.abs(blocks).max(axis=-1) * (np.float32(1) / largest), np.float32(2.0**-126))
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        return fp8(blocks * (np.float32(1) / scales)[..., None], name).reshape(values.shape), scales


def fp8_by_rows(values: np.ndarray, name: str, least: float) -> tuple[np.ndarray, np.ndarray]:
    """A scale for each row: (FP8 codes as uint8, float32 scales with an extent of 1): max|row| * (1 / 448), `least` at
    least, and elements FP8 of value * (1 / scale), each operation rounded to float32."""
    values = np.asarray(values, np.float32)
    scales = np.maximum(np.abs(values).max(axis=-1, keepdims=True) * np.float32(1 / 448), np.float32(least))
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        return fp8(values * (np.float32(1) / scales), name), scales


def int8_by_rows(values: np.ndarray, least: float) -> tuple[np.ndarray, np.ndarray]:
    """A scale for each row: (INT8 codes as uint8, float32 scales with an extent of 1), as `fp8_by_rows` with 127 in the
    place of 448, and elements to nearest even."""
    values = np.asarray(values, np.float32)
    scales = np.maximum(np.abs(values).max(axis=-1, keepdims=True) * np.float32(1 / 127), np.float32(least))
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        scaled = np.rint(values * (np.float32(1) / scales))
    return np.clip(scaled, -128, 127).astype(np.int8).view(np.uint8), scales


def swizzled(scales: np.ndarray, fill: int) -> np.ndarray:
    """Scale codes [rows..., blocks] in the order F8_128x4, flat: padded to whole tiles of 128 x 4, a tile's rows
    r, r + 32, r + 64 and r + 96 side by side."""
    scales = scales.reshape(-1, scales.shape[-1])
    rows, blocks = scales.shape
    padded = np.pad(scales, ((0, -rows % 128), (0, -blocks % 4)), constant_values=fill)
    tiles = padded.reshape(-1, 4, 32, padded.shape[1] // 4, 4)
    return np.ascontiguousarray(tiles.transpose(0, 3, 2, 1, 4)).reshape(-1)


# The same by search, on any torch device


def fp8_search(values, name: str):
    """As `fp8`, for a float32 tensor."""
    exponent, mantissa = {"e4m3": (4, 3), "e5m2": (5, 2)}[name]
    codes = _nearest(values, exponent, mantissa, {"e4m3": 448.0, "e5m2": 57344.0}[name])
    return torch.where(values.isnan(), 0x7F, codes).to(torch.uint8)


def nvfp4_search(values):
    """As `nvfp4`, for a float32 tensor."""
    blocks = values.unflatten(-1, (-1, 16))
    amax = blocks.abs().amax(-1)
    scales = fp8_search(amax * (1 / torch.full_like(amax, 6)), "e4m3")
    scale = torch.tensor([*_grid(4, 3, 448.0), float("nan")], dtype=torch.float32, device=values.device)
    scale = scale[scales.long()].unsqueeze(-1)
    scaled = _kept_places(blocks.double() * (1 / scale).double())
    scaled = torch.where(scale == 0, 0.0, scaled)
    codes = torch.where(scaled.isnan(), 7, _nearest(scaled, 2, 1, 6.0)).flatten(-2).to(torch.uint8)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), scales


def _kept_places(scaled):
    for anchor in (2, 4, 8):  # its last place is the one kept in the binade below it
        kept = (scaled.abs() + anchor).float().double() - anchor
        inside = (scaled.abs() < anchor) & (scaled.abs() >= (anchor / 2 if anchor > 2 else 0))
        scaled = torch.where(inside, kept.copysign(scaled), scaled)
    return scaled


def e8m0_search(values):
    """As `e8m0`, for a float32 tensor."""
    powers = torch.tensor([2.0**e for e in range(-127, 128)], dtype=torch.float32, device=values.device)
    codes = torch.bucketize(values.abs(), powers).clamp(max=254)
    return torch.where(values.isnan(), 255, codes).to(torch.uint8)


def mxfp4_search(values, size: int = 32):
    """As `mxfp4`, for a float32 tensor."""
    blocks = values.unflatten(-1, (-1, size))
    amax = blocks.abs().amax(-1)
    scales = e8m0_search(amax * (1 / torch.full_like(amax, 6)))
    scaled = _kept_places(blocks.double() / _powers(scales).unsqueeze(-1))
    codes = torch.where(scaled.isnan(), 7, _nearest(scaled, 2, 1, 6.0)).flatten(-2).to(torch.uint8)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), scales


def mxfp8_search(values, name: str):
    """As `mxfp8`, for a float32 tensor."""
    blocks = values.unflatten(-1, (-1, 32))
    amax = blocks.abs().amax(-1)
    scales = e8m0_search(amax * (1 / torch.full_like(amax, {"e4m3": 448.0, "e5m2": 57344.0}[name])))
    scaled = blocks * (1 / _powers(scales)).float().unsqueeze(-1)
    return fp8_search(scaled, name).flatten(-2), scales


def _powers(scales):
    """E8M0 codes (uint8 tensor) as float64."""
    table = [*(2.0**e for e in range(-127, 128)), float("nan")]
    return torch.tensor(table, dtype=torch.float64, device=scales.device)[scales.long()]


def _grid(exponent_bits: int, mantissa_bits: int, largest: float) -> list[float]:
    """The finite magnitudes of a format by code: IEEE 754's rule with a gradual underflow."""
    bias, steps = (1 << (exponent_bits - 1)) - 1, 1 << mantissa_bits
    values = [
        ((steps if e else 0) + m) / steps * 2.0 ** (max(e, 1) - bias)
        for e in range(1 << exponent_bits)
        for m in range(steps)
    ]
    return [v for v in values if v <= largest]


def _nearest(values, exponent_bits: int, mantissa_bits: int, largest: float):
    grid = torch.tensor(_grid(exponent_bits, mantissa_bits, largest), dtype=torch.float64, device=values.device)
    middles = ((grid[1:] + grid[:-1]) / 2).float()  # exact: one more bit than the format has
    magnitude = values.abs()
    below = torch.bucketize(magnitude, middles, out_int32=True)
    tie = torch.bucketize(magnitude, middles, out_int32=True, right=True) != below
    code = torch.where(tie & (below % 2 == 1), below + 1, below)
    return code | (torch.signbit(values).int() << (exponent_bits + mantissa_bits))


def from_nvfp4(packed, scales):
    """Packed codes and scale codes (uint8 tensors) as float64."""
    grid = _grid(2, 1, 6.0)
    table = torch.tensor(grid + [-v for v in grid], dtype=torch.float64, device=packed.device)
    divisor = torch.tensor([*_grid(4, 3, 448.0), float("nan")], dtype=torch.float64, device=packed.device)
    values = table[torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2).long()].unflatten(-1, (-1, 16))
    return (values * divisor[scales.long()].unsqueeze(-1)).flatten(-2)


def from_mxfp4(packed, scales):
    """Packed codes and E8M0 codes (uint8 tensors) as float64."""
    grid = _grid(2, 1, 6.0)
    table = torch.tensor(grid + [-v for v in grid], dtype=torch.float64, device=packed.device)
    values = table[torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2).long()]
    return (values.unflatten(-1, (*scales.shape[-1:], -1)) * _powers(scales).unsqueeze(-1)).flatten(-2)


def from_mxfp8(codes, scales, name: str):
    """FP8 codes and E8M0 codes (uint8 tensors) as float64."""
    kind = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[name]
    values = codes.view(kind).double().unflatten(-1, (-1, 32))
    return (values * _powers(scales).unsqueeze(-1)).flatten(-2)


def probes() -> np.ndarray:
    """Values near every representable one and every midpoint of the small formats, signs and specials."""
    grids = [_grid(4, 3, 448.0), _grid(5, 2, 57344.0), _grid(2, 1, 6.0)]
    base = np.concatenate([np.concatenate([g, (np.array(g[1:]) + g[:-1]) / 2]) for g in grids]).astype(np.float32)
    near = np.concatenate([base, np.nextafter(base, np.float32(np.inf)), np.nextafter(base, np.float32(0))])
    special = np.array([0.0, np.inf, np.nan, 3.4e38, 1e-45, 449.0, 464.0, 480.0, 61440.0, 65536.0], np.float32)
    return np.concatenate([near, -near, special, -special])
