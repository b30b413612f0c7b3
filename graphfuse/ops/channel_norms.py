"""Instance and batch normalization of [N, C, spatial axes...], with a scale and a bias per channel, and sums per
channel."""

from collections.abc import Mapping
from functools import partial

from graphfuse.base.errors import GraphValidationError
from graphfuse.ops import norms
from graphfuse.ops.expansion import Columns, Expansion, Join, RowArithmetic, Values
from graphfuse.ops.op import Attributes, Op, Port, Shape
from graphfuse.ops.pullback import NoRule, Pullback
from graphfuse.ops.shapes import LAYERNORM_ORDER, check_phase, check_scalars, one_per_row, with_elements


def _instance_axes(rank: int) -> tuple[int, ...]:
    return tuple(range(2, rank))


# Batch norms have no kernel of rows: its text would contain the length of rows, and so the number of samples, and there
# would be only as many rows as channels. The reference engine computes them.


def _batch_axes(rank: int) -> tuple[int, ...]:
    return (0, *range(2, rank))


def _checked(shapes: Mapping[str, Shape], axes_of, least: int, statistics: tuple[str, ...]) -> tuple[Shape, Shape]:
    """Shapes of statistics and of values per channel. Raises GraphValidationError for inputs of other shapes.

    axes_of(rank): the normalized axes. least: smallest rank of input. statistics: input ports.
    """
    x = shapes["input"]
    if len(x) < least:
        raise GraphValidationError(f"input must be [N, C, spatial axes...] with {least} or more axes, got {list(x)}")
    channels = tuple(e if axis == 1 else 1 for axis, e in enumerate(x))
    statistic = one_per_row(x, with_elements(x, axes_of(len(x))))
    wanted = {"scale": channels, "bias": channels, "grad": x} | dict.fromkeys(statistics, statistic)
    for port, shape in wanted.items():
        if port in shapes and shapes[port] != shape:
            raise GraphValidationError(
                f"{port} must have shape {list(shape)} for input {list(x)}, got {list(shapes[port])}"
            )
    check_scalars(shapes, ("epsilon", "momentum"), f"; {LAYERNORM_ORDER}" if "momentum" not in shapes else "")
    return statistic, channels


def _instance_shapes(shapes: Mapping[str, Shape], attributes: Attributes, _) -> dict[str, Shape]:
    statistic, _ = _checked(shapes, _instance_axes, 3, ())
    check_phase(attributes)
    return {"Y": shapes["input"], "mean": statistic, "inv_variance": statistic}


_PEERS = {"peer_stats": ([], "torch.nn.SyncBatchNorm: statistics here are of one device's batch")}
_RUNNING = ("in_running_mean", "in_running_var", "momentum")
_NEXT = ("next_running_mean", "next_running_var")


def _batch_shapes(shapes: Mapping[str, Shape], attributes: Attributes, _) -> dict[str, Shape]:
    given = [port for port in _RUNNING if port in shapes]
    if given and len(given) != len(_RUNNING):
        missing = next(port for port in _RUNNING if port not in shapes)
        raise GraphValidationError(
            f"{given[0]} is given without {missing}; give {', '.join(_RUNNING)}, or none of them"
        )
    statistic, _ = _checked(shapes, _batch_axes, 2, ("in_running_mean", "in_running_var"))
    running = dict.fromkeys(_NEXT, statistic)
    return {"Y": shapes["input"], "mean": statistic, "inv_variance": statistic} | running


def _inference_shapes(shapes: Mapping[str, Shape], attributes: Attributes, _) -> dict[str, Shape]:
    _checked(shapes, _batch_axes, 2, ("mean", "inv_variance"))
    return {"Y": shapes["input"]}


def _gradient_shapes(
    axes_of, least: int, shapes: Mapping[str, Shape], attributes: Attributes, wanted
) -> dict[str, Shape]:
    _, channels = _checked(shapes, axes_of, least, ("mean", "inv_variance"))
    return {"DX": shapes["input"], "DScale": channels, "DBias": channels}


