"""Dropout, whose random numbers follow from a key and the places of elements: its gradient is made by the same op."""

from collections.abc import Mapping

from graphfuse.base.errors import GraphValidationError
from graphfuse.ops.expansion import Expansion, RowArithmetic, Values
from graphfuse.ops.op import Attribute, Attributes, Op, Port, Shape
from graphfuse.ops.pullback import NoRule, Pullback

_NO_GRADIENT = NoRule("the key of random numbers has no gradient", constant=True)


def _shapes(shapes: Mapping[str, Shape], attributes: Attributes, _) -> dict[str, Shape]:
    for port in ("seed", "offset"):
        if any(extent != 1 for extent in shapes[port]):
            raise GraphValidationError(f"{port} must have one element, got {list(shapes[port])}")
    if not 0 <= attributes["probability"] < 1:
        raise GraphValidationError(f"probability is {attributes['probability']}; accepted: 0 up to 1, without 1")
    return {"output": shapes["input"]}


def _of_last(shapes: Mapping[str, Shape], attributes: Attributes) -> tuple[int, ...]:
    return (len(shapes["input"]) - 1,)


def _dropout(e: RowArithmetic, x: Values, a: Attributes) -> Values:
    row, column = e.positions()
    drawn = e.op("random_uniform", seed=x["seed"], offset=x["offset"], row=row, column=column)
    kept = e.op("cmp_ge", input=drawn, comparison=float(a["probability"]))
    scaled = e.op("mul", a=x["input"], b=1.0 / (1.0 - a["probability"]))
    return {"output": e.op("binary_select", input0=scaled, input1=0.0, mask=kept)}


def _of_kept(p: Pullback) -> object:
    return p.graph.dropout(p.grad, p["seed"], p["offset"], **p.attributes)


TABLE = (
    Op(
        "dropout",
        "With probability, each element of input on its own becomes 0, else input / (1 - probability). Those become 0\n"
        "of which random_uniform is below probability: of seed and offset, integers of one element each, of the row's\n"
        "number, which runs along the last axis, and of the number of the element in it.",
        inputs=(Port("input"), Port("seed"), Port("offset")),
        outputs=(Port("output", label="OUT_0"),),
        infer=_shapes,
        expansion=Expansion(_dropout, _of_last, scalars=frozenset({"seed", "offset"}), positioned=True),
        attributes=(Attribute("probability", (float, int), required=True),),
        aten=("keyed_dropout.default input:input seed:seed offset:offset probability:probability",),
        vjp={"input": _of_kept, "seed": _NO_GRADIENT, "offset": _NO_GRADIENT},
    ),
)
