"""Norms of rows, and their gradients."""

import functools
from collections.abc import Callable, Mapping

from graphfuse.base.enums import norm_forward_phase
from graphfuse.ops import shapes
from graphfuse.ops.expansion import Expansion, Join, RowArithmetic, Values
from graphfuse.ops.op import Attribute, Attributes, Op, Port, Shape
from graphfuse.ops.pullback import NO_SECOND, NoRule, Pullback, Rule


def _of_scale(dims: Mapping[str, Shape], attributes: Attributes) -> tuple[int, ...]:
    return shapes.rmsnorm_axes(next(iter(dims.values())), dims.get("scale"))


def _of_samples(dims: Mapping[str, Shape], attributes: Attributes) -> tuple[int, ...]:
    return shapes.adalayernorm_axes(dims["input"], dims["scale"])


def _inverse(e: RowArithmetic, value: object, epsilon: object) -> object:
    """1 / sqrt(mean(value^2) + epsilon). Mean and sum are rounded once, together."""
    squares = e.reduce(Join.SUM, e.op("mul", a=value, b=value))
    return e.op("rsqrt", input=e.op("fma", a=squares, b=1.0 / e.columns, c=epsilon))


def _rmsnorm(e: RowArithmetic, x: Values, a: Attributes) -> Values:
    inverse = _inverse(e, x["input"], x["epsilon"])
    y = e.op("mul", a=x["input"], b=inverse)
    if "scale" in x and "bias" in x:
        y = e.op("fma", a=y, b=x["scale"], c=x["bias"])
    elif "scale" in x:
        y = e.op("mul", a=y, b=x["scale"])
    elif "bias" in x:
        y = e.op("add", a=y, b=x["bias"])
    return {"inv_variance": inverse, "Y": y}


def layernorm(e: RowArithmetic, x: Values, a: Attributes) -> Values:
    mean = e.mean(x["input"])
    centred = e.op("sub", a=x["input"], b=mean)
    inverse = _inverse(e, centred, x["epsilon"])
    y = e.op("mul", a=centred, b=inverse)
    if "scale" in x:
        y = e.op("mul", a=y, b=x["scale"])
    if "bias" in x:
        y = e.op("add", a=y, b=x["bias"])
    return {"mean": mean, "inv_variance": inverse, "Y": y}


def _rmsnorm_backward(e: RowArithmetic, x: Values, a: Attributes) -> Values:
    normal = e.op("mul", a=x["input"], b=x["inv_variance"])
    scaled = e.op("mul", a=x["grad"], b=x["scale"]) if "scale" in x else x["grad"]
    mean = e.mean(e.op("mul", a=scaled, b=normal))
    dx = e.op("mul", a=x["inv_variance"], b=e.op("fnma", c=scaled, a=normal, b=mean))
    return {"DX": dx, "DScale": (x["grad"], normal), "DBias": (x["grad"],)}


def layernorm_backward(e: RowArithmetic, x: Values, a: Attributes) -> Values:
    normal = e.op("mul", a=e.op("sub", a=x["input"], b=x["mean"]), b=x["inv_variance"])
    scaled = e.op("mul", a=x["grad"], b=x["scale"]) if "scale" in x else x["grad"]
    mean, along = e.mean(scaled), e.mean(e.op("mul", a=scaled, b=normal))
    centred = e.op("fnma", c=e.op("sub", a=scaled, b=mean), a=normal, b=along)
    dx = e.op("mul", a=centred, b=x["inv_variance"])
    return {"DX": dx, "DScale": (x["grad"], normal), "DBias": (x["grad"],)}


def _normal(p: Pullback) -> object:
    """The norm without scale and bias, from the kept statistics."""
    x = p.graph.sub(p["input"], p["mean"]) if "mean" in p.outputs else p["input"]
    return p.graph.mul(x, p["inv_variance"])


def _recomputed(p: Pullback) -> object:
    y = p.graph.mul(_normal(p), _weight(p, "scale")) if "scale" in p else _normal(p)
    return p.graph.add(y, _weight(p, "bias")) if "bias" in p else y


def _weight(p: Pullback, port: str) -> object:
    """Scale or bias with the rank of input."""
    dim, rank = p.dim_of(port), len(p.dim_of("input"))
    return p[port] if len(dim) == rank else p.graph.reshape(p[port]).set_dim(shapes.aligned(dim, rank))


