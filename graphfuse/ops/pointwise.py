"""Pointwise ops, each with its formula in torch and in CUDA C++, cost, accuracy and gradient."""

import math
import operator
from typing import Any

from graphfuse.base.dtypes import data_type
from graphfuse.ops import pullback, references, shapes
from graphfuse.ops.op import Attribute, Cost, Op, Port
from graphfuse.ops.pullback import JUMPS, NO_SECOND, NoRule, Rule, by_op, by_output, negated, passed, times


def _pointwise(
    name: str,
    doc: str,
    inputs: str,
    cuda: str,
    reference,
    *attributes: Attribute,
    cost: Cost = Cost.FUNCTION,
    chooses: str = "",
    recompute: Rule | None = None,
    **more: Any,
) -> Op:
    """Entry of a pointwise op. inputs, chooses: names of ports. more: further fields of the entry."""
    return Op(
        name=name,
        doc=doc,
        inputs=tuple(Port(p) for p in inputs.split()),
        infer=shapes.broadcast,
        reference=lambda t, x, a: {"output": reference(t, *x.values(), *a.values())},
        attributes=attributes,
        cuda=cuda,
        cost=cost,
        chooses=tuple(chooses.split()),
        recompute={} if recompute is None else {"output": recompute},
        **more,
    )


def _over_b(p: pullback.Pullback, dividend: object) -> object:
    """`dividend` divided by "b", whose reciprocal is computed once for all rules."""
    return p.graph.mul(dividend, p.once(_reciprocal_of_b))


def _reciprocal_of_b(p: pullback.Pullback) -> object:
    return pullback.reciprocal(p, p["b"])


def _cubed(p: pullback.Pullback, port: str) -> object:
    return p.graph.mul(p[port], p.graph.mul(p[port], p[port]))


def _opened(p: pullback.Pullback) -> object:
    """The sigmoid by which swish multiplies its input."""
    beta = _beta(p)
    return p.graph.sigmoid(p["input"] if beta == 1.0 else p.graph.mul(p["input"], beta))


def _slope_of_swish(p: pullback.Pullback) -> object:
    beta, opened = _beta(p), p.once(_opened)
    closed = p.graph.mul(p.graph.sub(1.0, opened), p["output"])
    return p.graph.add(closed if beta == 1.0 else p.graph.mul(closed, beta), opened)


def _beta(p: pullback.Pullback) -> float:
    return p.attributes.get("swish_beta", 1.0)


def _number(name: str, default: float) -> Attribute:
    return Attribute(name, (float, int), default)


def _function(name: str, doc: str, cuda: str, rule: Rule | NoRule, *, reference=None, **more: Any) -> Op:
    """Entry of a function of one number with the same name in torch and aten. rule: of its gradient."""
    return _pointwise(
        name,
        doc,
        "input",
        cuda,
        reference or (lambda t, x: getattr(t, name)(x)),
        vjp={"input": rule},
        aten=(f"{name}.default self:input",),
        **more,
    )


def _slope(of: str, doc: str, cuda: str, reference, *attributes: Attribute, note: str = "", second=NO_SECOND) -> Op:
    """Entry of the gradient of a function of one number, from that of its result. second: rule of the gradient of this
    gradient with respect to the number."""
    name = f"{of}_backward"
    vjp = {"loss": by_op(name), "input": second}
    return _pointwise(name, doc, "loss input", cuda, reference, *attributes, note=note, vjp=vjp)


def _comparison(name: str, sign: str, reference, aten: str, commutative: bool = False) -> Op:
    return _pointwise(
        name,
        f"1 if input {sign} comparison, else 0: a mask, stored as BOOLEAN if its data type is set so. NaN is\n"
        f"{'unequal to' if sign == '!=' else 'in no order with'} everything.",
        "input comparison",
        f"({{input}} {sign} {{comparison}} ? 1.0f : 0.0f)",
        lambda t, a, b: reference(a, b).to(a.dtype),
        cost=Cost.ARITHMETIC,
        commutative=commutative,
        integers=True,
        vjp=JUMPS,
        aten=tuple(f"{aten}.{kind} self:input other:comparison" for kind in ("Tensor", "Scalar")),
    )


