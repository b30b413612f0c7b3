"""The one op table: everything graphfuse knows about each kind of node.

Per op: its ports, typed attributes, shape rule, default data types, reference
semantics in torch and, for pointwise ops, the scalar form in CUDA C++. The graph
methods, the pattern vocabulary, the reference engine and code generation all read
this table; a new pointwise op is one entry here and nothing else.

Loads neither torch nor CUDA: reference functions get the torch module as `t`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from graphfuse import rounding
from graphfuse.dtypes import data_type
from graphfuse.enums import norm_forward_phase, reduction_mode
from graphfuse.errors import GraphValidationError

Shape = tuple[int, ...]
Attributes = Mapping[str, object]


@dataclass(frozen=True)
class Port:
    """An input or output of an op.

    dtype: what an output gets when the user sets none; None for what the graph says of all tensors. label: what cuDNN
    calls it in the name that an output has until the user sets one, None where that is `name`.
    """

    name: str
    optional: bool = False
    dtype: data_type | None = None
    label: str | None = None


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

    infer(shapes by input port, attributes, shapes that the user set by output port) ->
    shapes by output port; raises GraphValidationError with a message that the caller
    prefixes with the node. stored(attributes) -> the data types of output ports that are
    stored as nothing else, the default first. frozen(attributes, shapes by input port,
    (shape, data type) by output port) -> the attributes of the frozen node: those given,
    and what they leave to how its tensors are set up.
    reference(t, inputs by port, frozen attributes) -> outputs by port, on float tensors
    broadcast as torch does. cuda: for pointwise ops, a C++ expression of float
    with {port} and {attribute} slots. absent(attributes, input ports given): output
    ports not written. order: what errors say about arguments by position, where cuDNN's order differs.
    """

    name: str
    doc: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    infer: Callable[[Mapping[str, Shape], Attributes, Mapping[str, Shape]], Mapping[str, Shape]]
    reference: Callable[..., Mapping[str, object]]
    attributes: tuple[Attribute, ...] = ()
    cuda: str | None = None
    absent: Callable[[Attributes, frozenset[str]], frozenset[str]] = lambda attributes, inputs: frozenset()
    stored: Callable[[Attributes], Mapping[str, tuple[data_type, ...]]] = lambda attributes: {}
    frozen: Callable[..., Attributes] = lambda attributes, inputs, outputs: attributes
    order: str = ""

    @property
    def pointwise(self) -> bool:
        return self.cuda is not None


def _broadcast(shapes: Mapping[str, Shape], *_) -> dict[str, Shape]:
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


def aligned(shape: Shape, rank: int) -> Shape:
    """`shape` with extents of 1 before it, where it has a lower rank: its axes are the last ones."""
    return (*(1,) * (rank - len(shape)), *shape)


def rmsnorm_axes(x: Shape, scale: Shape | None) -> tuple[int, ...]:
    """The axes normalized over: those along which the scale varies; without a scale, the last."""
    if scale is None:
        return (len(x) - 1,)
    return tuple(axis for axis, extent in enumerate(aligned(scale, len(x))) if extent != 1)


def _normalized_axes(x: Shape, scale: Shape | None) -> tuple[int, ...]:
    if scale is not None:
        extents = aligned(scale, len(x))
        if len(extents) != len(x) or any(s not in (1, e) for s, e in zip(extents, x, strict=True)):
            raise GraphValidationError(
                f"scale must have the rank of input {list(x)}, or a lower one for input's last axes, with each extent "
                f"1 or input's, got {list(scale)}"
            )
    axes = rmsnorm_axes(x, scale)
    if any(x[axis] == 0 for axis in axes):
        raise GraphValidationError(f"input {list(x)} has no elements along a normalized axis; at least 1 is needed")
    return axes


_RMSNORM_ORDER = "by position: input, scale, epsilon, bias, norm_forward_phase (cuDNN's order differs: give keywords)"