def _with_statistics(p: Pullback, dx: object | None) -> object:
    """The gradient of input: `dx`, from that of Y, plus those from gradients of statistics."""
    found, g = [] if dx is None else [dx], p.graph
    if "inv_variance" in p.grads:
        cubed = g.mul(p["inv_variance"], g.mul(p["inv_variance"], p["inv_variance"]))
        x = g.sub(p["input"], p["mean"]) if "mean" in p.outputs else p["input"]
        found.append(g.mul(x, g.mul(g.mul(p.grads["inv_variance"], cubed), -1.0 / p.elements("inv_variance"))))
    if "mean" in p.grads:
        found.append(g.mul(p.grads["mean"], 1.0 / p.elements("mean")))
    return functools.reduce(g.add, found)


def gradients(
    backward: str, *statistics: str, sums: bool = True, **attributes: Callable[[Pullback], object]
) -> dict[str, Rule]:
    """Rules of a norm whose gradients an op of the table computes from grad, input, scale and statistics.

    backward: name of that op. sums: whether it computes the gradients of scale and bias, too, in one kernel with that
    of input. If not, rules build them, and they are summed to the shapes of scale and bias like any other gradient.
    """

    def draw(p: Pullback) -> dict[str, object]:
        given = {"scale": p.get("scale")} | {name: p[name] for name in statistics}
        more = {name: value(p) for name, value in attributes.items()}
        made = getattr(p.graph, backward)(p.whole("Y"), p["input"], **given, **more)
        return dict(zip(("DX", "DScale", "DBias"), made, strict=True))

    def of_weight(name: str, each: Rule) -> Rule:
        def rule(p: Pullback) -> object | None:
            if "Y" not in p.grads:
                return None  # statistics do not depend on weights
            return p.once(draw)[name] if sums and "scale" in p else each(p)

        return rule

    return {
        "input": lambda p: _with_statistics(p, p.once(draw)["DX"] if "Y" in p.grads else None),
        "scale": of_weight("DScale", lambda p: p.graph.mul(p.whole("Y"), _normal(p))),
        "bias": of_weight("DBias", lambda p: p.whole("Y")),
        "epsilon": NoRule("epsilon is a constant of the norm"),
    }


_OF_RMSNORM = gradients("rmsnorm_backward", "inv_variance", has_dbias=lambda p: "bias" in p.requested and "scale" in p)
OF_LAYERNORM = gradients("layernorm_backward", "mean", "inv_variance")
RECOMPUTE = {"Y": _recomputed}
TRAINING = {"norm_forward_phase": norm_forward_phase.TRAINING}

EPSILON, WEIGHTS = frozenset({"epsilon"}), frozenset({"scale", "bias"})
MOMENTS = frozenset({"mean", "inv_variance"})
PHASE = Attribute("norm_forward_phase", (norm_forward_phase,), norm_forward_phase.NOT_SET, required=True)

forward = functools.partial(
    Op,
    outputs=(
        Port("Y"),
        Port("mean", optional=True, label="MEAN"),
        Port("inv_variance", optional=True, label="INV_VARIANCE"),
    ),
    attributes=(PHASE,),
    absent=shapes.norm_absent,
    order=shapes.LAYERNORM_ORDER,
    recompute=RECOMPUTE,
    training=TRAINING,
)
backward = functools.partial(
    Op,
    inputs=(Port("grad"), Port("input"), Port("scale"), Port("mean"), Port("inv_variance")),
    outputs=(
        Port("DX"),
        Port("DScale", label="DSCALE", over_rows=True),
        Port("DBias", label="DBIAS", over_rows=True),
    ),
    vjp=NO_SECOND,
)

