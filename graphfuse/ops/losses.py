"""Losses of rows: cross entropy with class numbers as targets, and its gradient."""

import math
from collections.abc import Mapping

from graphfuse.dtypes import data_type
from graphfuse.errors import GraphValidationError
from graphfuse.ops.op import Attribute, Attributes, Op, Port, Shape

_MOST_IGNORED = 2**24  # a target is compared as a float32, which from here on stands for several integers

_ATTRIBUTES = (
    Attribute("ignore_index", (int,), -100),
    Attribute("label_smoothing", (float, int), 0.0),
    Attribute("z_loss", (float, int), 0.0),
)


def _checked(shapes: Mapping[str, Shape], attributes: Attributes) -> Shape:
    """The shape of what there is one a row of."""
    x = shapes["input"]
    if x[-1] == 0:
        raise GraphValidationError(f"input {list(x)} has no columns; at least 1 is needed")
    row = (*x[:-1], 1)
    for port in shapes.keys() - {"input"}:
        if shapes[port] != row:
            raise GraphValidationError(
                f"{port} must have input's extents and 1 along the last axis, {list(row)}, got {list(shapes[port])}"
            )
    ignored, smoothing, z = (attributes[a.name] for a in _ATTRIBUTES)
    if abs(ignored) >= _MOST_IGNORED:
        raise GraphValidationError(f"ignore_index is {ignored}; accepted: magnitudes below 2^24")
    if not 0 <= smoothing <= 1:
        raise GraphValidationError(f"label_smoothing is {smoothing}; accepted: 0 to 1")
    if not 0 <= z < math.inf:
        raise GraphValidationError(f"z_loss is {z}; accepted: 0 and finite numbers above")
    return row


def _loss_shapes(shapes: Mapping[str, Shape], attributes: Attributes, _) -> dict[str, Shape]:
    row = _checked(shapes, attributes)
    return {"loss": row, "logsumexp": row}


def _gradient_shapes(shapes: Mapping[str, Shape], attributes: Attributes, _) -> dict[str, Shape]:
    _checked(shapes, attributes)
    return {"DX": shapes["input"]}


def _cross_entropy(t, x, a) -> dict[str, object]:
    values, target, smoothing = x["input"], x["target"], a["label_smoothing"]
    largest = values.amax(dim=-1, keepdim=True)
    total = (values - largest).exp().sum(dim=-1, keepdim=True).log()
    logsumexp = total + largest
    exists = _exists(values, target)
    below = values.gather(-1, t.where(exists, target, 0).long()) - largest
    if smoothing:
        mean = values.mean(dim=-1, keepdim=True) - largest
        below = (1 - smoothing) * below + smoothing * mean
    loss = total - below
    if a["z_loss"]:
        loss = loss + a["z_loss"] * logsumexp * logsumexp
    loss = t.where(exists, loss, math.nan)
    return {"loss": t.where(target == a["ignore_index"], 0.0, loss), "logsumexp": logsumexp}


def _cross_entropy_backward(t, x, a) -> dict[str, object]:
    values, target, logsumexp, smoothing = x["input"], x["target"], x["logsumexp"], a["label_smoothing"]
    columns = values.shape[-1]
    slope = (values - logsumexp).exp()
    if a["z_loss"]:
        slope = slope * (1 + 2 * a["z_loss"] * logsumexp)
    if smoothing:
        slope = slope - smoothing / columns
    hit = t.arange(columns, dtype=target.dtype, device=target.device) == target
    grad = t.where(_exists(values, target), x["grad"], math.nan)
    made = (slope - (1 - smoothing) * hit) * grad
    return {"DX": t.where(target == a["ignore_index"], 0.0, made)}


def _exists(values, target):
    return (target >= 0) & (target < values.shape[-1])


_WHAT = (
    "target: one a row, of any type, INT32 and INT64 among them; the number of a column. A row whose target is\n"
    "ignore_index counts for nothing. A target that is neither that nor the number of a column makes {} NaN;\n"
    "nothing is read there. "
)

TABLE = (
    Op(
        "cross_entropy",
        "Cross entropy of the softmax of each row of input, its last axis, with the target's column:\n"
        "loss = logsumexp - (1 - label_smoothing) * input[target] - label_smoothing * mean(input)\n"
        "+ z_loss * logsumexp^2, with logsumexp = log(sum(exp(input))), and 0 for rows that are ignored. "
        + _WHAT.format("the loss")
        + "A row with infinity, or\nof -infinity alone, has NaN for both. Returns [loss, logsumexp], one a row each, "
        "FLOAT unless set.",
        inputs=(Port("input"), Port("target")),
        outputs=(Port("loss", dtype=data_type.FLOAT), Port("logsumexp", dtype=data_type.FLOAT)),
        infer=_loss_shapes,
        reference=_cross_entropy,
        attributes=_ATTRIBUTES,
    ),
    Op(
        "cross_entropy_backward",
        "Gradient of cross_entropy, from grad, that of the loss, one a row, and the logsumexp that it made:\n"
        "DX = grad * (exp(input - logsumexp) * (1 + 2 * z_loss * logsumexp) - (1 - label_smoothing) * [column =\n"
        "target] - label_smoothing / columns), and 0 in rows that are ignored, whatever their grad and input. "
        + _WHAT.format("the row's DX")
        + "Attributes\nas of cross_entropy. Returns DX.",
        inputs=(Port("grad"), Port("input"), Port("target"), Port("logsumexp")),
        outputs=(Port("DX"),),
        infer=_gradient_shapes,
        reference=_cross_entropy_backward,
        attributes=_ATTRIBUTES,
    ),
)
