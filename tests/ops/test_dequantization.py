"""block_scale_dequantize against tables of the types' values and numpy.kron, alone and in front of matrix products."""

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphfuse import GraphValidationError, data_type, differentiate, tensor_reordering
from graphfuse.base.errors import GraphNotSupportedError
from graphfuse.ops import BLOCKS
from graphfuse.ops.layouts import packed_stride
from support import graphs, oracle
from support.graphs import BF16, E4M3, E5M2, FLOAT, FP4, HALF

E8M0, INT8 = data_type.FP8_E8M0, data_type.INT8
SWIZZLED = tensor_reordering.F8_128x4
KINDS = {
    E4M3: ml_dtypes.float8_e4m3fn,
    E5M2: ml_dtypes.float8_e5m2,
    FP4: ml_dtypes.float4_e2m1fn,
    E8M0: ml_dtypes.float8_e8m0fnu,
    INT8: np.int8,
    FLOAT: np.float32,
}
CODES = {FP4: np.arange(16), E8M0: np.arange(100, 150), INT8: np.arange(256)}
"""Bytes that an element may be; of others all that are finite. Scales are such that no product leaves float32."""


def drawn(dtype, shape, seed) -> np.ndarray:
    """Random values of a type."""
    source = np.random.default_rng(seed)
    if dtype is FLOAT:
        return source.standard_normal(shape).astype(np.float32)
    every = CODES.get(dtype, np.arange(256)).astype(np.uint8).view(KINDS[dtype])
    every = every[np.isfinite(every.astype(np.float32))]
    return every[source.integers(0, len(every), shape)]


