"""Elements of drawings of an account: boxes, arrows between them, and one colour for each engine."""

from collections.abc import Iterator
from dataclasses import dataclass

from graphfuse.explain.account import Account, RegionEntry, TensorEntry, count, printable


@dataclass(frozen=True)
class Colour:
    """Colours of a region. fill: of its background. line: of its border."""

    fill: str
    line: str


_GREY = Colour("#eeeeee", "#5c5c5c")
"""Colour of regions that run node by node."""

# Distinguishable for most colour-blind readers (after Okabe and Ito), pale enough for black text.
_FUSED = (
    Colour("#d6ecfa", "#0b5d94"),
    Colour("#d5f0e4", "#00694d"),
    Colour("#fdeed0", "#8a5a00"),
    Colour("#f7dfee", "#9a3f78"),
    Colour("#fbe0d3", "#a14300"),
    Colour("#e6e1f7", "#4b3a9e"),
)


def colours(account: Account) -> dict[str, Colour]:
    """Colours by engine, in the order of the regions; engines beyond the palette's share its colours."""
    fused = dict.fromkeys(region.engine for region in account.regions if region.fused)
    found = {engine: _FUSED[n % len(_FUSED)] for n, engine in enumerate(fused)}
    return {region.engine: found.get(region.engine, _GREY) for region in account.regions}


def tensors(account: Account) -> Iterator[tuple[str, str]]:
    """Pairs (box, label) of each tensor that execute gets a value for."""
    for t in account.tensors:
        if _drawn(t):
            yield f"t{t.id}", f"{printable(t.name)} {t.dtype} {list(t.dim)}"


def nodes(account: Account, which: tuple[int, ...]) -> Iterator[tuple[str, str]]:
    """Pairs (box, label of two lines) of each node."""
    return ((f"n{i}", f"{printable(account.nodes[i].name)}\n{account.nodes[i].op}") for i in which)


def alone(account: Account) -> tuple[int, ...]:
    """Numbers of the nodes in no region."""
    placed = {i for region in account.regions for i in region.nodes}
    return tuple(i for i in range(len(account.nodes)) if i not in placed)


def title(region: RegionEntry) -> str:
    """Text over a region."""
    return f"{region.engine}: {count(region.traffic.read)} read, {count(region.traffic.written)} written"


def arrows(account: Account) -> Iterator[tuple[str, str, str]]:
    """Triples (box, port, box) of the tensors that nodes read, then (box, "", box) of those that they write; without
    constants."""
    boxes = {t: f"n{i}" for i, node in enumerate(account.nodes) for _, t in node.writes}
    boxes |= {t.id: f"t{t.id}" for t in account.tensors if _drawn(t)}
    for i, node in enumerate(account.nodes):
        yield from ((boxes[t], port, f"n{i}") for port, t in node.reads if t in boxes)
        yield from ((f"n{i}", "", boxes[t]) for _, t in node.writes if boxes[t] != f"n{i}")


def _drawn(t: TensorEntry) -> bool:
    return t.role != "virtual" and t.value is None
