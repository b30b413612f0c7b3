"""What ops compute, in torch on float tensors: the reference engine's formulas.

The torch module is passed as `t`, because nothing here imports it. Most pointwise ops are one line of the table.
"""

import math

from graphfuse import rounding
from graphfuse.dtypes import data_type
from graphfuse.ops.blocks import SMALLEST_SCALE
from graphfuse.ops.reductions import REDUCTIONS
from graphfuse.ops.shapes import adalayernorm_axes, aligned, rmsnorm_axes


def rmsnorm(t, x, a) -> dict[str, object]:
    scale = x.get("scale")
    axes = rmsnorm_axes(x["input"].shape, None if scale is None else scale.shape)
    inverse = t.rsqrt(_mean(x["input"] * x["input"], axes) + x["epsilon"])
    y = x["input"] * inverse
    if scale is not None:
        y = y * scale
    if "bias" in x:
        y = y + x["bias"]
    return {"Y": y, "inv_variance": inverse}


def layernorm(t, x, a) -> dict[str, object]:
    scale = x.get("scale")
    return _layernorm(t, x, scale, rmsnorm_axes(x["input"].shape, None if scale is None else scale.shape))


def adalayernorm(t, x, a) -> dict[str, object]:
    return _layernorm(t, x, x["scale"], adalayernorm_axes(x["input"].shape, x["scale"].shape))


def _layernorm(t, x, scale, axes: tuple[int, ...]) -> dict[str, object]:
    mean = _mean(x["input"], axes)
    apart = x["input"] - mean
    inverse = t.rsqrt(_mean(apart * apart, axes) + x["epsilon"])
    y = apart * inverse
    if scale is not None:
        y = y * scale
    if "bias" in x:
        y = y + x["bias"]
    return {"Y": y, "mean": mean, "inv_variance": inverse}


def rmsnorm_backward(t, x, a) -> dict[str, object]:
    grad, scale, inverse = x["grad"], x.get("scale"), x["inv_variance"]
    axes = rmsnorm_axes(grad.shape, None if scale is None else scale.shape)
    normal = x["input"] * inverse
    scaled = grad if scale is None else grad * scale
    out = {"DX": inverse * (scaled - normal * _mean(scaled * normal, axes))}
    if scale is not None:
        rows = tuple(axis for axis in range(grad.dim()) if axis not in axes)
        out |= {
            "DScale": _sum(grad * normal, rows).reshape(scale.shape),
            "DBias": _sum(grad, rows).reshape(scale.shape),
        }
    return out


def layernorm_backward(t, x, a) -> dict[str, object]:
    scale = x.get("scale")
    return _layernorm_backward(x, scale, rmsnorm_axes(x["input"].shape, None if scale is None else scale.shape))


def adalayernorm_backward(t, x, a) -> dict[str, object]:
    return _layernorm_backward(x, x["scale"], adalayernorm_axes(x["input"].shape, x["scale"].shape))


def _layernorm_backward(x, scale, axes: tuple[int, ...]) -> dict[str, object]:
    grad, inverse = x["grad"], x["inv_variance"]
    normal = (x["input"] - x["mean"]) * inverse
    scaled = grad if scale is None else grad * scale
    out = {"DX": inverse * (scaled - _mean(scaled, axes) - normal * _mean(scaled * normal, axes))}
    if scale is not None:
        extents = aligned(scale.shape, grad.dim())
        rows = tuple(axis for axis in range(grad.dim()) if axis not in axes and extents[axis] == 1)
        out |= {
            "DScale": _sum(grad * normal, rows).reshape(scale.shape),
            "DBias": _sum(grad, rows).reshape(scale.shape),
        }
    return out


def _exponents(t, x, a):
    """The largest of each row, and e to the power of all less that."""
    largest = x["input"].amax(dim=a["axis"], keepdim=True)
    return largest, t.exp(x["input"] - largest)


def softmax(t, x, a) -> dict[str, object]:
    _, powers = _exponents(t, x, a)
    return {"output": powers / _sum(powers, (a["axis"],))}