def lying(values: np.ndarray, dtype, order) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Memory of values whose axes are in this order, outermost first, and their strides; FP4 two to a byte."""
    memory = np.ascontiguousarray(values.transpose(order)).view(np.uint8)
    if dtype is FP4:
        memory = memory & 15
        memory = memory[..., 0::2] | memory[..., 1::2] << 4
    memory = memory.view(np.float32) if dtype is FLOAT else memory.view(np.int8) if dtype is INT8 else memory
    stored = torch.from_numpy(memory)
    return stored.permute(*np.argsort(order).tolist()), packed_stride(values.shape, order)


def exact(values: np.ndarray, scale: np.ndarray, sizes) -> np.ndarray:
    """float64 products of elements and the scales of their blocks."""
    wide = np.kron(scale.astype(np.float64), np.ones(sizes))[tuple(map(slice, values.shape))]
    return values.astype(np.float64) * wide


def tensor(g, values, dtype, name, order=None):
    """(tensor, memory)"""
    order = range(values.ndim) if order is None else order
    memory, stride = lying(values, dtype, list(order))
    return g.tensor(values.shape, stride, dtype, name=name), memory


def tiles(scale: np.ndarray, axis: int, fill: int) -> torch.Tensor:
    """Scales of one byte as F8_128x4, their blocks along an axis."""
    return torch.from_numpy(oracle.swizzled(np.moveaxis(scale.view(np.uint8), axis, -1), fill))


def scales_of(shape, sizes):
    return tuple(-(-extent // size) for extent, size in zip(shape, sizes, strict=True))


def dequantized(values, scale, types, block_size, orders=(None, None), **options):
    g = graphs.new()
    x, given_x = tensor(g, values, types[0], "x", orders[0])
    s, given_s = tensor(g, scale, types[1], "scale", orders[1])
    g.block_scale_dequantize(x, s, block_size, **options).set_output().set_name("out")
    g.validate()
    (made,) = g._ir.outputs
    assert made.dtype is FLOAT
    out = torch.empty_strided(made.dim, made.stride).fill_(7.0)
    graphs.run(g, {"x": given_x, "scale": given_s, "out": out})
    return out.double().numpy()


FORMATS = [(e, s, size) for size, made in BLOCKS.items() for e in made.elements for s in made.scales]
FORMATS += [(INT8, FLOAT, 64)]


@pytest.mark.parametrize(("element", "kind", "size"), FORMATS, ids=lambda v: getattr(v, "name", str(v)))
@pytest.mark.parametrize("axis", [1, 2])
def test_formats(element, kind, size, axis):
    """Of rows and of columns, each with the last block not whole."""
    shape = tuple(2 if a == 0 else 3 * size - 4 if a == axis else 6 for a in range(3))
    sizes = tuple(size if a == axis else 1 for a in range(3))
    values, scale = drawn(element, shape, 0), drawn(kind, scales_of(shape, sizes), 1)
    order = [0, 1, 2] if axis == 2 else [0, 2, 1]
    want = exact(values, scale, sizes).astype(np.float32)  # one rounding, where a scale has as many bits as FLOAT
    for told in (sizes, sizes[1:], [size]):
        np.testing.assert_array_equal(dequantized(values, scale, (element, kind), told, (order, order)), want)


@given(
    axes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 4)), min_size=1, max_size=4),
    types=st.tuples(st.sampled_from([E4M3, E5M2, INT8]), st.sampled_from([E8M0, E4M3])),
    data=st.data(),
)
def test_blocks_along_any_axes(axes, types, data):
    shape, sizes = zip(*axes, strict=True)
    values, scale = drawn(types[0], shape, 2), drawn(types[1], scales_of(shape, sizes), 3)
    orders = [data.draw(st.permutations(range(len(shape)))) for _ in range(2)]
    given_sizes = sizes
    while len(given_sizes) > 2 and given_sizes[0] == 1 and data.draw(st.booleans()):
        given_sizes = given_sizes[1:]
    made = dequantized(values, scale, types, given_sizes, orders)
    np.testing.assert_array_equal(made, exact(values, scale, sizes))


@dataclass(frozen=True)
class Operand:
    """A side of a product: its elements [batch, rows, columns], its scales, and how blocks run."""

    values: np.ndarray
    scale: np.ndarray
    sizes: tuple[int, int, int]

    @classmethod
    def of(cls, shape, axis, element, kind, size, seed):
        sizes = tuple(size if a == axis else 1 for a in range(3))
        return cls(drawn(element, shape, seed), drawn(kind, scales_of(shape, sizes), seed + 1), sizes)

    @property
    def exact(self) -> np.ndarray:
        return exact(self.values, self.scale, self.sizes)


PRODUCTS = {
    "MXFP8": (E4M3, E8M0, 32),
    "MXFP8 E5M2": (E5M2, E8M0, 32),
    "MXFP4": (FP4, E8M0, 32),
    "NVFP4": (FP4, E4M3, 16),
}


@pytest.mark.parametrize("whole", [True, False], ids=["whole tiles", "as many as blocks"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_block_scaled_product(name, whole):
    """As cuDNN's users draw it: K-major operands, scales in tiles, the product times a number of its own."""
    element, kind, size = PRODUCTS[name]
    m, n, k = 130, 72, 5 * size
    a, b = Operand.of((1, m, k), 2, element, kind, size, 4), Operand.of((1, k, n), 1, element, kind, size, 6)
    g = graphs.new(io_data_type=BF16)
    A, given_a = tensor(g, a.values, element, "a")
    B, given_b = tensor(g, b.values, element, "b", [0, 2, 1])
    blocks = 8 if whole else 5
    rows, columns = (256, 128) if whole else (m, n)
    SA = g.tensor([1, rows, blocks], data_type=kind, reordering_type=SWIZZLED, name="sa")
    SB = g.tensor([1, blocks, columns], [blocks * columns, 1, blocks], kind, reordering_type=SWIZZLED, name="sb")
    left = g.block_scale_dequantize(input=A, descale=SA, block_size=[1, size], name="left")
    right = g.block_scale_dequantize(B, SB, block_size=[size, 1], name="right").set_data_type(FLOAT)
    alpha = g.tensor([1, 1, 1], data_type=FLOAT, name="alpha")
    g.mul(g.matmul(left, right), alpha).set_output().set_name("out").set_data_type(FLOAT)
    out = torch.empty(1, m, n)
    nothing = 0x7F if kind is E4M3 else 0xFF  # NaN, which shows wherever padding is read
    pack = {"a": given_a, "b": given_b, "sa": tiles(a.scale, 2, nothing), "sb": tiles(b.scale, 1, nothing)}
    graphs.run(g, pack | {"alpha": torch.full((1, 1, 1), 0.5), "out": out})
    want, size_of = 0.5 * (a.exact @ b.exact), np.abs(a.exact) @ np.abs(b.exact)
    assert (np.abs(out.double().numpy() - want) <= 1e-6 * size_of).all()


