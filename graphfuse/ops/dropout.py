"""Dropout. Its random numbers depend only on a key and on element positions, so its gradient is the same op."""

import math
from collections.abc import Mapping

from graphfuse.base.errors import GraphValidationError
from graphfuse.ops.expansion import Expansion, RowArithmetic, Values
from graphfuse.ops.op import Attribute, Attributes, Op, Port, Shape
from graphfuse.ops.pullback import NoRule, Pullback
from graphfuse.ops.shapes import along_last

_NO_GRADIENT = NoRule("the key of random numbers has no gradient", constant=True)


def _shapes(shapes: Mapping[str, Shape], attributes: Attributes, _) -> dict[str, Shape]:
    for port in ("seed", "offset"):
        if any(extent != 1 for extent in shapes[port]):
            raise GraphValidationError(f"{port} must have one element, got {list(shapes[port])}")
    if not 0 <= attributes["probability"] < 1:
        raise GraphValidationError(f"probability is {attributes['probability']}; accepted: 0 up to 1, without 1")
    return {"output": shapes["input"]}


def _dropout(e: RowArithmetic, x: Values, a: Attributes) -> Values:
    kept = e.random_at_least(x["seed"], x["offset"], math.ceil(a["probability"] * 2**16))
    scaled = e.op("mul", a=x["input"], b=1.0 / (1.0 - a["probability"]))
    return {"output": e.op("binary_select", input0=scaled, input1=0.0, mask=kept)}


def _of_kept(p: Pullback) -> object:
    return p.graph.dropout(p.whole("output"), p["seed"], p["offset"], **p.attributes)


TABLE = (
    Op(
        "dropout",
        "Each element of input becomes 0 with the given probability, rounded up to 16 bits, independently of others,\n"
        "and input / (1 - probability) otherwise. It becomes 0 if its 16-bit random number is below probability *\n"
        "2^16. Random numbers depend only on seed and offset, integers below 2^24 of one element each, and on row and\n"
        "column of the element: column is its index along the last axis, row that among all other axes. The number\n"
        "is the lower half of a word for an even column, else the upper half: of word (column / 2) mod 4 of Philox\n"
        "4x32 with seven rounds, key (seed, offset) and counter (column / 8, row mod 2^32, row / 2^32, 0).",
        inputs=(Port("input"), Port("seed"), Port("offset")),
        infer=_shapes,
        expansion=Expansion(_dropout, along_last, scalars=frozenset({"seed", "offset"}), is_random=True),
        attributes=(Attribute("probability", (float, int), required=True),),
        aten=("graphfuse::keyed_dropout.default input:input seed:seed offset:offset probability:probability",),
        vjp={"input": _of_kept, "seed": _NO_GRADIENT, "offset": _NO_GRADIENT},
    ),
)