def _rmsnorm_shapes(shapes: Mapping[str, Shape], attributes: Attributes, _) -> dict[str, Shape]:
    x, scale = shapes["input"], shapes.get("scale")
    axes = _normalized_axes(x, scale)
    row = tuple(e if axis in axes else 1 for axis, e in enumerate(x))
    if "bias" in shapes and aligned(shapes["bias"], len(x)) != row:
        whose = "the last axis' shape" if scale is None else "scale's shape"
        raise GraphValidationError(
            f"bias must have {whose} {list(row)}, leading extents of 1 aside, got {list(shapes['bias'])}"
        )
    if any(e != 1 for e in shapes["epsilon"]):
        raise GraphValidationError(
            f"epsilon must have one element, got shape {list(shapes['epsilon'])}; {_RMSNORM_ORDER}"
        )
    if attributes["norm_forward_phase"] is norm_forward_phase.NOT_SET:
        raise GraphValidationError("norm_forward_phase is NOT_SET; accepted: INFERENCE, TRAINING")
    out = {"Y": x}
    if attributes["norm_forward_phase"] is norm_forward_phase.TRAINING:
        out["inv_variance"] = _one_per_row(x, axes)
    return out


def _one_per_row(x: Shape, axes: tuple[int, ...]) -> Shape:
    return tuple(1 if axis in axes else e for axis, e in enumerate(x))


def _rmsnorm_absent(attributes: Attributes, inputs: frozenset[str]) -> frozenset[str]:
    training = attributes["norm_forward_phase"] is norm_forward_phase.TRAINING
    return frozenset() if training else frozenset({"inv_variance"})


def _rmsnorm(t, x, a) -> dict[str, object]:
    scale = x.get("scale")
    axes = rmsnorm_axes(x["input"].shape, None if scale is None else scale.shape)
    inverse = t.rsqrt(_mean(x["input"] * x["input"], axes) + x["epsilon"])
    y = x["input"] * inverse
    if scale is not None:
        y = y * scale
    if "bias" in x:
        y = y + x["bias"]
    return {"Y": y, "inv_variance": inverse}


def _rmsnorm_backward_shapes(shapes: Mapping[str, Shape], attributes: Attributes, _) -> dict[str, Shape]:
    x, scale = shapes["input"], shapes.get("scale")
    if shapes["grad"] != x:
        raise GraphValidationError(f"grad must have input's shape {list(x)}, got {list(shapes['grad'])}")
    axes = _normalized_axes(x, scale)
    if shapes["inv_variance"] != _one_per_row(x, axes):
        raise GraphValidationError(
            f"inv_variance must have input's extents and 1 along the normalized axes {list(axes)}, "
            f"{list(_one_per_row(x, axes))}, got {list(shapes['inv_variance'])}"
        )
    if scale is None and attributes["has_dbias"]:
        raise GraphValidationError("has_dbias=True without a scale; accepted: False, or a scale, whose shape DBias has")
    return {"DX": x} if scale is None else {"DX": x, "DScale": scale, "DBias": scale}


def _rmsnorm_backward_absent(attributes: Attributes, inputs: frozenset[str]) -> frozenset[str]:
    if "scale" not in inputs:
        return frozenset({"DScale", "DBias"})
    return frozenset() if attributes["has_dbias"] else frozenset({"DBias"})


def _rmsnorm_backward(t, x, a) -> dict[str, object]:
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


# Of no axes torch would take all.


def _mean(values, axes: tuple[int, ...]):
    return values.mean(dim=axes, keepdim=True) if axes else values


def _sum(values, axes: tuple[int, ...]):
    return values.sum(dim=axes, keepdim=True) if axes else values


@dataclass(frozen=True)
class Reduction:
    """How the elements of one axis become one. start: the result of none. of(t, elements): along the last axis."""

    start: float
    of: Callable[..., object]


_INFINITY = float("inf")

REDUCTIONS = {
    reduction_mode.ADD: Reduction(0.0, lambda t, x: x.sum(-1)),
    reduction_mode.MUL: Reduction(1.0, lambda t, x: x.prod(-1)),
    reduction_mode.MIN: Reduction(_INFINITY, lambda t, x: x.amin(-1)),
    reduction_mode.MAX: Reduction(-_INFINITY, lambda t, x: x.amax(-1)),
    reduction_mode.AMAX: Reduction(0.0, lambda t, x: x.abs().amax(-1)),
    reduction_mode.AVG: Reduction(float("nan"), lambda t, x: x.mean(-1)),
    reduction_mode.NORM1: Reduction(0.0, lambda t, x: x.abs().sum(-1)),
    reduction_mode.NORM2: Reduction(0.0, lambda t, x: (x * x).sum(-1).sqrt()),
    reduction_mode.MUL_NO_ZEROS: Reduction(1.0, lambda t, x: t.where(x == 0, t.ones_like(x), x).prod(-1)),
}


