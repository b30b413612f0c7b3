"""The op table `OPS` (`table`), and the classes of its entries."""

from graphfuse.ops.blocks import BLOCKS, block_size
from graphfuse.ops.expansion import Expansion, Join, RowArithmetic
from graphfuse.ops.op import OFFSETS, Attribute, Cost, Op, Port, Spelling
from graphfuse.ops.reductions import REDUCTIONS
from graphfuse.ops.shapes import aligned, quantize_axis, rmsnorm_axes
from graphfuse.ops.table import EXPANSIONS, OPS, SPELLINGS

__all__ = [
    "BLOCKS",
    "EXPANSIONS",
    "OFFSETS",
    "OPS",
    "REDUCTIONS",
    "SPELLINGS",
    "Attribute",
    "Cost",
    "Expansion",
    "Join",
    "Op",
    "Port",
    "RowArithmetic",
    "Spelling",
    "aligned",
    "block_size",
    "quantize_axis",
    "rmsnorm_axes",
]
