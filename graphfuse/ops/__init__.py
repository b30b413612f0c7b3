"""The op table `OPS` (`table`) and what its entries are made of."""

from graphfuse.ops.blocks import BLOCKS, SMALLEST_SCALE, BlockFormat, block_size
from graphfuse.ops.op import Attribute, Attributes, Cost, Op, Port, Shape, Spelling
from graphfuse.ops.reductions import REDUCTIONS, Reduction
from graphfuse.ops.shapes import adalayernorm_axes, aligned, quantize_axis, rmsnorm_axes
from graphfuse.ops.table import OPS, SPELLINGS

__all__ = [
    "BLOCKS",
    "OPS",
    "REDUCTIONS",
    "SMALLEST_SCALE",
    "SPELLINGS",
    "Attribute",
    "Attributes",
    "BlockFormat",
    "Cost",
    "Op",
    "Port",
    "Reduction",
    "Shape",
    "Spelling",
    "adalayernorm_axes",
    "aligned",
    "block_size",
    "quantize_axis",
    "rmsnorm_axes",
]