def _logical(name: str, doc: str, inputs: str, form: str, reference, *aten: str) -> Op:
    return _pointwise(
        name,
        f"1 if {doc}, else 0: a mask, stored as BOOLEAN if its data type is set so. NaN is not 0.",
        inputs,
        f"({form} ? 1.0f : 0.0f)",
        reference,
        cost=Cost.ARITHMETIC,
        commutative=len(inputs.split()) == 2,
        integers=True,
        vjp=JUMPS,
        aten=aten,
    )


def _whole(p: pullback.Pullback) -> object:
    """The factor of "input1" in the multiple that mod subtracts."""
    return p.graph.div(p.graph.sub(p["input0"], p["output"]), p["input1"])


def _of_base(p: pullback.Pullback) -> object:
    base, exponent = p["input0"], p["input1"]
    if isinstance(exponent, int | float):
        return p.graph.mul(p.grad, p.graph.mul(p.graph.pow(base, exponent - 1), exponent)) if exponent else None
    slope = p.graph.mul(p.graph.pow(base, p.graph.sub(exponent, 1.0)), exponent)
    return p.graph.mul(p.grad, p.graph.binary_select(0.0, slope, p.graph.cmp_eq(exponent, 0.0)))


def _of_exponent(p: pullback.Pullback) -> object:
    base = p["input0"]
    if isinstance(base, int | float):
        # A base without a logarithm gives NaN, except for 0, whose powers are 0.
        slope = math.log(base) if base > 0 else 0.0 if base == 0 else math.nan
        return p.graph.mul(p.grad, p.graph.mul(p["output"], slope))
    none = p.graph.logical_and(p.graph.cmp_eq(base, 0.0), p.graph.cmp_ge(p["input1"], 0.0))
    return p.graph.mul(p.grad, p.graph.binary_select(0.0, p.graph.mul(p["output"], p.graph.log(base)), none))


def _slope_of_erf(p: pullback.Pullback) -> object:
    return p.graph.mul(p.graph.exp(p.graph.neg(p.graph.mul(p["input"], p["input"]))), _TWO_BY_ROOT_PI)


_CLIPS = (_number("negative_slope", 0.0), _number("lower_clip", 0.0), _number("upper_clip", float("inf")))
_TWO_BY_ROOT_PI = 1.1283791670955126

_GELU_TANH_FORM = "1.5957691216057308f * ({input} + 0.044715f * {input} * {input} * {input})"
_SIGMOID_NOTE = "sigmoid of x: relative error below 5e-7 + 8e-8 |x|; below x = -87 absolute, below 1.2e-38"

