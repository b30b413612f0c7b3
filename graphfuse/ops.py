"""The one op table: everything graphfuse knows about each kind of node.

Per op: its ports, typed attributes, shape rule, default data types, reference
semantics in torch and, for pointwise ops, the scalar form in CUDA C++. The graph
methods, the pattern vocabulary, the reference engine and code generation all read
this table; a new pointwise op is one entry here and nothing else.

Loads neither torch nor CUDA: reference functions get the torch module as `t`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from graphfuse import rounding
from graphfuse.dtypes import data_type
from graphfuse.enums import norm_forward_phase
from graphfuse.errors import GraphValidationError

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Port:
    """An input or output of an op. dtype: what an output gets when the user sets none;
    fixed: it can be stored as nothing else."""

    name: str
    optional: bool = False
    dtype: data_type | None = None
    fixed: bool = False


@dataclass(frozen=True)
class Attribute:
    """A compile-time parameter of a node: its name, accepted types and default."""

    name: str
    types: tuple[type, ...]
    default: object = None
    required: bool = False


@dataclass(frozen=True)
class Op:
    """One kind of node.

    infer(shapes by input port, attributes) -> shapes by output port; raises
    GraphValidationError with a message that the caller prefixes with the node.
    reference(t, inputs by port, attributes) -> outputs by port, on float tensors
    broadcast as torch does. cuda: for pointwise ops, a C++ expression of float
    with {port} and {attribute} slots. absent(attributes): output ports not written.
    """

    name: str
    doc: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    infer: Callable[[Mapping[str, Shape], Mapping[str, object]], Mapping[str, Shape]]
    reference: Callable[..., Mapping[str, object]]
    attributes: tuple[Attribute, ...] = ()
    cuda: str | None = None
    absent: Callable[[Mapping[str, object]], frozenset[str]] = lambda attributes: frozenset()

    @property
    def pointwise(self) -> bool:
        return self.cuda is not None


def _broadcast(shapes: Mapping[str, Shape], _: Mapping[str, object]) -> dict[str, Shape]:
    ranks = {len(s) for s in shapes.values()}
    if len(ranks) > 1:
        raise GraphValidationError(f"inputs must have one rank, got {dict(shapes)}")
    out = []
    for axis, extents in enumerate(zip(*shapes.values(), strict=True)):
        sizes = set(extents) - {1}
        if len(sizes) > 1:
            raise GraphValidationError(
                f"dimension {axis} does not broadcast (equal extents or 1 are accepted), got {dict(shapes)}"
            )
        out.append(sizes.pop() if sizes else 1)
    return {"output": tuple(out)}


def _rmsnorm_axes(x: Shape, scale: Shape) -> tuple[int, ...]:
    """The axes normalized over: those along which the scale varies."""
    return tuple(axis for axis, extent in enumerate(scale) if extent != 1)


def _rmsnorm_shapes(shapes: Mapping[str, Shape], attributes: Mapping[str, object]) -> dict[str, Shape]:
    x, scale = shapes["input"], shapes["scale"]
    if len(scale) != len(x) or any(s not in (1, e) for s, e in zip(scale, x, strict=False)):
        raise GraphValidationError(
            f"scale must have the rank of input {list(x)} with each extent 1 or input's, got {list(scale)}"
        )
    if any(e == 0 for e, s in zip(x, scale, strict=True) if s != 1):
        raise GraphValidationError(f"input {list(x)} has no elements along a normalized axis; at least 1 is needed")
    if "bias" in shapes and shapes["bias"] != scale:
        raise GraphValidationError(f"bias must have scale's shape {list(scale)}, got {list(shapes['bias'])}")
    if any(e != 1 for e in shapes["epsilon"]):
        raise GraphValidationError(f"epsilon must have one element, got shape {list(shapes['epsilon'])}")
    if attributes["norm_forward_phase"] is norm_forward_phase.NOT_SET:
        raise GraphValidationError("norm_forward_phase is NOT_SET; accepted: INFERENCE, TRAINING")
    out = {"Y": x}
    if attributes["norm_forward_phase"] is norm_forward_phase.TRAINING:
        axes = _rmsnorm_axes(x, scale)
        out["inv_variance"] = tuple(1 if axis in axes else e for axis, e in enumerate(x))
    return out


def _rmsnorm_absent(attributes: Mapping[str, object]) -> frozenset[str]:
    training = attributes["norm_forward_phase"] is norm_forward_phase.TRAINING
    return frozenset() if training else frozenset({"inv_variance"})


def _rmsnorm(t, x, a) -> dict[str, object]:
    axes = _rmsnorm_axes(x["input"].shape, x["scale"].shape)
    square = x["input"] * x["input"]
    mean = square.mean(dim=axes, keepdim=True) if axes else square
    inverse = t.rsqrt(mean + x["epsilon"])
    y = x["input"] * inverse * x["scale"]
    if "bias" in x:
        y = y + x["bias"]
    return {"Y": y, "inv_variance": inverse}


BLOCK_FORMATS = {16: (data_type.FP4_E2M1, data_type.FP8_E4M3)}
"""Block size -> (element type, scale type) that block_scale_quantize makes."""


def block_size(element: data_type) -> int | None:
    """Elements of a block of this element type; None for a type that is not quantized in blocks."""
    return next((size for size, (made, _) in BLOCK_FORMATS.items() if made is element), None)


def quantize_axis(shape: Shape, attributes: Mapping[str, object]) -> int:
    """The axis blocks run along: the one asked for, else the last that is not 1."""
    axis = attributes["axis"]
    if axis is None:
        wide = [i for i, e in enumerate(shape) if e != 1]
        return wide[-1] if wide else len(shape) - 1
    if not -len(shape) <= axis < len(shape):
        raise GraphValidationError(f"axis {axis} is outside the input's rank {len(shape)}")
    return axis % len(shape)


def _quantize_shapes(shapes: Mapping[str, Shape], attributes: Mapping[str, object]) -> dict[str, Shape]:
    x, block = shapes["input"], attributes["block_size"]
    if block not in BLOCK_FORMATS:
        raise GraphValidationError(f"block_size {block} is not supported; accepted: {sorted(BLOCK_FORMATS)}")
    if attributes["transpose"]:
        raise GraphValidationError("transpose=True is not supported; accepted: False")
    axis = quantize_axis(x, attributes)
    if x[axis] % block:
        raise GraphValidationError(
            f"extent {x[axis]} of axis {axis} must be a multiple of block_size {block} (input {list(x)})"
        )
    return {"Y": x, "scale": tuple(e // block if i == axis else e for i, e in enumerate(x))}


def _quantize(t, x, a) -> dict[str, object]:
    values, block = x["input"], a["block_size"]
    element, scale_type = BLOCK_FORMATS[block]
    axis = quantize_axis(values.shape, a)
    blocks = values.unflatten(axis, (-1, block))
    amax = blocks.abs().amax(dim=axis + 1)
    # The scale is used as stored, so that a reader multiplying by it gets what was meant.
    scale = rounding.round_to(t, amax * t.full_like(amax, element.facts.max).reciprocal(), scale_type)
    factor = scale.reciprocal().unsqueeze(axis + 1)
    scaled = rounding.to_e2m1_places(t, blocks * factor)
    scaled = t.where(factor.isinf(), t.zeros_like(blocks), scaled)
    return {"Y": rounding.round_to(t, scaled, element).flatten(axis, axis + 1), "scale": scale}


def _pointwise(name: str, doc: str, inputs: str, cuda: str, reference, *attributes: Attribute) -> Op:
    return Op(
        name=name,
        doc=doc,
        inputs=tuple(Port(p) for p in inputs.split()),
        outputs=(Port("output"),),
        infer=_broadcast,
        reference=lambda t, x, a: {"output": reference(t, *x.values(), *a.values())},
        attributes=attributes,
        cuda=cuda,
    )


def _number(name: str, default: float) -> Attribute:
    return Attribute(name, (float, int), default)


_GELU_TANH = 0.7978845608028654  # sqrt(2 / pi)

_TABLE = (
    Op(
        "rmsnorm",
        "RMS normalization: Y = input * inv_variance * scale (+ bias) with\n"
        "inv_variance = 1 / sqrt(mean(input^2) + epsilon) over the axes where scale varies\n"
        "(Zhang and Sennrich 2019, equation 4, with epsilon inside the root). Returns\n"
        "[Y, inv_variance]; inv_variance is None in the INFERENCE phase.",
        inputs=(Port("input"), Port("scale"), Port("epsilon"), Port("bias", optional=True)),
        outputs=(Port("Y"), Port("inv_variance", optional=True, dtype=data_type.FLOAT)),
        infer=_rmsnorm_shapes,
        reference=_rmsnorm,
        attributes=(Attribute("norm_forward_phase", (norm_forward_phase,), norm_forward_phase.NOT_SET, required=True),),
        absent=_rmsnorm_absent,
    ),
    Op(
        "block_scale_quantize",
        "Block quantization: each block of block_size elements along axis gets the scale\n"
        "max|input| * (1 / largest finite element), rounded to the scale's type, and the elements\n"
        "are input * (1 / scale as stored), inverses and products rounded to float32, then to\n"
        "a multiple of 2^-22 (2^-21 from 2 on, 2^-20 from 4 on), then to nearest even and saturated.\n"
        "A block whose scale rounds to zero becomes zeros. Returns [Y, scale].",
        inputs=(Port("input"),),
        outputs=(
            Port("Y", dtype=data_type.FP4_E2M1, fixed=True),
            Port("scale", dtype=data_type.FP8_E4M3, fixed=True),
        ),
        infer=_quantize_shapes,
        reference=_quantize,
        attributes=(
            Attribute("block_size", (int,), 16),
            Attribute("axis", (int, type(None)), None),
            Attribute("transpose", (bool,), False),
        ),
    ),
    _pointwise("add", "a + b.", "a b", "({a} + {b})", lambda t, a, b: a + b),
    _pointwise("sub", "a - b.", "a b", "({a} - {b})", lambda t, a, b: a - b),
    _pointwise("mul", "a * b.", "a b", "({a} * {b})", lambda t, a, b: a * b),
    _pointwise("scale", "input * scale.", "input scale", "({input} * {scale})", lambda t, x, s: x * s),
    _pointwise("identity", "input unchanged (a place to change the data type).", "input", "{input}", lambda t, x: x),
    _pointwise(
        "relu",
        "min(input, upper_clip) above lower_clip, else lower_clip + negative_slope * (input - lower_clip).",
        "input",
        "gf::relu({input}, {negative_slope}, {lower_clip}, {upper_clip})",
        lambda t, x, slope, low, high: t.where(
            x > low, x.clamp(max=high), low + slope * (x - low) if slope else x.clamp(min=low)
        ),
        _number("negative_slope", 0.0),
        _number("lower_clip", 0.0),
        _number("upper_clip", float("inf")),
    ),
    _pointwise("sigmoid", "1 / (1 + exp(-input)).", "input", "gf::sigmoid({input})", lambda t, x: t.sigmoid(x)),
    _pointwise("tanh", "Hyperbolic tangent.", "input", "tanhf({input})", lambda t, x: t.tanh(x)),
    _pointwise(
        "swish",
        "input * sigmoid(swish_beta * input); SiLU when swish_beta is 1.",
        "input",
        "({input} * gf::sigmoid({swish_beta} * {input}))",
        lambda t, x, beta: x * t.sigmoid(beta * x),
        _number("swish_beta", 1.0),
    ),
    _pointwise(
        "gelu",
        "input * Phi(input) with the normal distribution function (the erf form).",
        "input",
        # erfc keeps the relative precision of the negative tail that 1 + erf cancels away.
        "(0.5f * {input} * erfcf(-0.70710678118654752f * {input}))",
        lambda t, x: 0.5 * x * t.special.erfc(-(0.5**0.5) * x),
    ),
    _pointwise(
        "gelu_approx_tanh",
        "0.5 * input * (1 + tanh(sqrt(2/pi) * (input + 0.044715 * input^3))).",
        "input",
        # (1 + tanh u) / 2 is sigmoid(2u), which does not cancel for negative input.
        "({input} * gf::sigmoid(1.5957691216057308f * ({input} + 0.044715f * {input} * {input} * {input})))",
        lambda t, x: x * t.sigmoid(2 * _GELU_TANH * (x + 0.044715 * x * x * x)),
    ),
)

OPS: dict[str, Op] = {op.name: op for op in _TABLE}
