"""Mean and variance of equal pieces of channels, so that a whole GPU computes them even if few groups are normalized.
Nothing is copied, whether channels are last in memory, or places (such as pixels).

``graphfuse::channel_moments`` is the operator for compiled graphs. It accepts any layout that its input has there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from graphfuse.functional.operator import LIBRARY
from graphfuse.torch.operators.channel_kernels import row_moments

_SHORTEST, _LONGEST = 16, 256
"""Elements of a piece, at least and at most. The moments of shorter pieces would be as many bytes as are read."""


def piece(extents: Sequence[int], any_length: bool = False) -> int:
    """Places of a piece, given the extents of all places; 0 if pieces would be too short.

    It is a power of two, so that few kernels serve all extents. any_length: whether it may be another number where no
    power of two is long enough. Rows of such pieces are not aligned, unless channels are last.
    """
    places = math.prod(extents)
    found = min(places & -places, _LONGEST)
    if found >= _SHORTEST:
        return found
    lengths = range(min(places, _LONGEST), _SHORTEST - 1, -1) if any_length else ()
    return next((length for length in lengths if places % length == 0), 0)


def in_pieces(x: torch.Tensor) -> tuple[torch.Tensor, bool] | None:
    """View of (samples, channels, ...) as (samples, channels, pieces, places of a piece), and whether channels are last
    in memory. None if x has no such view, or no such pieces."""
    n, c, *extents = x.shape
    if not (places := piece(extents)):
        return None
    if (flat := _viewed(x, n, c, math.prod(extents))) is not None:
        return flat.unflatten(-1, (-1, places)), False
    if (flat := _viewed(x.movedim(1, -1), n, math.prod(extents), c)) is not None:
        return flat.unflatten(1, (-1, places)).permute(0, 3, 1, 2), True
    return None


def _viewed(t: torch.Tensor, *shape: int) -> torch.Tensor | None:
    """View of a tensor that is contiguous along its last dimension; None if there is none."""
    try:
        view = t.view(shape)
    except RuntimeError:
        return None
    return view if view.stride(-1) == 1 else None


def moments(pieces: torch.Tensor, last: bool, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean of each piece, and eps + its variance: float32, (samples, channels, pieces). pieces, last: results of
    ``in_pieces``."""
    found = row_moments(pieces.transpose(1, 2) if last else pieces, eps)
    mean, variance = (t.squeeze(-1).transpose(1, 2) if last else t.squeeze(-1) for t in found)
    return mean, variance


def _run(input: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: A002 - torch's name
    found = in_pieces(input)
    return moments(*(in_pieces(input.contiguous()) if found is None else found), eps)


def _fake(input: torch.Tensor, eps: float) -> list[torch.Tensor]:  # noqa: A002
    n, c, *extents = input.shape
    found, count = in_pieces(input), math.prod(extents) // piece(extents)
    last = found is not None and found[1]
    made = (input.new_empty((n, count, c) if last else (n, c, count), dtype=torch.float32) for _ in range(2))
    return [t.transpose(1, 2) if last else t for t in made]


LIBRARY.define(
    "channel_moments(Tensor input, float eps) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout),
)
LIBRARY.impl("channel_moments", _run, "CompositeExplicitAutograd")
torch.library.register_fake("graphfuse::channel_moments", _fake, lib=LIBRARY)
