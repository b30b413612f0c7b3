"""Where the elements of a reordered tensor are: F8_128x4, the order in which block-scaled matrix products read scales.

Of a tensor [rows..., blocks], rows being all leading axes taken together: tiles of 128 rows x 4
blocks, 512 elements each, row-major; a tile that rows or blocks do not fill is there in full. In a
tile, row r and block c is element (r % 32) * 16 + (r / 32) * 4 + c (PTX ISA, tcgen05.mma block scaling;
cuDNN's CUDNN_TENSOR_REORDERING_F8_128x4). Functions get the torch module as `t`, so that importing this loads nothing.
"""

import math
from collections.abc import Sequence

_ROWS, _BLOCKS = 128, 4


def padded(dim: Sequence[int]) -> int:
    """Elements that a tensor of extents `dim` takes; 0 if it has none."""
    *rows, blocks = dim
    return -(-math.prod(rows) // _ROWS) * -(-blocks // _BLOCKS) * _ROWS * _BLOCKS


def offsets(t, dim: Sequence[int], device):
    """Position of each element in elements: int64 of extents `dim`."""
    *rows, blocks = dim
    r = t.arange(math.prod(rows), device=device).unsqueeze(1)
    c = t.arange(blocks, device=device)
    tile = r // _ROWS * -(-blocks // _BLOCKS) + c // _BLOCKS
    return (tile * (_ROWS * _BLOCKS) + r % 32 * 16 + r % _ROWS // 32 * 4 + c % _BLOCKS).reshape(*dim)