def log_softmax(t, x, a) -> dict[str, object]:
    largest, powers = _exponents(t, x, a)
    return {"output": x["input"] - largest - t.log(_sum(powers, (a["axis"],)))}


def logsumexp(t, x, a) -> dict[str, object]:
    largest = x["input"].amax(dim=a["axis"], keepdim=True)
    # Infinity less infinity would be NaN.
    largest = t.where(largest.isinf(), t.zeros_like(largest), largest)
    return {"output": t.log(_sum(t.exp(x["input"] - largest), (a["axis"],))) + largest}


def softmax_backward(t, x, a) -> dict[str, object]:
    grad, y = x["grad"], x["output"]
    return {"DX": (grad - _sum(grad * y, (a["axis"],))) * y}


def log_softmax_backward(t, x, a) -> dict[str, object]:
    return {"DX": x["grad"] - t.exp(x["output"]) * _sum(x["grad"], (a["axis"],))}


# Of no axes torch would take all.


def _mean(values, axes: tuple[int, ...]):
    return values.mean(dim=axes, keepdim=True) if axes else values


def _sum(values, axes: tuple[int, ...]):
    return values.sum(dim=axes, keepdim=True) if axes else values


def reduction(t, x, a) -> dict[str, object]:
    values, how = x["input"], REDUCTIONS[a["mode"]]
    dim = [1 if axis in a["axes"] else e for axis, e in enumerate(values.shape)]
    kept = [axis for axis in range(len(dim)) if axis not in a["axes"]]
    count = math.prod(values.shape[axis] for axis in a["axes"])
    if count == 0:
        return {"output": values.new_full(dim, how.start)}
    rows = values.permute(*kept, *a["axes"]).reshape([*(dim[axis] for axis in kept), count])
    return {"output": how.of(t, rows).reshape(dim)}


def quantize(t, x, a) -> dict[str, object]:
    values, element, axis = x["input"], a["element_type"], a["axis"]
    blocks = values.unflatten(axis, (-1, a["block_size"]))
    amax = blocks.abs().amax(dim=axis + 1)
    # The scale is used as stored, so that a reader multiplying by it gets what was meant.
    scale = amax * t.full_like(amax, element.facts.max).reciprocal()
    scale = rounding.round_to(t, scale, a["scale_type"])
    if a["scale_type"] is data_type.FLOAT:
        scale = scale.clamp(min=SMALLEST_SCALE)
    factor = scale.reciprocal().unsqueeze(axis + 1)
    scaled = blocks * factor
    if element is data_type.FP4_E2M1:
        scaled = rounding.to_e2m1_places(t, scaled)
    scaled = t.where(factor.isinf(), t.zeros_like(blocks), scaled)
    return {"Y": rounding.round_to(t, scaled, element).flatten(axis, axis + 1), "scale": scale}


def gen_index(t, x, a) -> dict[str, object]:
    values, axis = x["input"], a["axis"]
    numbers = t.arange(values.shape[axis], dtype=values.dtype, device=values.device)
    along = [-1 if i == axis else 1 for i in range(values.dim())]
    return {"output": numbers.reshape(along).expand(values.shape).contiguous()}


def larger(t, a, b):
    # Of two zeros the positive one, if there is one: torch does not say which.
    return t.where((a == 0) & (b == 0), a + b, t.maximum(a, b))


GELU_TANH = 0.7978845608028654  # sqrt(2 / pi)
_NORMAL_DENSITY = 0.3989422804014327  # 1 / sqrt(2 pi)

# Backward of activations, which may be asked for any input: slopes that are products of what grows and what
# vanishes get their input within bounds beyond which, in float64, what vanishes is zero.


def relu_backward(t, loss, x, slope, low, high):
    below = slope * loss if slope else t.zeros_like(loss)
    return t.where(x > high, 0.0, t.where(x > low, loss, t.where(x <= low, below, x)))  # the last is NaN


def sigmoid(t, x):
    # torch's own, on the CPU, has other last bits for the elements that are left over when vectors are full: a value
    # would depend on where it stands.
    return (1 + t.exp(-x)).reciprocal()


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