TABLE = (
    _pointwise(
        "add",
        "a + b.",
        "a b",
        "({a} + {b})",
        lambda t, a, b: a + b,
        packed="gf::sums",
        cost=Cost.ARITHMETIC,
        commutative=True,
        integers=True,
        vjp={"a": passed, "b": passed},
        aten=("add.Tensor self:a other:b", "add.Scalar self:a other:b"),
    ),
    _pointwise(
        "sub",
        "a - b.",
        "a b",
        "({a} - {b})",
        lambda t, a, b: a - b,
        packed="gf::differences",
        cost=Cost.ARITHMETIC,
        integers=True,
        vjp={"a": passed, "b": negated},
        aten=(
            "sub.Tensor self:a other:b",
            "sub.Scalar self:a other:b",
            "rsub.Tensor self:b other:a",
            "rsub.Scalar self:b other:a",
        ),
    ),
    _pointwise(
        "mul",
        "a * b.",
        "a b",
        "({a} * {b})",
        lambda t, a, b: a * b,
        packed="gf::products",
        cost=Cost.ARITHMETIC,
        commutative=True,
        integers=True,
        vjp={"a": times("b"), "b": times("a")},
        aten=("mul.Tensor self:a other:b", "mul.Scalar self:a other:b"),
    ),
    _pointwise(
        "div",
        "a / b.",
        "a b",
        "({a} / {b})",
        lambda t, a, b: a / b,
        vjp={
            "a": lambda p: _over_b(p, p.grad),
            "b": lambda p: p.graph.neg(_over_b(p, p.graph.mul(p.grad, p["output"]))),
        },
        recompute=lambda p: _over_b(p, p["a"]),
        aten=("div.Tensor self:a other:b", "div.Scalar self:a other:b"),
    ),
    _pointwise(
        "add_square",
        "a + b * b.",
        "a b",
        "({a} + {b} * {b})",
        lambda t, a, b: a + b * b,
        cost=Cost.ARITHMETIC,
        integers=True,
        vjp={"a": passed, "b": lambda p: p.graph.mul(p.grad, p.graph.mul(p["b"], 2.0))},
    ),
    _pointwise(
        "mod",
        "The remainder of input0 / input1, with the sign of input0; NaN if input1 is 0.",
        "input0 input1",
        "fmodf({input0}, {input1})",
        # torch's vectorized form returns NaN for large quotients.
        lambda t, a, b: references.element_by_element(t, t.fmod, a, b),
        vjp={"input0": passed, "input1": lambda p: p.graph.neg(p.graph.mul(p.grad, _whole(p)))},
        aten=("fmod.Tensor self:input0 other:input1", "fmod.Scalar self:input0 other:input1"),
    ),
    _pointwise(
        "pow",
        "input0 to the power of input1; NaN for negative input0 unless input1 is whole.",
        "input0 input1",
        "powf({input0}, {input1})",
        # torch's vectorized form has other last bits.
        lambda t, a, b: references.element_by_element(t, t.pow, a, b),
        note="relative error below 5e-7",
        vjp={"input0": _of_base, "input1": _of_exponent},
        aten=(
            "pow.Tensor_Tensor self:input0 exponent:input1",
            "pow.Scalar self:input0 exponent:input1",
        ),
    ),
    _pointwise(
        "scale",
        "input * scale.",
        "input scale",
        "({input} * {scale})",
        lambda t, x, s: x * s,
        cost=Cost.ARITHMETIC,
        integers=True,
        vjp={"input": times("scale"), "scale": times("input")},
    ),
    _pointwise(
        "max",
        "The larger of the two (0 is larger than -0); NaN if either is.",
        "input0 input1",
        "gf::max({input0}, {input1})",
        references.larger,
        commutative=True,
        integers=True,
        chooses="input0 input1",
        vjp={
            "input0": pullback.larger("input0", "input1", "cmp_lt"),
            "input1": pullback.larger("input1", "input0", "cmp_lt"),
        },
        aten=("maximum.default self:input0 other:input1",),
    ),
    _pointwise(
        "min",
        "The smaller of the two (-0 is smaller than 0); NaN if either is.",
        "input0 input1",
        "gf::min({input0}, {input1})",
        references.smaller,
        commutative=True,
        integers=True,
        chooses="input0 input1",
        vjp={
            "input0": pullback.larger("input0", "input1", "cmp_gt"),
            "input1": pullback.larger("input1", "input0", "cmp_gt"),
        },
        aten=("minimum.default self:input0 other:input1",),
    ),
    _function(
        "abs",
        "|input|.",
        "gf::abs({input})",
        lambda p: p.graph.mul(p.grad, pullback.sign(p, p["input"])),
        integers=True,
        chooses="input",
    ),
    _function("neg", "-input.", "(-{input})", negated, cost=Cost.ARITHMETIC, integers=True, chooses="input"),
    _function(
        "reciprocal",
        "1 / input.",
        "(1.0f / {input})",
        lambda p: p.graph.neg(p.graph.mul(p.grad, p.graph.mul(p["output"], p["output"]))),
    ),
    _function(
        "sqrt",
        "Square root; NaN below 0.",
        "sqrtf({input})",
        lambda p: p.graph.mul(p.grad, p.graph.div(0.5, p["output"])),
    ),
    _function(
        "rsqrt",
        "1 / sqrt(input).",
        "gf::rsqrt({input})",
        lambda p: p.graph.mul(p.grad, p.graph.mul(_cubed(p, "output"), -0.5)),
    ),
    _function("exp", "e^input.", "expf({input})", times("output")),
    _function("log", "Natural logarithm; NaN below 0.", "logf({input})", lambda p: p.graph.div(p.grad, p["input"])),
    _function(
        "exp2",
        "2^input.",
        "exp2f({input})",
        lambda p: p.graph.mul(p.grad, p.graph.mul(p["output"], math.log(2))),
        # torch's vectorized form has other last bits.
        reference=lambda t, x: references.element_by_element(t, t.exp2, x),
    ),
    _function(
        "log2",
        "Logarithm to base 2; NaN below 0.",
        "log2f({input})",
        lambda p: p.graph.div(p.grad, p.graph.mul(p["input"], math.log(2))),
    ),
    _function(
        "log1p",
        "Natural logarithm of 1 + input; NaN below -1. The sum is not rounded.",
        "log1pf({input})",
        lambda p: p.graph.div(p.grad, p.graph.add(p["input"], 1.0)),
    ),
    _function(
        "expm1",
        "e^input - 1, without cancellation near 0.",
        "expm1f({input})",
        lambda p: p.graph.mul(p.grad, p.graph.add(p["output"], 1.0)),
    ),
    _function("ceil", "The smallest whole number not below input.", "ceilf({input})", JUMPS),
    _function("floor", "The largest whole number not above input.", "floorf({input})", JUMPS),
    _function("round", "The nearest whole number; ties to even.", "rintf({input})", JUMPS),
    _function("trunc", "input rounded toward zero to a whole number.", "truncf({input})", JUMPS),
    _function(
        "sin",
        "Sine of an angle in radians; NaN for infinities.",
        "gf::sin({input})",
        lambda p: p.graph.mul(p.grad, p.graph.cos(p["input"])),
        note="relative error below 3e-7",
    ),
    _function(
        "cos",
        "Cosine of an angle in radians; NaN for infinities.",
        "gf::cos({input})",
        lambda p: p.graph.neg(p.graph.mul(p.grad, p.graph.sin(p["input"]))),
        note="relative error below 3e-7",
    ),
    _function(
        "tan",
        "Tangent of an angle in radians; NaN for infinities.",
        "gf::tan({input})",
        lambda p: p.graph.mul(p.grad, p.graph.add(p.graph.mul(p["output"], p["output"]), 1.0)),
        note="relative error below 5e-7",
    ),
    _function(
        "erf",
        "Error function: 2 / sqrt(pi) times the integral of exp(-t^2) from 0 to input.",
        "erff({input})",
        lambda p: p.graph.mul(p.grad, _slope_of_erf(p)),
    ),
    _pointwise(
        "identity",
        "input unchanged, for a change of data type.",
        "input",
        "{input}",
        lambda t, x: x,
        cost=Cost.COPY,
        integers=True,
        chooses="input",
        vjp={"input": passed},
        aten=("clone.default self:input",),
    ),
    _pointwise(
        "relu",
        "min(input, upper_clip) above lower_clip, else lower_clip + negative_slope * (input - lower_clip).",
        "input",
        "gf::relu({input}, {negative_slope}, {lower_clip}, {upper_clip})",
        lambda t, x, slope, low, high: t.where(
            x > low, x.clamp(max=high), low + slope * (x - low) if slope else x.clamp(min=low) + 0.0
        ),
        *_CLIPS,
        vjp={"input": by_op("relu_backward")},
        aten=("relu.default self:input", "leaky_relu.default self:input negative_slope:negative_slope"),
    ),
    _function(
        "sigmoid",
        "1 / (1 + exp(-input)).",
        "gf::sigmoid({input})",
        by_output("sigmoid_backward", lambda p: p.graph.mul(p.graph.sub(1.0, p["output"]), p["output"])),
        reference=references.sigmoid,
        note=_SIGMOID_NOTE,
    ),
    _function(
        "tanh",
        "Hyperbolic tangent.",
        "tanhf({input})",
        by_op("tanh_backward"),
        narrow={data_type.BFLOAT16: "gf::tanh_of_bf16({input})"},
    ),
    _pointwise(
        "swish",
        "input * sigmoid(swish_beta * input); SiLU when swish_beta is 1.",
        "input",
        "({input} * gf::sigmoid({swish_beta} * {input}))",
        lambda t, x, beta: x * references.sigmoid(t, beta * x),
        _number("swish_beta", 1.0),
        note=_SIGMOID_NOTE,
        vjp={"input": by_output("swish_backward", _slope_of_swish)},
        recompute=lambda p: p.graph.mul(p["input"], p.once(_opened)),
        aten=("silu.default self:input",),
    ),
    _pointwise(
        "gelu",
        "input * Phi(input) with the normal distribution function (the erf form).",
        "input",
        "gf::gelu({input})",
        lambda t, x: 0.5 * x * t.special.erfc(-(0.5**0.5) * x),
        narrow={data_type.BFLOAT16: "gf::gelu_of_bf16({input})"},
        note="relative error below 1e-6 + 1e-7 x^2; below x = -13 absolute, below 1e-36",
        vjp={"input": by_op("gelu_backward")},
        aten=("gelu.default self:input approximate=none",),
    ),
    _pointwise(
        "gelu_approx_tanh",
        "0.5 * input * (1 + tanh(sqrt(2/pi) * (input + 0.044715 * input^3))).",
        "input",
        # (1 + tanh u) / 2 is sigmoid(2u), which has no cancellation for negative input.
        f"({{input}} * gf::sigmoid({_GELU_TANH_FORM}))",
        lambda t, x: x * references.sigmoid(t, 2 * references.GELU_TANH * (x + 0.044715 * x * x * x)),
        note=_SIGMOID_NOTE,
        vjp={"input": by_op("gelu_approx_tanh_backward")},
        aten=("gelu.default self:input approximate=tanh",),
    ),
    _pointwise(
        "elu",
        "input above 0, else elu_alpha * (exp(input) - 1).",
        "input",
        "gf::elu({input}, {elu_alpha})",
        lambda t, x, alpha: t.where(x > 0, x, alpha * t.expm1(x)),
        _number("elu_alpha", 1.0),
        vjp={"input": by_op("elu_backward")},
        aten=("elu.default self:input alpha:elu_alpha",),
    ),
    _pointwise(
        "softplus",
        "log(1 + exp(softplus_beta * input)) / softplus_beta.",
        "input",
        "(gf::softplus({softplus_beta} * {input}) / {softplus_beta})",
        lambda t, x, beta: references.softplus(t, beta * x) / beta,
        _number("softplus_beta", 1.0),
        vjp={"input": by_op("softplus_backward")},
        aten=("softplus.default self:input beta:softplus_beta",),
    ),
    _slope(
        "relu",
        "Gradient of relu, from that of its result: loss where input is above lower_clip and at most\n"
        "upper_clip, negative_slope * loss up to lower_clip, 0 above upper_clip. NaN if input is.",
        "gf::relu_backward({loss}, {input}, {negative_slope}, {lower_clip}, {upper_clip})",
        references.relu_backward,
        *_CLIPS,
        second=JUMPS,
    ),
    _slope(
        "sigmoid",
        "loss * sigmoid(input) * sigmoid(-input).",
        "gf::sigmoid_backward({loss}, {input})",
        lambda t, loss, x: loss * references.sigmoid_slope(t, x),
        note=_SIGMOID_NOTE,
    ),
    _slope(
        "tanh",
        "loss * (1 - tanh(input)^2).",
        # 1 - tanh^2, which cancels, is 4 sigmoid(2x) sigmoid(-2x).
        "(4.0f * gf::sigmoid_backward({loss}, 2.0f * {input}))",
        lambda t, loss, x: loss * (4 * references.sigmoid_slope(t, 2 * x)),
        note=_SIGMOID_NOTE,
    ),
    _slope(
        "swish",
        "loss * s * (1 + swish_beta * input * (1 - s)) with s = sigmoid(swish_beta * input).",
        "gf::swish_backward({loss}, {swish_beta} * {input}, gf::sigmoids({swish_beta} * {input}))",
        lambda t, loss, x, beta: loss * references.swish_slope(t, beta * x),
        _number("swish_beta", 1.0),
        note=_SIGMOID_NOTE,
    ),
    _slope(
        "elu",
        "Gradient of elu, from that of its result: loss where input is above 0, else loss * elu_alpha * exp(input).",
        "gf::elu_backward({loss}, {input}, {elu_alpha})",
        lambda t, loss, x, alpha: t.where(x > 0, loss, loss * (alpha * t.exp(x))),
        _number("elu_alpha", 1.0),
    ),
    _slope(
        "softplus",
        "loss * sigmoid(softplus_beta * input).",
        "({loss} * gf::sigmoid({softplus_beta} * {input}))",
        lambda t, loss, x, beta: loss * references.sigmoid(t, beta * x),
        _number("softplus_beta", 1.0),
        note=_SIGMOID_NOTE,
    ),
    _slope(
        "gelu",
        "loss * (Phi(input) + input * phi(input)) with the normal distribution function and its density.",
        "gf::gelu_backward({loss}, {input})",
        lambda t, loss, x: loss * references.gelu_slope(t, x),
    ),
    _slope(
        "gelu_approx_tanh",
        "loss times the derivative of gelu_approx_tanh at input.",
        f"gf::gelu_approx_tanh_backward({{loss}}, {{input}}, gf::sigmoids({_GELU_TANH_FORM}))",
        lambda t, loss, x: loss * references.gelu_approx_tanh_slope(t, x),
        note=_SIGMOID_NOTE,
    ),
    Op(
        "gen_index",
        "The index of each element of input along axis, from 0, in the compute data type: FLOAT is exact up to 2^24.\n"
        "Only the shape of input is used. A negative axis counts from the last.",
        inputs=(Port("input"),),
        infer=shapes.indexed,
        frozen=shapes.axis_frozen,
        reference=references.gen_index,
        attributes=(Attribute("axis", (int,), required=True),),
        vjp=JUMPS,
    ),
    _comparison("cmp_eq", "==", operator.eq, "eq", commutative=True),
    _comparison("cmp_neq", "!=", operator.ne, "ne", commutative=True),
    _comparison("cmp_gt", ">", operator.gt, "gt"),
    _comparison("cmp_ge", ">=", operator.ge, "ge"),
    _comparison("cmp_lt", "<", operator.lt, "lt"),
    _comparison("cmp_le", "<=", operator.le, "le"),
    _logical(
        "logical_and",
        "neither a nor b is 0",
        "a b",
        "{a} != 0.0f && {b} != 0.0f",
        lambda t, a, b: t.logical_and(a, b).to(a.dtype),
        "logical_and.default self:a other:b",
        "bitwise_and.Tensor self:a other:b",
    ),
    _logical(
        "logical_or",
        "a or b is not 0",
        "a b",
        "{a} != 0.0f || {b} != 0.0f",
        lambda t, a, b: t.logical_or(a, b).to(a.dtype),
        "logical_or.default self:a other:b",
        "bitwise_or.Tensor self:a other:b",
    ),
    _logical(
        "logical_not",
        "input is 0",
        "input",
        "{input} == 0.0f",
        lambda t, x: t.logical_not(x).to(x.dtype),
        "logical_not.default self:input",
        "bitwise_not.default self:input",
    ),
    _pointwise(
        "binary_select",
        "input0 where mask is not 0, else input1.",
        "input0 input1 mask",
        "({mask} != 0.0f ? {input0} : {input1})",
        lambda t, a, b, mask: t.where(mask != 0, a, b),
        cost=Cost.ARITHMETIC,
        integers=True,
        chooses="input0 input1",
        vjp={
            "input0": lambda p: p.graph.binary_select(p.grad, 0.0, p["mask"]),
            "input1": lambda p: p.graph.binary_select(0.0, p.grad, p["mask"]),
            "mask": JUMPS,
        },
        aten=(
            "where.self condition:mask self:input0 other:input1",
            "where.ScalarOther condition:mask self:input0 other:input1",
            "where.ScalarSelf condition:mask self:input0 other:input1",
            "where.Scalar condition:mask self:input0 other:input1",
            "masked_fill.Scalar self:input1 mask:mask value:input0",
            "masked_fill.Tensor self:input1 mask:mask value:input0",
        ),
    ),
)