def test_a_product_whose_sums_fit_is_exact():
    """Elements and scales of few bits: no sum is rounded, so that the product is the integers' one."""
    source = np.random.default_rng(8)
    codes = source.integers(0, 16, (2, 64, 64)).astype(np.uint8).view(KINDS[FP4])
    scale = source.integers(125, 130, (2, 64, 4)).astype(np.uint8).view(KINDS[E8M0])
    a = exact(codes[:1], scale[:1], (1, 1, 16))
    b = exact(codes[1:], scale[1:], (1, 1, 16))
    g = graphs.new()
    left, given_a = tensor(g, codes[:1], FP4, "a")
    right, given_b = tensor(g, codes[1:], FP4, "b")
    scales = [tensor(g, scale[i : i + 1], E8M0, name) for i, name in enumerate(("sa", "sb"))]
    left, right = (g.block_scale_dequantize(x, s, [1, 16]) for x, (s, _) in zip((left, right), scales, strict=True))
    c = g.matmul(left, g.transpose(right, permutation=[0, 2, 1]))
    c.set_output().set_name("out")
    out = torch.empty(1, 64, 64)
    graphs.run(g, {"a": given_a, "b": given_b, "sa": scales[0][1], "sb": scales[1][1], "out": out})
    np.testing.assert_array_equal(out.double().numpy(), a @ b.transpose(0, 2, 1))


def test_what_was_quantized_comes_back():
    """In one graph, by the scales in tiles that it writes itself."""
    x = torch.randn(130, 96, generator=graphs.generator("cpu", 0))
    codes, scales = oracle.mxfp8(x.numpy(), "e4m3")
    g = graphs.new()
    y, scale = g.block_scale_quantize(g.tensor([130, 96], name="x"), block_size=32)
    y.set_output().set_name("y")
    scale.set_output().set_name("scale").set_reordering_type(SWIZZLED)
    g.block_scale_dequantize(y, scale, [32]).set_output().set_name("out").set_data_type(BF16)
    out = torch.empty(130, 96, dtype=torch.bfloat16)
    pack = {"x": x, "y": torch.empty(130, 96, dtype=torch.uint8), "scale": torch.empty(1024, dtype=torch.uint8)}
    graphs.run(g, pack | {"out": out})
    want = oracle.from_mxfp8(torch.from_numpy(codes), torch.from_numpy(scales), "e4m3")
    assert torch.equal(out.double(), want)


def drawn_with(x, scale, block_size, reordered=False, kind=E8M0, **options):
    g = graphs.new()
    order = SWIZZLED if reordered else tensor_reordering.NONE
    s = g.tensor(scale, data_type=kind, reordering_type=order, name="s")
    g.block_scale_dequantize(g.tensor(x, data_type=E4M3, name="x"), s, block_size, name="d", **options).set_output()
    return g


@pytest.mark.parametrize(
    ("x", "scale", "block_size", "reordered", "message"),
    [
        (
            [4, 64],
            [4, 4],
            [1, 32],
            False,
            r"\): descale must have shape \[4, 2\], an element for each block.*got \[4, 4\]",
        ),
        ([4, 64], [4, 4], [32], False, r"\): descale must have shape \[4, 2\] or \[1, 64\], an element.*got \[4, 4\]"),
        ([4, 64], [2], [1, 32], False, r"\): descale must have the rank of input \[4, 64\], got \[2\]"),
        ([4, 64], [4, 2], [0, 32], False, r"\): block_size must be 1 to 2 integers >= 1.*got \[0, 32\]"),
        ([4, 64], [4, 2], [1, 1, 32], False, r"\): block_size must be 1 to 2 integers >= 1.*got \[1, 1, 32\]"),
        ([4, 64], [4, 2], [], False, r"\): block_size must be 1 to 2 integers >= 1.*got \[\]"),
        ([4, 64], [128, 4], [1, 32], False, r"\): descale \(.*\) has the extents of whole tiles; accepted: \[4, 2\]"),
        (
            [64, 64],
            [2, 2],
            [32, 32],
            True,
            r"'s'.* is reordered and node 'd'.* has blocks of \[32, 32\]; accepted: along",
        ),
    ],
)
def test_what_is_refused(x, scale, block_size, reordered, message):
    with pytest.raises(GraphValidationError, match=rf"node 'd' \(block_scale_dequantize\){message}|{message}"):
        drawn_with(x, scale, block_size, reordered).validate()


