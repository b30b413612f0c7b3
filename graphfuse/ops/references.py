"""Reference formulas of ops, in torch on float tensors, for the reference engine.

The torch module is passed as `t`, so that importing this module does not load torch. Most pointwise ops have their
formula in the table. Ops with an expansion have no formula: `torch_expansion` computes the expansion.
"""

from graphfuse.base import rounding
from graphfuse.base.dtypes import data_type
from graphfuse.ops.blocks import SMALLEST_SCALE


def quantize(t, x, a) -> dict[str, object]:
    values, element, axis = x["input"], a["element_type"], a["axis"]
    blocks = values.unflatten(axis, (-1, a["block_size"]))
    amax = blocks.abs().amax(dim=axis + 1)
    # The scale is used as stored, so that multiplying by it gives the input back.
    scale = amax * t.full_like(amax, element.facts.max).reciprocal()
    scale = rounding.round_to(t, scale, a["scale_type"])
    if a["scale_type"] is data_type.FLOAT:
        scale = scale.clamp(min=SMALLEST_SCALE)
    factor = scale.reciprocal().unsqueeze(axis + 1)
    scaled = blocks * factor
    if element is data_type.FP4_E2M1:  # kernels do not round the product first
        scaled = rounding.to_e2m1_places(t, blocks.double() * factor.double()).to(blocks.dtype)
    scaled = t.where(factor.isinf(), t.zeros_like(blocks), scaled)
    for along, extent in enumerate(a.get("scale_dim", ())):  # zeros fill the tiles
        more = [extent - e if i == along else e for i, e in enumerate(scale.shape)]
        scale = t.cat([scale, scale.new_zeros(more)], along)
    return {"Y": rounding.round_to(t, scaled, element).flatten(axis, axis + 1), "scale": scale}


def gen_index(t, x, a) -> dict[str, object]:
    values, axis = x["input"], a["axis"]
    numbers = t.arange(values.shape[axis], dtype=values.dtype, device=values.device)
    along = [-1 if i == axis else 1 for i in range(values.dim())]
    return {"output": numbers.reshape(along).expand(values.shape).contiguous()}


def random_uniform(t, seed, offset, row, column):
    key0, key1, row, column = (of.to(t.int64) for of in (seed, offset, row, column))
    counter = (column & _WORD) >> 3, row & _WORD, (row >> 32) & _WORD, t.zeros_like(row)
    for _ in range(7):
        (high0, low0), (high1, low1) = (_product(of, by) for of, by in zip(counter[::2], _PHILOX, strict=True))
        counter = high1 ^ counter[1] ^ (key0 & _WORD), low1, high0 ^ counter[3] ^ (key1 & _WORD), low0
        key0, key1 = key0 + _WEYL[0], key1 + _WEYL[1]
    words = t.stack(t.broadcast_tensors(*counter, column)[:4])
    word = words.gather(0, (column >> 1 & 3).expand(words.shape[1:])[None])[0]
    return (word >> 16 * (column & 1) & 0xFFFF).to(seed.dtype) * 2.0**-16


def _product(of, by: int):
    """The high and the low 32-bit word of a product of two words, in signed 64-bit integers."""
    low = of * (by & 0xFFFF)
    high = of * (by >> 16) + (low >> 16)
    return high >> 16, (high & 0xFFFF) << 16 | low & 0xFFFF


def larger(t, a, b):
    # 0 is larger than -0; torch does not specify which one it returns.
    return t.where((a == 0) & (b == 0), a + b, t.maximum(a, b))


def smaller(t, a, b):
    # -0 is smaller than 0.
    return t.where((a == 0) & (b == 0), -(-a - b), t.minimum(a, b))


def element_by_element(t, function, *operands):
    # Strided operands keep torch from vectorizing on the CPU, so that the result is that of C's function.
    return function(*(t.stack((one, one), -1)[..., 0] for one in t.broadcast_tensors(*operands)))


GELU_TANH = 0.7978845608028654  # sqrt(2 / pi)
_NORMAL_DENSITY = 0.3989422804014327  # 1 / sqrt(2 pi)

_WORD = 0xFFFFFFFF
_PHILOX, _WEYL = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)
"""Multipliers of Philox 4x32, and the increments of its key per round."""

# Gradients of activations, for any input. Slopes that are products of a growing and a vanishing factor clamp their
# input to bounds beyond which the vanishing factor is zero in float64.


def relu_backward(t, loss, x, slope, low, high):
    below = slope * loss if slope else t.zeros_like(loss)
    return t.where(x > high, 0.0, t.where(x > low, loss, t.where(x <= low, below, x)))  # the last is NaN


def sigmoid(t, x):
    # torch.sigmoid on the CPU has other last bits in the remainder of vectorized loops: a value would depend on its
    # position.
    return (1 + t.exp(-x)).reciprocal()


def softplus(t, x):
    return x.clamp(min=0) + t.log1p(t.exp(-x.abs()))


def sigmoid_slope(t, x):
    return sigmoid(t, x) * sigmoid(t, -x)  # 1 - sigmoid cancels


def swish_slope(t, x):
    x = x.clamp(-1000, 1000)
    return sigmoid(t, x) * (1 + x * sigmoid(t, -x))


def gelu_slope(t, x):
    x = x.clamp(-100, 100)
    density = _NORMAL_DENSITY * t.exp(-0.5 * x * x)
    return 0.5 * t.special.erfc(-(0.5**0.5) * x) + x * density


def gelu_approx_tanh_slope(t, x):
    x = x.clamp(-100, 100)
    argument = 2 * GELU_TANH * (x + 0.044715 * x * x * x)
    inner = 2 * GELU_TANH * (1 + 3 * 0.044715 * x * x)
    return sigmoid(t, argument) * (1 + x * inner * sigmoid(t, -argument))
