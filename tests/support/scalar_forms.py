"""Every pointwise op's scalar form as a function, and how far from torch in float64 it may be, on CPU and GPU."""

import numpy as np
import torch

from graphfuse.codegen import declarations
from graphfuse.codegen.expressions import expression
from graphfuse.codegen.render import render
from graphfuse.ops import OPS
from graphfuse.rows.steps import Load, Step

VARIANTS = {
    "relu": [
        {},
        {"negative_slope": 0.25},
        {"lower_clip": -1.0, "upper_clip": 2.5},
        {"negative_slope": 0.5, "lower_clip": 1},
    ],
    "swish": [{}, {"swish_beta": 0.5}, {"swish_beta": 2}],
    "elu": [{}, {"elu_alpha": 1.5}],
    "softplus": [{}, {"softplus_beta": 0.5}],
}
VARIANTS |= {f"{name}_backward": variants for name, variants in VARIANTS.items()}
CASES = [(op, attributes) for op in OPS.values() if op.pointwise for attributes in VARIANTS.get(op.name, [{}])]
IDS = [f"{op.name}-{attributes}" for op, attributes in CASES]

_SUBNORMAL = 2.0**-126  # below it a sigmoid may be anything from zero on


def _gate(u, x_du):
    """sigmoid(u) (1 + |x u' sigmoid(-u)|)."""
    return torch.sigmoid(u) * (1 + (x_du * torch.sigmoid(-u)).abs())


def _tanh_form(x):
    k, c = 2 * (2 / np.pi) ** 0.5, 0.044715
    return _gate(k * (x + c * x**3), k * (x + 3 * c * x**3))


# Slopes that cross zero are sums of two terms: the sum of their magnitudes, which rounding errors are relative to.
TERMS = {
    "swish_backward": lambda x, swish_beta=1.0: _gate(swish_beta * x, swish_beta * x),
    "gelu_backward": lambda x: torch.special.ndtr(x) + (x * torch.exp(-0.5 * x * x)).abs() * (2 * np.pi) ** -0.5,
    "gelu_approx_tanh_backward": _tanh_form,
}


def source(function: str) -> str:
    """`function` for each case i, with {i} and {form}, that of a[k] and b[k], and of 0 and 1 in turns."""
    text = [f'#include "graphfuse/{name}"' for name in ("simt.cuh", *declarations.HEADERS)]
    for i, (op, attributes) in enumerate(CASES):
        operands = tuple((port.name, Load(number)) for number, port in enumerate(op.inputs))
        form = expression(
            Step(op.name, operands, tuple(attributes.items())), lambda o: ("a[k]", "b[k]", "float(k % 2)")[o.index]
        )
        text.append(function.format(i=i, form=form))
    return "\n".join(text)


def kernels() -> str:
    """CUDA C++: form_N(a, b, out, count), a thread per element."""
    text = source(
        'extern "C" GF_KERNEL(256) form_{i}(const float* a, const float* b, float* out, int count) {{\n'
        "  const int k = blockIdx.x * 256 + threadIdx.x;\n  if (k < count) out[k] = {form};\n}}"
    )
    return render('#include "generated.cuh"\n' + text, "")


def operands(index: int) -> tuple[np.ndarray, np.ndarray]:
    """Magnitudes from subnormal to 1e4, dense where functions bend, and the special values; then in another order."""
    positive = np.concatenate([np.geomspace(1e-40, 1e4, 4000), np.linspace(0, 30, 6001), [87, 88, 89, 95, 104]])
    a = np.concatenate([positive, -positive, [np.inf, -np.inf, np.nan]]).astype(np.float32)
    return a, np.random.default_rng(index).permutation(a)


def _finite(values: np.ndarray) -> np.ndarray:
    """Magnitudes, at least 1; 1 for those that are not finite."""
    return np.where(np.isfinite(values), np.maximum(1, np.abs(values.astype(np.float64))), 1)


def hold(index: int, a: np.ndarray, b: np.ndarray, out: np.ndarray, sigmoid: float) -> None:
    """sigmoid: relative error of what is made of one."""
    op, attributes = CASES[index]
    every = (a, b, np.arange(a.size) % 2)
    inputs = [torch.from_numpy(v.astype(np.float64)) for v in every[: len(op.inputs)]]
    full = {attribute.name: attribute.default for attribute in op.attributes} | attributes
    named = {port.name: value for port, value in zip(op.inputs, inputs, strict=True)}
    expected = op.reference(torch, named, full)["output"].numpy()
    # Conditioning: rounding the argument once costs |x f'(x)| / |f(x)| units, up to the square for gelu.
    usual = sigmoid if "sigmoid" in op.cuda else 3e-7
    tolerance = {
        "gelu": 2e-5,
        "gelu_backward": 2e-5,
        "gelu_approx_tanh": 2e-4,
        "gelu_approx_tanh_backward": 2e-4,
        "tanh": 1e-6,
        "tan": 5e-7,
        "pow": 5e-7,
    }.get(op.name, usual)
    size = np.abs(expected)
    if op.name in TERMS:
        terms = (inputs[0] * TERMS[op.name](inputs[1], **attributes)).abs().numpy()
        size = np.where(np.isfinite(terms), np.fmax(size, terms), size)
    if op.name == "add_square":  # terms that may cancel
        size = np.abs(a.astype(np.float64)) + np.square(b.astype(np.float64))
    beyond = np.abs(expected) > 3.4e38
    with np.errstate(over="ignore", invalid="ignore"):
        expected = np.where(beyond, np.sign(expected) * np.inf, expected)
    # A clip that is not 0 is added last, and what it cancels keeps its rounding.
    absolute = 1.2e-7 if op.name == "relu" and attributes.get("lower_clip") else 1.5e-41
    if "sigmoid" in op.cuda or "gelu" in op.cuda:  # products may be left of what is no normal number
        absolute = _SUBNORMAL * _finite(a) * (1 + tolerance)
    if op.name.endswith("_backward"):
        absolute = absolute * _finite(a) * _finite(b) ** 3  # the highest power, that of gelu_approx_tanh_backward
    with np.errstate(invalid="ignore"):
        close = np.abs(out - expected) <= tolerance * size + absolute
    close |= (out == expected) | (np.isnan(out) & np.isnan(expected))
    if op.name in ("gelu_backward", "gelu_approx_tanh_backward"):  # infinity times a slope that is no normal number
        close |= np.isinf(a) & (b < -13) & np.isnan(out)
    assert close.all(), [(a[k], b[k], out[k], expected[k]) for k in np.flatnonzero(~close)[:5]]
