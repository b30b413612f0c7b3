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
        "Elements of input with probability, each on its own, become 0, all others input / (1 - probability). Which ones\n"
        "follows from seed and offset, integers of one element each, from the element's number along the last axis and\n"
        "from the number of its row among all others: those of which random_uniform is below probability.",
        inputs=(Port("input"), Port("seed"), Port("offset")),
        outputs=(Port("output", label="OUT_0"),),
        infer=_shapes,
        expansion=Expansion(_dropout, _of_last, scalars=frozenset({"seed", "offset"}), positioned=True),
        attributes=(Attribute("probability", (float, int), required=True),),
        vjp={"input": _of_kept, "seed": _NO_GRADIENT, "offset": _NO_GRADIENT},
    ),
)