TABLE = (
    forward(
        "rmsnorm",
        "RMS normalization: Y = input * inv_variance * scale (+ bias) with\n"
        "inv_variance = 1 / sqrt(mean(input^2) + epsilon) over the axes where scale varies\n"
        "(Zhang and Sennrich 2019, equation 4, with epsilon inside the root). Without a scale it is\n"
        "1 and the axis is the last one. bias has the extents of scale: input's along those axes,\n"
        "1 along others. Either may have a lower rank than input, and then has its last axes.\n"
        "epsilon, one element, must be given. Returns [Y, inv_variance];\n"
        "inv_variance is None in the INFERENCE phase.",
        inputs=(Port("input"), Port("scale", optional=True), Port("epsilon"), Port("bias", optional=True)),
        outputs=(Port("Y"), Port("inv_variance", optional=True, label="INV_VARIANCE")),
        infer=shapes.rmsnorm,
        expansion=Expansion(_rmsnorm, _of_scale, EPSILON, WEIGHTS),
        order=shapes.RMSNORM_ORDER,
        vjp=_OF_RMSNORM,
    ),
    forward(
        "layernorm",
        "Layer normalization: (input - mean) * inv_variance * scale + bias, over the axes along which scale\n"
        "varies, those of rmsnorm without a scale; mean is that of input, inv_variance is\n"
        "1 / sqrt(mean((input - mean)^2) + epsilon), of the differences themselves. scale and bias may be left\n"
        "out, then 1 and 0. norm_forward_phase must be given. Returns [Y, mean, inv_variance], the last two None\n"
        "in INFERENCE.",
        inputs=(Port("input"), Port("scale", optional=True), Port("bias", optional=True), Port("epsilon")),
        infer=shapes.layernorm,
        expansion=Expansion(layernorm, _of_scale, EPSILON, WEIGHTS),
        vjp=OF_LAYERNORM,
    ),
    backward(
        "rmsnorm_backward",
        "Gradients of rmsnorm, from grad, that of Y, and inputs and outputs of the TRAINING phase. With\n"
        "n = input * inv_variance and g = grad * scale, over the same axes as rmsnorm:\n"
        "DX = inv_variance * (g - n * mean(g * n)), DScale = sum(grad * n) and DBias = sum(grad), the sums over\n"
        "all rows, in the shape of scale; their order is not specified. has_dbias must be given. Returns\n"
        "[DX, DScale, DBias]; DBias is None without has_dbias, and without a scale, which is 1 then,\n"
        "DScale is, too, and has_dbias must be False.",
        inputs=(Port("grad"), Port("input"), Port("scale", optional=True), Port("inv_variance")),
        outputs=(
            Port("DX"),
            Port("DScale", optional=True, label="Dscale", over_rows=True),
            Port("DBias", optional=True, label="Dbias", over_rows=True),
        ),
        infer=shapes.rmsnorm_backward,
        expansion=Expansion(_rmsnorm_backward, _of_scale, of_columns=WEIGHTS, of_rows=frozenset({"inv_variance"})),
        attributes=(Attribute("has_dbias", (bool,), required=True),),
        absent=shapes.norm_backward_absent,
    ),
    backward(
        "layernorm_backward",
        "Gradients of layernorm, from grad, that of Y, and inputs and outputs of the TRAINING phase. With\n"
        "n = (input - mean) * inv_variance and g = grad * scale, over the same axes as layernorm:\n"
        "DX = inv_variance * (g - mean(g) - n * mean(g * n)), DScale = sum(grad * n) and DBias = sum(grad), the\n"
        "sums over all rows, in the shape of scale; their order is not specified. Returns [DX, DScale, DBias];\n"
        "without a scale, which is 1 then, the last two are None.",
        inputs=(Port("grad"), Port("input"), Port("scale", optional=True), Port("mean"), Port("inv_variance")),
        outputs=(
            Port("DX"),
            Port("DScale", optional=True, label="DSCALE", over_rows=True),
            Port("DBias", optional=True, label="DBIAS", over_rows=True),
        ),
        infer=shapes.layernorm_backward,
        expansion=Expansion(layernorm_backward, _of_scale, of_columns=WEIGHTS, of_rows=MOMENTS),
        absent=shapes.norm_backward_absent,
    ),
    forward(
        "adalayernorm",
        "Layer normalization with a scale and a bias of each sample (adaptive layer norm: Peebles and Xie 2023):\n"
        "layernorm over the axes along which scale varies, but the first, along which samples are, so that scale\n"
        "has input's extent. bias has scale's shape and may be left out, then 0. norm_forward_phase must be given.\n"
        "Returns [Y, mean, inv_variance], the last two None in INFERENCE.",
        inputs=(Port("input"), Port("scale"), Port("bias", optional=True), Port("epsilon")),
        infer=shapes.adalayernorm,
        expansion=Expansion(layernorm, _of_samples, EPSILON),
        vjp=gradients("adalayernorm_backward", "mean", "inv_variance", sums=False),
    ),
    backward(
        "adalayernorm_backward",
        "Gradients of adalayernorm, as layernorm_backward makes them, but DScale and DBias, in the shape of\n"
        "scale, are sums over the rows of each sample. Kernels compute these only for a single sample; for several\n"
        "they compute only DX. Returns [DX, DScale, DBias].",
        infer=shapes.adalayernorm_backward,
        expansion=Expansion(layernorm_backward, _of_samples, of_rows=MOMENTS),
    ),
)
