"""Memory positions in the layout F8_128x4, in which block-scaled matrix products read scales.

A tensor has an axis of blocks, by default the last; all other axes together are its rows. The layout consists of tiles
of 128 rows x 4 blocks, 512 elements each, row-major; tiles at the ends are padded. In a tile, row r and block c is
element (r % 32) * 16 + (r / 32) * 4 + c (PTX ISA, tcgen05.mma block scaling; cuDNN's
CUDNN_TENSOR_REORDERING_F8_128x4). Matrices of a batch share a tile if the rows of one do not fill it. With the extents
of `whole_tiles`, which cuDNN's batched products use, they do not. Functions get the torch module as `t`, so that
importing this module does not load torch.
"""

import math
from collections.abc import Sequence

_ROWS, _BLOCKS = 128, 4


def whole_tiles(dim: Sequence[int], axis: int | None) -> tuple[int, ...]:
    """`dim` padded to whole tiles. axis: that of blocks; None returns `dim`. Rows run along the last other axis."""
    if axis is None:
        return tuple(dim)
    rows = max((a for a in range(len(dim)) if a != axis), default=axis)
    units = {rows: _ROWS, axis: _BLOCKS}
    return tuple(-(-extent // units.get(a, 1)) * units.get(a, 1) for a, extent in enumerate(dim))


def padded(dim: Sequence[int], axis: int = -1) -> int:
    """Number of elements, with padding, of a tensor of extents `dim`; 0 if `dim` has none. axis: that of blocks."""
    rows, blocks = _split(dim, axis)
    return -(-math.prod(rows) // _ROWS) * -(-blocks // _BLOCKS) * _ROWS * _BLOCKS


def offsets(t, dim: Sequence[int], device, axis: int = -1):
    """Position of each element, in elements: an int64 tensor of extents `dim`. axis: that of blocks."""
    rows, blocks = _split(dim, axis)
    r = t.arange(math.prod(rows), device=device).unsqueeze(1)
    c = t.arange(blocks, device=device)
    tile = r // _ROWS * -(-blocks // _BLOCKS) + c // _BLOCKS
    places = tile * (_ROWS * _BLOCKS) + r % 32 * 16 + r % _ROWS // 32 * 4 + c % _BLOCKS
    return places.reshape(*rows, blocks).movedim(-1, axis)


def _split(dim: Sequence[int], axis: int) -> tuple[list[int], int]:
    rows = list(dim)
    return rows, rows.pop(axis)
