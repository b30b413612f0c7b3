"""The formats of block quantization."""

from dataclasses import dataclass

from graphfuse.dtypes import data_type


@dataclass(frozen=True)
class BlockFormat:
    """What block_scale_quantize makes: element types, the default first, and the type of a block's scale."""

    elements: tuple[data_type, ...]
    scale: data_type


BLOCKS = {
    16: BlockFormat((data_type.FP4_E2M1,), data_type.FP8_E4M3),  # NVFP4
    32: BlockFormat((data_type.FP8_E4M3, data_type.FP8_E5M2), data_type.FP8_E8M0),  # MXFP8
}
"""By block size."""


def block_size(element: data_type) -> int | None:
    """Elements of a block of this element type; None for a type that is not quantized in blocks."""
    return next((size for size, made in BLOCKS.items() if element in made.elements), None)
