"""Ops over the ranks of one host, whose memory each of them can read."""

from collections.abc import Mapping

from graphfuse.base.errors import GraphValidationError
from graphfuse.ops.op import Attribute, Attributes, Op, Port, Shape
from graphfuse.ops.pullback import NoRule

MOST_RANKS = 8
"""Ranks of one host; kernels have a word for each in their signals."""
SIGNAL_BYTES = 512
"""Bytes of a rank's signals."""


def _all_reduced(shapes: Mapping[str, Shape], attributes: Attributes, _) -> dict[str, Shape]:
    peers, rank = shapes["peers"], attributes["rank"]
    *leading, kinds, ranks = (1, *peers)
    if (kinds, *leading) != (2, *(1 for _ in leading)) or not 1 <= ranks <= MOST_RANKS:
        raise GraphValidationError(
            f"peers must be 2 x ranks addresses, of up to {MOST_RANKS} ranks, got shape {list(peers)}"
        )
    if not 0 <= rank < ranks:
        raise GraphValidationError(f"rank must be 0 to {ranks - 1}, as peers has {ranks} ranks, got {rank}")
    return {"output": shapes["input"]}


TABLE = (
    Op(
        "all_reduce",
        "The sum of input over the ranks of one host, added up in the order of ranks. Each rank calls it, with an\n"
        "input in memory that all of them can read, equally far into it. peers, INT64, has 2 x ranks addresses: where\n"
        "that memory begins on each rank, and where the signals of each rank do: 512 bytes, zero before the first\n"
        "call, of one stream. rank is that of the caller. What follows on the stream may overwrite input.",
        inputs=(Port("input"), Port("peers", numbers=True)),
        outputs=(Port("output", label="OUT_0"),),
        infer=_all_reduced,
        attributes=(Attribute("rank", (int,), required=True),),
        elsewhere="reads the memory of other ranks, which kernels of rows do",
        vjp=NoRule("the gradient of a sum over ranks is one, too, of memory that the backward graph does not have"),
        recomputed=False,
    ),
)