def _reduced_shape(shapes: Mapping[str, Shape], attributes: Attributes, wanted: Mapping[str, Shape]):
    x = shapes["input"]
    out = wanted.get("output", (1,) * len(x))
    if len(out) != len(x) or any(o not in (1, e) for o, e in zip(out, x, strict=True)):
        raise GraphValidationError(
            f"output must have the rank of input {list(x)} with each extent 1 or input's, got {list(out)}"
        )
    return {"output": out}


def _reduced_axes(attributes: Attributes, inputs: Mapping[str, Shape], outputs) -> dict[str, object]:
    dim, _ = outputs["output"]
    return {**attributes, "axes": tuple(axis for axis, extent in enumerate(dim) if extent == 1)}


def _reduction(t, x, a) -> dict[str, object]:
    values, how = x["input"], REDUCTIONS[a["mode"]]
    dim = [1 if axis in a["axes"] else e for axis, e in enumerate(values.shape)]
    kept = [axis for axis in range(len(dim)) if axis not in a["axes"]]
    count = math.prod(values.shape[axis] for axis in a["axes"])
    if count == 0:
        return {"output": values.new_full(dim, how.start)}
    rows = values.permute(*kept, *a["axes"]).reshape([*(dim[axis] for axis in kept), count])
    return {"output": how.of(t, rows).reshape(dim)}


@dataclass(frozen=True)
class BlockFormat:
    """What block_scale_quantize makes: types of elements and of a block's scale, the default first. Any element goes
    with any scale."""

    elements: tuple[data_type, ...]
    scales: tuple[data_type, ...]


BLOCKS = {
    # NVFP4, and with the other scale what FlashInfer makes beside it
    16: BlockFormat((data_type.FP4_E2M1,), (data_type.FP8_E4M3, data_type.FP8_E8M0)),
    # MXFP8 and MXFP4
    32: BlockFormat((data_type.FP8_E4M3, data_type.FP8_E5M2, data_type.FP4_E2M1), (data_type.FP8_E8M0,)),
}
"""By block size."""


def block_size(element: data_type) -> int | None:
    """Elements of the smallest block of this element type; None for a type that is not quantized in blocks."""
    return next((size for size, made in BLOCKS.items() if element in made.elements), None)


def quantize_axis(shape: Shape, attributes: Attributes) -> int:
    """The axis blocks run along: the one asked for, else the last that is not 1."""
    axis = attributes["axis"]
    if axis is None:
        wide = [i for i, e in enumerate(shape) if e != 1]
        return wide[-1] if wide else len(shape) - 1
    if not -len(shape) <= axis < len(shape):
        raise GraphValidationError(f"axis {axis} is outside the input's rank {len(shape)}")
    return axis % len(shape)


