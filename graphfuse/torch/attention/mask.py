"""Classification of attention masks by their values: all keys, causal, or a causal window."""

from dataclasses import dataclass

import torch

_AT_ONCE = 1 << 26
"""Number of elements that one comparison reads."""


@dataclass(frozen=True)
class MaskKind:
    """The keys that queries attend to. is_causal: whether each query attends only to keys up to its own position.
    window: how many of these it attends to, counted from its own position back; None for all."""

    is_causal: bool = False
    window: int | None = None

    def __str__(self) -> str:
        if not self.is_causal:
            return "all is seen"
        return "causal" if self.window is None else f"a window of {self.window} keys"


ALL, CAUSAL = MaskKind(), MaskKind(is_causal=True)


def mask_kind(mask: torch.Tensor, queries: int, keys: int) -> MaskKind | None:
    """The keys that a mask lets queries attend to; None if it is neither all keys, nor causal, nor a window. mask:
    boolean, or added to scores: 0 for a key that is attended to, -inf or the lowest number of its type otherwise. If
    the numbers of queries and keys differ, the result is ALL or None; for one token it is ALL."""
    if mask.numel() == 0 or mask.dtype is not torch.bool and not mask.is_floating_point():
        return None
    is_square = queries == keys and (*mask.shape[-2:],) == (queries, keys)
    # All elements along an expanded dimension are the same, so one of them is enough.
    mask = mask[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in mask.stride())]
    mask = mask.reshape(-1, *mask.shape[-2:]) if mask.dim() > 1 else mask.reshape(1, 1, -1)
    rows, columns = mask.shape[-2:]
    ends = _attended(mask[:1, [0, -1]])
    if ends is None:
        return None
    kind = ALL
    if not ends.all():
        width = int(ends[0, 1].sum())
        if not is_square or (rows, columns) != (queries, keys) or width == 0:
            return None
        kind = CAUSAL if width == keys else MaskKind(True, width)
    places = torch.arange(columns)
    step = max(1, _AT_ONCE // (mask.numel() // rows))
    for first in range(0, rows, step):
        attended = _attended(mask[:, first : first + step])
        if attended is None:
            return None
        if kind == ALL:
            if not attended.all():
                return None
            continue
        own = torch.arange(first, first + attended.shape[1])[:, None]
        if not (attended == ((places <= own) & (places > own - (kind.window or keys)))).all():
            return None
    return kind


def _attended(part: torch.Tensor) -> torch.Tensor | None:
    """True for the keys that are attended to; None if the mask has other values."""
    if part.dtype is torch.bool:
        return part
    attended = part == 0
    return attended if (attended | (part == -torch.inf) | (part == torch.finfo(part.dtype).min)).all() else None