def _batchnorm(e: RowArithmetic, x: Values, a: Attributes) -> Values:
    made = dict(norms.layernorm(e, x, a))
    if "momentum" in x:
        centred = e.op("sub", a=x["input"], b=made["mean"])
        variance = e.mean(e.op("mul", a=centred, b=centred))
        unbiased = e.op("mul", a=variance, b=e.columns / max(e.columns - 1, 1))
        before = e.op("sub", a=1.0, b=x["momentum"])
        for name, new in (("mean", made["mean"]), ("var", unbiased)):
            kept = e.op("mul", a=before, b=x[f"in_running_{name}"])
            made[f"next_running_{name}"] = e.op("fma", a=x["momentum"], b=new, c=kept)
    return made


def _inference(e: RowArithmetic, x: Values, a: Attributes) -> Values:
    normal = e.op("mul", a=e.op("sub", a=x["input"], b=x["mean"]), b=x["inv_variance"])
    return {"Y": e.op("add", a=e.op("mul", a=normal, b=x["scale"]), b=x["bias"])}


def _along(axes_of) -> Columns:
    return lambda shapes, attributes: axes_of(len(shapes["input"]))


def _of_normal(p: Pullback) -> object:
    """The gradient of (input - mean) * inv_variance."""
    return p.graph.mul(p.whole("Y"), p["scale"])


def _of_centred(p: Pullback) -> object:
    return p.graph.mul(p.once(_of_normal), p["inv_variance"])


def _centred(p: Pullback) -> object:
    return p.graph.sub(p["input"], p["mean"])


_RUNNING_STATISTICS = NoRule("running statistics are kept, not learned", constant=True)
_OF_NEXT = NoRule("running statistics have no gradient that could go on to it")
_OF_BATCHNORM = norms.gradients("batchnorm_backward", "mean", "inv_variance")


def _of_batch(p: Pullback) -> object:
    return _OF_NEXT if p.grads.keys() & set(_NEXT) else _OF_BATCHNORM["input"](p)


_NORM = (
    "Y = (input - mean) * inv_variance * scale + bias with inv_variance = 1 / sqrt(mean((input - mean)^2) + epsilon),\n"
)
_GRADIENT = (
    ", from grad, that of Y, and outputs of forward, as in layernorm_backward.\n"
    "DScale and DBias are sums over samples and spatial axes, in the shape of scale. Returns\n"
    "[DX, DScale, DBias]."
)


def _genstats_shapes(shapes: Mapping[str, Shape], attributes: Attributes, _) -> dict[str, Shape]:
    _, channels = _checked(shapes, _batch_axes, 2, ())
    return {"SUM": channels, "SQ_SUM": channels}


def _genstats(e: RowArithmetic, x: Values, a: Attributes) -> Values:
    squares = e.op("mul", a=x["input"], b=x["input"])
    return {"SUM": e.reduce(Join.SUM, x["input"]), "SQ_SUM": e.reduce(Join.SUM, squares)}


def _of_sums(p: Pullback) -> object:
    if "SQ_SUM" not in p.grads:
        return p.grads["SUM"]
    squares = p.graph.mul(p.graph.mul(p["input"], 2.0), p.grads["SQ_SUM"])
    return p.graph.add(squares, p.grads["SUM"]) if "SUM" in p.grads else squares


