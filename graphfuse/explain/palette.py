"""One colour for each engine of an account, the same in every picture."""

from dataclasses import dataclass

from graphfuse.explain.account import Account


@dataclass(frozen=True)
class Colour:
    """fill: of a region's ground. line: of its edge and of text upon the ground."""

    fill: str
    line: str


GREY = Colour("#eeeeee", "#5c5c5c")
"""Of what runs node by node, or is not planned."""

# Told apart by most colour-blind readers (after Okabe and Ito), pale enough for black text.
_FUSED = (
    Colour("#d6ecfa", "#0b5d94"),
    Colour("#d5f0e4", "#00694d"),
    Colour("#fdeed0", "#8a5a00"),
    Colour("#f7dfee", "#9a3f78"),
    Colour("#fbe0d3", "#a14300"),
    Colour("#e6e1f7", "#4b3a9e"),
)


def colours(account: Account) -> dict[str, Colour]:
    """By engine, in the order of the regions; engines beyond the palette's share its colours."""
    fused = dict.fromkeys(region.engine for region in account.regions if region.fused)
    found = {engine: _FUSED[n % len(_FUSED)] for n, engine in enumerate(fused)}
    return {region.engine: found.get(region.engine, GREY) for region in account.regions}