def test_a_negative_scale_is_refused():
    with pytest.raises(
        GraphNotSupportedError, match=r"node 'd'.*is_negative_scale is True; instead: neg of the result"
    ):
        drawn_with([4, 64], [4, 2], [1, 32], is_negative_scale=True)


def test_reordered_scales_of_two_readers():
    g = drawn_with([4, 4], [4, 4], [1, 1], reordered=True)
    with pytest.raises(GraphValidationError, match=r"'s'.*has blocks of \[1, 1\]; accepted: along one axis"):
        g.validate()
    g = graphs.new()
    s = g.tensor([128, 128], data_type=E8M0, reordering_type=SWIZZLED, name="s")
    for axis, name in ((1, "one"), (0, "two")):
        x = g.tensor([128 * (32 if a == axis else 1) for a in range(2)], data_type=E4M3)
        g.block_scale_dequantize(x, s, [32 if a == axis else 1 for a in range(2)], name=name).set_output()
    with pytest.raises(
        GraphValidationError, match=r"'s'.*node '(one|two)'.*along axis \d; accepted: blocks along the axis"
    ):
        g.validate()


def test_reordered_scales_are_of_one_byte():
    with pytest.raises(GraphValidationError, match=r"'s' \(FLOAT.*reordered as F8_128x4; accepted: scales of 8 bits"):
        drawn_with([4, 64], [4, 2], [1, 32], reordered=True, kind=FLOAT).validate()


def test_the_axis_of_blocks_is_part_of_the_key():
    """Scales of 128 x 128 in tiles, of rows or of columns of blocks: other memory."""

    def key(axis, **options):
        g = graphs.new()
        s = g.tensor([128, 128], data_type=E8M0, **options)
        x = g.tensor([4096, 4096], data_type=E4M3)
        part = g.slice(x, slices=[slice(0, 4096 if a == axis else 128) for a in range(2)])
        g.block_scale_dequantize(part, s, [32 if a == axis else 1 for a in range(2)]).set_output()
        g.validate()
        return g.key()

    assert key(1, reordering_type=SWIZZLED) == key(1, reordering_type=SWIZZLED, stride=[1, 128])
    assert len({key(axis, reordering_type=order) for axis in (0, 1) for order in tensor_reordering}) == 4


def test_gradients_end_there():
    g = graphs.new()
    x = g.tensor([4, 64], data_type=BF16, name="x")
    g.block_scale_dequantize(x, g.tensor([4, 2], data_type=E8M0), [1, 32]).set_output().set_name("out")
    with pytest.raises(GraphNotSupportedError, match=r"no gradient of input \('x'\): elements that were quantized"):
        differentiate(g, ["out"], ["x"])


def test_an_operand_is_rounded_to_the_type_it_is_stored_as():
    values, scale = drawn(E4M3, (8, 32), 0), drawn(E4M3, (8, 1), 1)
    g = graphs.new()
    x, given_x = tensor(g, values, E4M3, "x")
    s, given_s = tensor(g, scale, E4M3, "s")
    g.block_scale_dequantize(x, s, [1, 32]).set_output().set_name("out").set_data_type(HALF)
    out = torch.empty(8, 32, dtype=torch.float16)
    graphs.run(g, {"x": given_x, "s": given_s, "out": out})
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(out.numpy(), exact(values, scale, (1, 32)).astype(np.float16))