TABLE = (
    norms.forward(
        "instancenorm",
        "Instance normalization of [N, C, spatial axes...] (Ulyanov et al. 2016):\n"
        + _NORM
        + "means over the spatial axes; scale and bias are [1, C, 1, ...]. norm_forward_phase must be given. Returns\n"
        "[Y, mean, inv_variance], the last two, [N, C, 1, ...], None in INFERENCE.",
        inputs=(Port("input"), Port("scale"), Port("bias"), Port("epsilon")),
        infer=_instance_shapes,
        expansion=Expansion(norms.layernorm, _along(_instance_axes), norms.EPSILON, of_rows=norms.WEIGHTS),
        vjp=norms.gradients("instancenorm_backward", "mean", "inv_variance"),
    ),
    norms.backward(
        "instancenorm_backward",
        "Gradients of instancenorm" + _GRADIENT,
        infer=partial(_gradient_shapes, _instance_axes, 3),
        expansion=Expansion(norms.layernorm_backward, _along(_instance_axes), in_rows=False),
    ),
    Op(
        "batchnorm",
        "Batch normalization of [N, C, spatial axes...] in training (Ioffe and Szegedy 2015):\n"
        + _NORM
        + "means over samples and spatial axes; scale and bias are [1, C, 1, ...]. With in_running_mean,\n"
        "in_running_var and momentum, one element, next_running_mean = (1 - momentum) * in_running_mean +\n"
        "momentum * mean, and next_running_var likewise of the unbiased variance, divided by one less than the\n"
        "count. Returns [Y, mean, inv_variance, next_running_mean, next_running_var], all but Y [1, C, 1, ...], the\n"
        "last two None without their inputs.",
        inputs=(
            Port("input"),
            Port("scale"),
            Port("bias"),
            Port("in_running_mean", optional=True),
            Port("in_running_var", optional=True),
            Port("epsilon"),
            Port("momentum", optional=True),
        ),
        outputs=(
            Port("Y"),
            Port("mean", label="MEAN"),
            Port("inv_variance", label="INV_VARIANCE"),
            Port("next_running_mean", optional=True, label="NEXT_RUNNING_MEAN"),
            Port("next_running_var", optional=True, label="NEXT_RUNNING_VAR"),
        ),
        infer=_batch_shapes,
        expansion=Expansion(_batchnorm, _along(_batch_axes), in_rows=False),
        absent=lambda attributes, inputs: frozenset() if inputs.issuperset(_RUNNING) else frozenset(_NEXT),
        not_offered=_PEERS,
        vjp=_OF_BATCHNORM | {"input": _of_batch} | dict.fromkeys(_RUNNING, _RUNNING_STATISTICS),
        recompute=norms.RECOMPUTE,
    ),
    Op(
        "batchnorm_inference",
        "Batch normalization of [N, C, spatial axes...] by given statistics, [1, C, 1, ...] like scale and bias:\n"
        "Y = (input - mean) * inv_variance * scale + bias.",
        inputs=(Port("input"), Port("mean"), Port("inv_variance"), Port("scale"), Port("bias")),
        outputs=(Port("Y"),),
        infer=_inference_shapes,
        expansion=Expansion(_inference, _along(_instance_axes), of_rows=norms.WEIGHTS | norms.MOMENTS),
        vjp={
            "input": lambda p: p.once(_of_centred),
            "mean": lambda p: p.graph.neg(p.once(_of_centred)),
            "inv_variance": lambda p: p.graph.mul(p.once(_of_normal), p.once(_centred)),
            "scale": lambda p: p.graph.mul(p.whole("Y"), p.graph.mul(p.once(_centred), p["inv_variance"])),
            "bias": lambda p: p.whole("Y"),
        },
    ),
    norms.backward(
        "batchnorm_backward",
        "Gradients of batchnorm" + _GRADIENT,
        infer=partial(_gradient_shapes, _batch_axes, 2),
        expansion=Expansion(norms.layernorm_backward, _along(_batch_axes), in_rows=False),
        not_offered=_PEERS,
    ),
    Op(
        "genstats",
        "Statistics of each channel of [N, C, spatial axes...], sums over samples and spatial axes: of the elements,\n"
        "and of their squares. Returns [SUM, SQ_SUM], both [1, C, 1, ...]. Sums are in the compute data type, FLOAT\n"
        "unless set, in an order that is not specified.",
        inputs=(Port("input"),),
        outputs=(Port("SUM"), Port("SQ_SUM")),
        infer=_genstats_shapes,
        expansion=Expansion(_genstats, _along(_batch_axes), in_rows=False),
        vjp={"input": _of_sums},
    ),
)
