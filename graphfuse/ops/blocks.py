"""The formats of block quantization."""

from dataclasses import dataclass

from graphfuse.base.dtypes import data_type

SMALLEST_SCALE = 2.0**-126
"""Least FLOAT scale: the smallest number whose reciprocal is finite in float32, for blocks of zeros."""


@dataclass(frozen=True)
class BlockFormat:
    """Types of elements and of scales that block_scale_quantize can make, the default first, in any combination."""

    elements: tuple[data_type, ...]
    scales: tuple[data_type, ...]


BLOCKS = {
    # NVFP4; with FP8_E8M0 scales, another format of FlashInfer
    16: BlockFormat((data_type.FP4_E2M1,), (data_type.FP8_E4M3, data_type.FP8_E8M0)),
    # MXFP8 and MXFP4
    32: BlockFormat((data_type.FP8_E4M3, data_type.FP8_E5M2, data_type.FP4_E2M1), (data_type.FP8_E8M0,)),
    # Input of DeepSeek's models and of DeepGEMM: groups of 128 elements of each token
    128: BlockFormat((data_type.FP8_E4M3, data_type.FP8_E5M2), (data_type.FLOAT, data_type.FP8_E8M0)),
}
"""Block size -> its formats."""


def block_size(element: data_type) -> int | None:
    """Smallest block size of an element type; None if it is not quantized in blocks."""
    return next((size for size, made in BLOCKS.items() if element in made.elements), None)
