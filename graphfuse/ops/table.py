"""The op table: all that graphfuse knows about each kind of node.

An entry has ports, typed attributes, shape rule, default data types and reference semantics in torch. A pointwise op
also has its scalar form in CUDA C++, its cost and its accuracy. The graph methods, the pattern vocabulary, the
reference engine and code generation read this table, so a new pointwise op is one entry in `pointwise.py`.

It loads neither torch nor CUDA: reference functions get the torch module as `t`.
"""

from dataclasses import replace

from graphfuse.base.dtypes import data_type
from graphfuse.base.enums import reduction_mode
from graphfuse.base.errors import MalformedError
from graphfuse.ops import (
    attention,
    channel_norms,
    collectives,
    convolutions,
    dequantization,
    dropout,
    fp8_attention,
    grouped_matmul,
    losses,
    moves,
    norms,
    pointwise,
    products,
    references,
    rotary,
    shapes,
    softmax,
    torch_expansion,
)
from graphfuse.ops.expansion import Expansion
from graphfuse.ops.op import Attribute, Op, Port, Spelling
from graphfuse.ops.pullback import NoRule
from graphfuse.ops.reductions import REDUCTIONS

_GROUPS = {"group_offset": (None, "a node for each group, of its rows by slice")}

_TABLE = (
    Op(
        "reduction",
        "One number per group of elements, by mode: ADD sum, MUL product, MIN, MAX, AMAX max|input|,\n"
        "AVG mean, NORM1 sum|input|, NORM2 sqrt(sum input^2), MUL_NO_ZEROS product of all but zeros.\n"
        "set_dim of the result determines the reduced axes: those of extent 1; all axes if it is unset.\n"
        "NaN stays NaN. The order of sums and products is not specified. Results for no elements: 0, 1 for\n"
        "products, +-infinity for MIN and MAX, NaN for AVG. Stored as FLOAT unless set otherwise.",
        inputs=(Port("input"),),
        outputs=(Port("output", dtype=data_type.FLOAT, label="OUT_0"),),
        infer=shapes.reduced,
        frozen=shapes.reduced_axes,
        reference=lambda t, x, a: torch_expansion.reduction(OPS, t, x, a),
        attributes=(Attribute("mode", (reduction_mode,), reduction_mode.AMAX),),
        not_offered=_GROUPS,
        vjp={"input": lambda p: REDUCTIONS[p.attributes["mode"]].vjp(p)},
    ),
    Op(
        "block_scale_quantize",
        "Block quantization: each block of block_size elements along axis (default: the last one that\n"
        "is not 1) gets the scale max|input| * (1 / largest finite element), rounded to the scale's\n"
        "type, and the elements are input * (1 / scale as stored), inverses and products in float32.\n"
        "block_size 16, NVFP4: FP4_E2M1 elements, FP8_E4M3 scales, or FP8_E8M0 if set.\n"
        "block_size 32, MXFP8 and MXFP4 (OCP Microscaling Formats 1.0): FP8_E4M3 elements, or\n"
        "FP8_E5M2 or FP4_E2M1 if set, FP8_E8M0 scales.\n"
        "block_size 128: FP8_E4M3 elements, or FP8_E5M2 if set, FLOAT scales, or FP8_E8M0 if set.\n"
        "FLOAT scales are that product, and at least 2^-126, also for blocks of zeros; an infinity in a block\n"
        "makes its scale infinite, its finite elements zero and the infinity NaN.\n"
        "FP8_E4M3 scales round to nearest even and saturate; a block whose scale rounds to zero becomes\n"
        "zeros. FP8_E8M0 scales round up to a power of two from 2^-127 to 2^127, as cuDNN's and\n"
        "FlashInfer's do, so that no element saturates; the conversion that OCP describes rounds down.\n"
        "Elements round to nearest even and saturate, those of FP4 after rounding to a multiple of\n"
        "2^-22 (2^-21 from 2 on, 2^-20 from 4 on). A scale reordered as F8_128x4 may have the extents of\n"
        "whole tiles, as block_scale_dequantize reads them; its padding is zero. Returns [Y, scale].",
        inputs=(Port("input"),),
        outputs=(Port("Y"), Port("scale", scales="axis")),
        infer=shapes.quantized,
        stored=shapes.quantized_stored,
        frozen=shapes.quantized_frozen,
        reference=references.quantize,
        attributes=(
            Attribute("block_size", (int,), 16),
            Attribute("axis", (int, type(None)), None),
            Attribute("transpose", (bool,), False),
        ),
        not_offered=_GROUPS | {"transpose": (False, "transpose of Y and of scale, in nodes after this one")},
        vjp=NoRule("quantization in blocks has no gradient"),
        may_recompute=False,
    ),
)

_TABLES = (
    norms.TABLE,
    softmax.TABLE,
    _TABLE,
    pointwise.TABLE,
    dequantization.TABLE,
    losses.TABLE,
    dropout.TABLE,
    products.TABLE,
    grouped_matmul.TABLE,
    convolutions.TABLE,
    attention.TABLE,
    fp8_attention.TABLE,
    channel_norms.TABLE,
    moves.TABLE,
    rotary.TABLE,
    collectives.TABLE,
)


def _with_reference(op: Op) -> Op:
    """The op; its reference is its expansion, if it has one."""
    if (op.expansion is not None) + (op.reference is not None) + bool(op.elsewhere) != 1:
        raise MalformedError(f"op {op.name!r} must have one of reference, expansion and elsewhere in the op table")
    if op.expansion is None:
        return op
    return replace(op, reference=lambda t, x, a: torch_expansion.expanded(OPS, op, t, x, a))


OPS: dict[str, Op] = {op.name: _with_reference(op) for table in _TABLES for op in table}

EXPANSIONS: dict[str, Expansion] = {
    op.name: op.expansion for op in OPS.values() if op.expansion is not None and op.expansion.in_rows
}
"""Op name -> its expansion, if kernels of rows support it."""

SPELLINGS: dict[str, Spelling] = {
    spelling.name: spelling
    for spelling in (
        Spelling("bias", "input + bias: a node of add.", "add", (("input", "a"), ("bias", "b"))),
        Spelling(
            "leaky_relu",
            "input above 0, else negative_slope * input: a node of relu.",
            "relu",
            (("input", "input"), ("negative_slope", "negative_slope")),
        ),
        Spelling(
            "leaky_relu_backward",
            "Gradient of leaky_relu, from that of its result: a node of relu_backward.",
            "relu_backward",
            (("loss", "loss"), ("input", "input"), ("negative_slope", "negative_slope")),
        ),
        Spelling("scaled_dot_product_flash_attention", "An earlier name of sdpa.", "sdpa"),
        Spelling("scaled_dot_product_flash_attention_backward", "An earlier name of sdpa_backward.", "sdpa_backward"),
    )
}
