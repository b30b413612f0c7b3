"""The op table `OPS` (`table`) and what its entries are made of."""

from graphfuse.ops.blocks import BLOCKS, SMALLEST_SCALE, BlockFormat, block_size
from graphfuse.ops.expansion import Expansion, Join, RowArithmetic
from graphfuse.ops.op import OFFSETS, Attribute, Attributes, Cost, Op, Port, Shape, Spelling
from graphfuse.ops.reductions import REDUCTIONS, Reduction
from graphfuse.ops.shapes import aligned, quantize_axis, rmsnorm_axes
from graphfuse.ops.table import EXPANSIONS, OPS, SPELLINGS

__all__ = [
    "BLOCKS",
    "EXPANSIONS",
    "OFFSETS",
    "OPS",
    "REDUCTIONS",
    "SMALLEST_SCALE",
    "SPELLINGS",
    "Attribute",
    "Attributes",
    "BlockFormat",
    "Cost",
    "Expansion",
    "Join",
    "Op",
    "Port",
    "Reduction",
    "RowArithmetic",
    "Shape",
    "Spelling",
    "aligned",
    "block_size",
    "quantize_axis",
    "rmsnorm_axes",
]
