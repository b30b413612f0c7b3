"""RMS normalization, with whatever single-consumer pointwise chain and quantization follow it."""

from dataclasses import dataclass

from graphfuse.dtypes import data_type
from graphfuse.ir import TensorId
from graphfuse.pointwise import Program, Scalar


@dataclass(frozen=True)
class View:
    """A tensor read or written as rows x columns, strides in elements.

    rows: (extent, stride) of the row axes, outermost first, merged where one stride
    serves both; empty for a single row. column_stride: 1 for packed columns (also when
    there is one column). alignment: bytes that the address is a multiple of.
    """

    tensor: TensorId
    name: str
    dtype: data_type
    rows: tuple[tuple[int, int], ...]
    column_stride: int
    alignment: int

    @property
    def row_stride(self) -> int:
        """The one stride between rows; only for views with at most one row axis."""
        return self.rows[0][1] if self.rows else 0


@dataclass(frozen=True)
class RmsNormFacts:
    """Everything an engine may look at: Y = epilogue(input * inverse_rms * weight + bias), stored as output.

    node: names for messages. rows, columns: extents. weight and bias: one row each.
    epilogue: pointwise program per element. inverse_rms: optional float32 output, one
    per row. block_scale: scales of a block-quantized output, columns / block_size a row;
    block_size is 0 for an output that is not block-quantized.
    """

    node: str
    rows: int
    columns: int
    input: View
    weight: View
    bias: View | None
    epsilon: Scalar
    epilogue: Program
    output: View
    inverse_rms: View | None = None
    block_scale: View | None = None
    block_size: int = 0
