"""The formats of block quantization."""

from dataclasses import dataclass

from graphfuse.base.dtypes import data_type

SMALLEST_SCALE = 2.0**-126
"""FLOAT scales are never below it: the smallest number whose inverse float32 holds, so that a block of zeros has one to
divide by."""


@dataclass(frozen=True)
class BlockFormat:
    """Result of block_scale_quantize: types of elements and of a block's scale, the default first. Any element goes
    with any scale."""

    elements: tuple[data_type, ...]
    scales: tuple[data_type, ...]


BLOCKS = {
    # NVFP4, and with the other scale what FlashInfer makes beside it
    16: BlockFormat((data_type.FP4_E2M1,), (data_type.FP8_E4M3, data_type.FP8_E8M0)),
    # MXFP8 and MXFP4
    32: BlockFormat((data_type.FP8_E4M3, data_type.FP8_E5M2, data_type.FP4_E2M1), (data_type.FP8_E8M0,)),
    # What DeepSeek's models and DeepGEMM's products read: a group of each token
    128: BlockFormat((data_type.FP8_E4M3, data_type.FP8_E5M2), (data_type.FLOAT, data_type.FP8_E8M0)),
}
"""By block size."""


def block_size(element: data_type) -> int | None:
    """Elements of the smallest block of this element type; None for a type that is not quantized in blocks."""
    return next((size for size, made in BLOCKS.items() if element in made.elements), None)
