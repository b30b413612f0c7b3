"""Collective ops over the ranks of one host, which can read each other's memory."""

from collections.abc import Mapping
from functools import partial

from graphfuse.base.errors import GraphValidationError
from graphfuse.ops.op import Attribute, Attributes, Op, Port, Shape
from graphfuse.ops.pullback import NoRule

MOST_RANKS = 8
"""Largest number of ranks of one host; kernels have a signal word for each."""
_SIGNALS = 64
"""Length of a rank's signals in words of 8 bytes."""


def peers_length(ranks: int) -> int:
    """Elements of the tensor "peers" of a rank: its signals, and two addresses for each rank."""
    return _SIGNALS + 2 * ranks


def ranks_of(length: int) -> int:
    """Number of ranks for which "peers" has `length` elements."""
    return (length - _SIGNALS) // 2


def _of_ranks(shapes: Mapping[str, Shape], attributes: Attributes, _) -> dict[str, Shape]:
    (*leading, length), rank = (1, *shapes["peers"]), attributes["rank"]
    ranks = ranks_of(length)
    if any(extent != 1 for extent in leading) or not 1 <= ranks <= MOST_RANKS or length != peers_length(ranks):
        raise GraphValidationError(
            f"peers must be {peers_length(0)} + 2 x ranks numbers, of up to {MOST_RANKS} ranks, got shape "
            f"{list(shapes['peers'])}"
        )
    if not 0 <= rank < ranks:
        raise GraphValidationError(f"rank must be 0 to {ranks - 1}, as peers has {ranks} ranks, got {rank}")
    return {"output": shapes["input"]}


_over_ranks = partial(
    Op,
    inputs=(Port("input"), Port("peers", numbers=True)),
    infer=_of_ranks,
    attributes=(Attribute("rank", (int,), required=True),),
    may_recompute=False,
)

TABLE = (
    _over_ranks(
        "all_reduce",
        "The sum of input over the ranks of one host, in the order of ranks. input lies in memory that all ranks can\n"
        "read, and each rank reads the others' at the same offset as its own. Each rank makes the call, with the same\n"
        "rows or with different ones, as in a reduce-scatter. peers, INT64, lies in such memory, too. It has the\n"
        "signals of the caller's rank, 512 bytes that are zero before the first call; then the address at which the\n"
        "memory of input begins on each rank; then that of peers on each rank. rank is the caller's. Calls with the\n"
        "same peers must be on one stream. Later work on this stream may overwrite input.",
        elsewhere="reads the memory of other ranks, which kernels of rows do",
        vjp=NoRule("the gradient of a sum over ranks is one, too, of memory that the backward graph does not have"),
    ),
    _over_ranks(
        "all_gather",
        "input, written to the memory of all ranks of one host, at the same offset as output in the caller's. Each\n"
        "rank makes the call, with its own output. Later work on the caller's stream may read what all ranks wrote.\n"
        "peers, rank: as in all_reduce, for the memory of output.",
        elsewhere="writes the memory of other ranks, which kernels of rows do",
        vjp=NoRule(
            "the gradient of what all ranks get is a sum over them, of memory that the backward graph does not have"
        ),
    ),
)
