"""Rotation angles of tokens in a grid, such as the patches of a video, as a table for functions that rotate."""

import math
from collections.abc import Sequence

import torch

from graphfuse.base.errors import VariantPackError


def cos_sin_of_grid(
    extents: Sequence[int],
    columns: Sequence[int],
    base: float = 10000.0,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Cosines and sines of rotary position embedding along the axes of a grid, with separate columns for each axis.

    The table is a cos_sin_cache for ``qk_norm_rope_across_heads`` and ``qk_norm_rope``, with a row per token.
    extents: tokens along each axis, such as (frames, height, width) of the patches of a video. Tokens are ordered with
    the last axis fastest. columns: how many columns of a head each axis rotates, even numbers; the first axis has the
    first pairs. WAN has (44, 42, 42) of 128: 2 * (128 // 6) for height and for width, the rest for frames. base: pair i
    of an axis with c columns turns by base^(-2 i / c) per token.

    Returns (tokens, sum(columns)): the cosines of all pairs, then their sines, of angles in float64. For scaled angles
    (YaRN) make your own table of this shape. Raises VariantPackError for invalid extents and columns.
    """
    if not extents or len(extents) != len(columns) or min(extents) < 0:
        raise VariantPackError(f"extents is {extents}; accepted: as many numbers as columns {columns} has, 0 and more")
    if any(count % 2 or count < 0 for count in columns) or not sum(columns):
        raise VariantPackError(f"columns is {columns}; accepted: even numbers, 0 and more, not all 0")
    tokens, angles = math.prod(extents), []
    for axis, (extent, count) in enumerate(zip(extents, columns, strict=True)):
        turns = base ** (-torch.arange(0, count, 2, dtype=torch.float64, device=device) / max(count, 1))
        along = torch.outer(torch.arange(extent, dtype=torch.float64, device=device), turns)
        of_axis = along.view(*(extent if k == axis else 1 for k in range(len(extents))), count // 2)
        angles.append(of_axis.expand(*extents, -1).reshape(tokens, count // 2))
    whole = torch.cat(angles, dim=-1)
    return torch.cat((whole.cos(), whole.sin()), dim=-1).to(dtype)