def _quantize_shapes(shapes: Mapping[str, Shape], attributes: Attributes, _) -> dict[str, Shape]:
    x, block = shapes["input"], attributes["block_size"]
    if block not in BLOCKS:
        raise GraphValidationError(f"block_size {block} is not supported; accepted: {sorted(BLOCKS)}")
    if attributes["transpose"]:
        raise GraphValidationError("transpose=True is not supported; accepted: False")
    axis = quantize_axis(x, attributes)
    if x[axis] % block:
        raise GraphValidationError(
            f"extent {x[axis]} of axis {axis} must be a multiple of block_size {block} (input {list(x)})"
        )
    return {"Y": x, "scale": tuple(e // block if i == axis else e for i, e in enumerate(x))}


def _quantize_stored(attributes: Attributes) -> dict[str, tuple[data_type, ...]]:
    made = BLOCKS[attributes["block_size"]]
    return {"Y": made.elements, "scale": made.scales}


def _quantize_frozen(attributes: Attributes, inputs: Mapping[str, Shape], outputs) -> dict[str, object]:
    made = BLOCKS[attributes["block_size"]]

    def chosen(port: str, accepted: tuple[data_type, ...]) -> data_type:
        _, declared = outputs[port]
        return declared if declared in accepted else accepted[0]  # who carries it on may declare any type

    return {
        **attributes,
        "axis": quantize_axis(inputs["input"], attributes),
        "element_type": chosen("Y", made.elements),
        "scale_type": chosen("scale", made.scales),
    }


def _quantize(t, x, a) -> dict[str, object]:
    values, element, axis = x["input"], a["element_type"], a["axis"]
    blocks = values.unflatten(axis, (-1, a["block_size"]))
    amax = blocks.abs().amax(dim=axis + 1)
    # The scale is used as stored, so that a reader multiplying by it gets what was meant.
    scale = amax * t.full_like(amax, element.facts.max).reciprocal()
    scale = rounding.round_to(t, scale, a["scale_type"])
    factor = scale.reciprocal().unsqueeze(axis + 1)
    scaled = blocks * factor
    if element is data_type.FP4_E2M1:
        scaled = rounding.to_e2m1_places(t, scaled)
    scaled = t.where(factor.isinf(), t.zeros_like(blocks), scaled)
    return {"Y": rounding.round_to(t, scaled, element).flatten(axis, axis + 1), "scale": scale}


def _larger(t, a, b):
    # Of two zeros the positive one, if there is one: torch does not say which.
    return t.where((a == 0) & (b == 0), a + b, t.maximum(a, b))


def _pointwise(name: str, doc: str, inputs: str, cuda: str, reference, *attributes: Attribute) -> Op:
    return Op(
        name=name,
        doc=doc,
        inputs=tuple(Port(p) for p in inputs.split()),
        outputs=(Port("output", label="OUT_0"),),
        infer=_broadcast,
        reference=lambda t, x, a: {"output": reference(t, *x.values(), *a.values())},
        attributes=attributes,
        cuda=cuda,
    )


def _number(name: str, default: float) -> Attribute:
    return Attribute(name, (float, int), default)


_GELU_TANH = 0.7978845608028654  # sqrt(2 / pi)
_GELU_TANH_FORM = "1.5957691216057308f * ({input} + 0.044715f * {input} * {input} * {input})"
_NORMAL_DENSITY = 0.3989422804014327  # 1 / sqrt(2 pi)

# Backward of activations, which may be asked for any input: slopes that are products of what grows and what
# vanishes get their input within bounds beyond which, in float64, what vanishes is zero.


def _relu_backward(t, loss, x, slope, low, high):
    below = slope * loss if slope else t.zeros_like(loss)
    return t.where(x > high, 0.0, t.where(x > low, loss, t.where(x <= low, below, x)))  # the last is NaN


def _sigmoid_slope(t, x):
    return t.sigmoid(x) * t.sigmoid(-x)  # 1 - sigmoid cancels


def _swish_slope(t, x):
    x = x.clamp(-1000, 1000)
    return t.sigmoid(x) * (1 + x * t.sigmoid(-x))


def _gelu_slope(t, x):
    x = x.clamp(-100, 100)
    density = _NORMAL_DENSITY * t.exp(-0.5 * x * x)
    return 0.5 * t.special.erfc(-(0.5**0.5) * x) + x * density


def _gelu_approx_tanh_slope(t, x):
    x = x.clamp(-100, 100)
    argument = 2 * _GELU_TANH * (x + 0.044715 * x * x * x)
    inner = 2 * _GELU_TANH * (1 + 3 * 0.044715 * x * x)
    return t.sigmoid(argument) * (1 + x * inner * t.sigmoid(-argument))


_TABLE = (
    Op(
        "rmsnorm",
        "RMS normalization: Y = input * inv_variance * scale (+ bias) with\n"
        "inv_variance = 1 / sqrt(mean(input^2) + epsilon) over the axes where scale varies\n"
        "(Zhang and Sennrich 2019, equation 4, with epsilon inside the root). Without a scale it is\n"
        "1 and the axis is the last one. bias has the extents of scale: input's along those axes,\n"
        "1 along others. Either may have a lower rank than input, whose last axes it then has.\n"
        "epsilon, one element, must be given. Returns [Y, inv_variance];\n"
        "inv_variance is None in the INFERENCE phase.",
        inputs=(Port("input"), Port("scale", optional=True), Port("epsilon"), Port("bias", optional=True)),
        outputs=(Port("Y"), Port("inv_variance", optional=True, label="INV_VARIANCE")),
        infer=_rmsnorm_shapes,
        reference=_rmsnorm,
        attributes=(Attribute("norm_forward_phase", (norm_forward_phase,), norm_forward_phase.NOT_SET, required=True),),
        absent=_rmsnorm_absent,
        order=_RMSNORM_ORDER,
    ),
    Op(
        "rmsnorm_backward",
        "Gradients of rmsnorm, from grad, that of Y, and what the TRAINING phase had and made. With\n"
        "n = input * inv_variance and g = grad * scale, over the same axes as rmsnorm:\n"
        "DX = inv_variance * (g - n * mean(g * n)), DScale = sum(grad * n) and DBias = sum(grad), the sums over\n"
        "all rows, in the shape of scale; their order is not specified. has_dbias must be given. Returns\n"
        "[DX, DScale, DBias]; DBias is None without has_dbias, and without a scale, which is 1 then,\n"
        "DScale is, too, and has_dbias must be False.",
        inputs=(Port("grad"), Port("input"), Port("scale", optional=True), Port("inv_variance")),
        outputs=(
            Port("DX"),
            Port("DScale", optional=True, label="Dscale"),
            Port("DBias", optional=True, label="Dbias"),
        ),
        infer=_rmsnorm_backward_shapes,
        reference=_rmsnorm_backward,
        attributes=(Attribute("has_dbias", (bool,), required=True),),
        absent=_rmsnorm_backward_absent,
    ),
    Op(
        "reduction",
        "One number per group of elements, by mode: ADD sum, MUL product, MIN, MAX, AMAX max|input|,\n"
        "AVG mean, NORM1 sum|input|, NORM2 sqrt(sum input^2), MUL_NO_ZEROS product of all but zeros.\n"
        "set_dim of the result says which axes are reduced: those where it is 1; unset, all of them.\n"
        "NaN stays NaN. The order of sums and products is not specified. Of no elements: 0, 1 for\n"
        "products, +-infinity for MIN and MAX, NaN for AVG. Stored as FLOAT unless set otherwise.",
        inputs=(Port("input"),),
        outputs=(Port("output", dtype=data_type.FLOAT, label="OUT_0"),),
        infer=_reduced_shape,
        frozen=_reduced_axes,
        reference=_reduction,
        attributes=(Attribute("mode", (reduction_mode,), reduction_mode.AMAX),),
    ),
    Op(
        "block_scale_quantize",
        "Block quantization: each block of block_size elements along axis (default: the last one that\n"
        "is not 1) gets the scale max|input| * (1 / largest finite element), rounded to the scale's\n"
        "type, and the elements are input * (1 / scale as stored), inverses and products in float32.\n"
        "block_size 16, NVFP4: FP4_E2M1 elements, FP8_E4M3 scales, or FP8_E8M0 if set.\n"
        "block_size 32, MXFP8 and MXFP4 (OCP Microscaling Formats 1.0): FP8_E4M3 elements, or\n"
        "FP8_E5M2 or FP4_E2M1 if set, FP8_E8M0 scales.\n"
        "FP8_E4M3 scales round to nearest even and saturate; a block whose scale rounds to zero becomes\n"
        "zeros. FP8_E8M0 scales round up to a power of two from 2^-127 to 2^127, as cuDNN's and\n"
        "FlashInfer's do, so that no element saturates; the conversion that OCP describes rounds down.\n"
        "Elements round to nearest even and saturate, those of FP4 after rounding to a multiple of\n"
        "2^-22 (2^-21 from 2 on, 2^-20 from 4 on). Returns [Y, scale].",
        inputs=(Port("input"),),
        outputs=(Port("Y"), Port("scale")),
        infer=_quantize_shapes,
        stored=_quantize_stored,
        frozen=_quantize_frozen,
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
    _pointwise("div", "a / b.", "a b", "({a} / {b})", lambda t, a, b: a / b),
    _pointwise("scale", "input * scale.", "input scale", "({input} * {scale})", lambda t, x, s: x * s),
    _pointwise(
        "max",
        "The larger of the two (0 is larger than -0); NaN if either is.",
        "input0 input1",
        "gf::max({input0}, {input1})",
        _larger,
    ),
    _pointwise(
        "min",
        "The smaller of the two (-0 is smaller than 0); NaN if either is.",
        "input0 input1",
        "gf::min({input0}, {input1})",
        lambda t, a, b: -_larger(t, -a, -b),
    ),
    _pointwise("abs", "|input|.", "input", "gf::abs({input})", lambda t, x: x.abs()),
    _pointwise("neg", "-input.", "input", "(-{input})", lambda t, x: -x),
    _pointwise("reciprocal", "1 / input.", "input", "(1.0f / {input})", lambda t, x: x.reciprocal()),
    _pointwise("sqrt", "Square root; NaN below 0.", "input", "sqrtf({input})", lambda t, x: x.sqrt()),
    _pointwise("rsqrt", "1 / sqrt(input).", "input", "gf::rsqrt({input})", lambda t, x: x.rsqrt()),
    _pointwise("exp", "e^input.", "input", "expf({input})", lambda t, x: x.exp()),
    _pointwise("log", "Natural logarithm; NaN below 0.", "input", "logf({input})", lambda t, x: x.log()),
    _pointwise("identity", "input unchanged (a place to change the data type).", "input", "{input}", lambda t, x: x),
    _pointwise(
        "relu",
        "min(input, upper_clip) above lower_clip, else lower_clip + negative_slope * (input - lower_clip).",
        "input",
        "gf::relu({input}, {negative_slope}, {lower_clip}, {upper_clip})",
        lambda t, x, slope, low, high: t.where(
            x > low, x.clamp(max=high), low + slope * (x - low) if slope else x.clamp(min=low) + 0.0
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
        f"({{input}} * gf::sigmoid({_GELU_TANH_FORM}))",
        lambda t, x: x * t.sigmoid(2 * _GELU_TANH * (x + 0.044715 * x * x * x)),
    ),
    _pointwise(
        "relu_backward",
        "Gradient of relu, from that of its result: loss where input is above lower_clip and at most\n"
        "upper_clip, negative_slope * loss up to lower_clip, 0 above upper_clip. NaN where input is.",
        "loss input",
        "gf::relu_backward({loss}, {input}, {negative_slope}, {lower_clip}, {upper_clip})",
        _relu_backward,
        _number("negative_slope", 0.0),
        _number("lower_clip", 0.0),
        _number("upper_clip", float("inf")),
    ),
    _pointwise(
        "sigmoid_backward",
        "loss * sigmoid(input) * sigmoid(-input).",
        "loss input",
        "gf::sigmoid_backward({loss}, {input})",
        lambda t, loss, x: loss * _sigmoid_slope(t, x),
    ),
    _pointwise(
        "tanh_backward",
        "loss * (1 - tanh(input)^2).",
        "loss input",
        # 1 - tanh^2, which cancels, is 4 sigmoid(2x) sigmoid(-2x).
        "(4.0f * gf::sigmoid_backward({loss}, 2.0f * {input}))",
        lambda t, loss, x: loss * (4 * _sigmoid_slope(t, 2 * x)),
    ),
    _pointwise(
        "swish_backward",
        "loss * s * (1 + swish_beta * input * (1 - s)) with s = sigmoid(swish_beta * input).",
        "loss input",
        "gf::swish_backward({loss}, {swish_beta} * {input}, gf::sigmoids({swish_beta} * {input}))",
        lambda t, loss, x, beta: loss * _swish_slope(t, beta * x),
        _number("swish_beta", 1.0),
    ),
    _pointwise(
        "gelu_backward",
        "loss * (Phi(input) + input * phi(input)) with the normal distribution function and its density.",
        "loss input",
        "gf::gelu_backward({loss}, {input})",
        lambda t, loss, x: loss * _gelu_slope(t, x),
    ),
    _pointwise(
        "gelu_approx_tanh_backward",
        "loss times the derivative of gelu_approx_tanh at input.",
        "loss input",
        f"gf::gelu_approx_tanh_backward({{loss}}, {{input}}, gf::sigmoids({_GELU_TANH_FORM}))",
        lambda t, loss, x: loss * _gelu_approx_tanh_slope(t, x),
    ),
)

OPS: dict[str, Op] = {op.name: op for op in _TABLE}
