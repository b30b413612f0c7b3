"""matmul against float64 element by element, its shapes, strides and errors."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import graphfuse
from graphfuse import GraphNotSupportedError, GraphValidationError, data_type, differentiate
from graphfuse.ops import OPS, products
from graphfuse.ops.layouts import packed_stride
from support import dense, graphs
from support.graphs import BF16, FLOAT, HALF, TORCH
from support.operands import TYPES, hold, tensor, values


def multiplied(a, b, types=(FLOAT, FLOAT, FLOAT), **options):
    g = graphs.new()
    c = g.matmul(tensor(g, a, types[0], "a"), tensor(g, b, types[1], "b"), **options)
    c.set_output().set_name("c").set_data_type(types[2])
    g.validate()
    assert c.get_stride() == list(packed_stride(c.get_dim())), "row-major, whatever the inputs"
    out = torch.full(c.get_dim(), 7.0).to(TORCH[types[2]])
    graphs.run(g, {"a": a, "b": b, "c": out})
    return out


@given(
    batch=st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["both", "a", "b"])), max_size=3),
    m=st.integers(0, 6),
    k=st.integers(0, 40),
    n=st.integers(0, 6),
    types=st.tuples(*[st.sampled_from(TYPES)] * 3),
    data=st.data(),
)
def test_matmul(batch, m, k, n, types, data):
    shapes = [
        (*(extent if who in ("both", name) else 1 for extent, who in batch), *last)
        for name, last in (("a", (m, k)), ("b", (k, n)))
    ]
    a, b = (
        values(shape, dtype, seed, data.draw(st.permutations(range(len(shape)))))
        for seed, (shape, dtype) in enumerate(zip(shapes, types, strict=False))
    )
    got = multiplied(a, b, types)
    assert got.shape == (*(extent for extent, _ in batch), m, n)
    hold(got, dense.matmul(a.double(), b.double()), k)


def test_matmul_in_double():
    a, b = (torch.randn(5, 5, dtype=torch.float64, generator=graphs.generator("cpu", s)) for s in (0, 1))
    g = graphs.new(io_data_type=data_type.DOUBLE)
    c = g.matmul(g.tensor([5, 5], name="a"), g.tensor([5, 5], name="b"), compute_data_type=data_type.DOUBLE)
    c.set_output().set_name("c")
    out = torch.empty(5, 5, dtype=torch.float64)
    graphs.run(g, {"a": a, "b": b, "c": out})
    np.testing.assert_allclose(out.numpy(), dense.matmul(a, b), rtol=1e-14, atol=1e-14)


def test_sums_are_float32_and_rounded_once():
    """256 + 256 ones: bfloat16 would have stopped at 256, and C's type sees the whole sum."""
    ones = torch.ones(1, 512, dtype=torch.bfloat16)
    assert multiplied(ones, ones.T, (BF16, BF16, BF16)).item() == 512
    g = graphs.new(io_data_type=BF16, intermediate_data_type=BF16)
    c = g.matmul(g.tensor([1, 512], name="a"), g.tensor([512, 1], name="b"))
    g.sub(c, 512.0).set_output().set_name("out").set_data_type(FLOAT)
    a, out = torch.full((1, 512), 1.0078125, dtype=torch.bfloat16), torch.empty(1, 1)
    graphs.run(g, {"a": a, "b": ones.T.contiguous(), "out": out})
    assert out.item() == 4, "a virtual C is not rounded to bfloat16, whose neighbours of 516 are 4 apart"


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ([3, 4], [5, 6], r"B must have as many rows as A has columns, 4, got 5 \(A \[3, 4\], B \[5, 6\]\)"),
        ([4], [4], r"A and B must have one rank, 2 or more.*got \[4\] and \[4\]"),
        ([2, 3, 4], [4, 5], r"A and B must have one rank.*got \[2, 3, 4\] and \[4, 5\]"),
        ([2, 3, 4], [3, 4, 5], r"batch axis 0 does not broadcast"),
    ],
)
def test_what_cannot_be_multiplied(a, b, message):
    g = graphs.new()
    g.matmul(g.tensor(a), g.tensor(b), name="m").set_output()
    with pytest.raises(GraphValidationError, match=rf"node 'm' \(matmul\): {message}"):
        g.validate()


def test_padding_of_matmul():
    g = graphs.new()
    a, b = g.tensor([2, 2]), g.tensor([2, 2])
    g.matmul(a, b, FLOAT, padding=0.0).set_output()
    g.validate()
    with pytest.raises(GraphNotSupportedError, match=r"node 'm' \(matmul\): padding is 1.0; instead: 0.0"):
        g.matmul(a, b, padding=1.0, name="m")


CASTS = (data_type.INT8, BF16, HALF)


@pytest.mark.parametrize("multiplied_as", [BF16, HALF, FLOAT])
@pytest.mark.parametrize("types", list(itertools.product(CASTS, CASTS)), ids=lambda t: f"{t[0].name}-{t[1].name}")
def test_operands_that_are_cast_on_the_way(types, multiplied_as):
    """As cuDNN's users mix precisions: a cast is the type that an identity's result declares. The same bits as of
    operands that are stored in it, and what the casts cost is seen."""
    source = graphs.generator("cpu", 1)
    a, b = (
        (torch.randn(2, 32, 32, generator=source) * 3 - 1).clamp(-2, 2).to(getattr(torch, t.facts.torch)) for t in types
    )
    made = []
    for stored in (False, True):
        g = graphfuse.pygraph(handle=graphfuse.create_handle("cpu"))
        cast = [
            g.identity(tensor(g, x, t, name), compute_data_type=FLOAT).set_data_type(multiplied_as).set_output(stored)
            for x, t, name in ((a, types[0], "a"), (b, types[1], "b"))
        ]
        g.matmul(*cast, compute_data_type=FLOAT).set_output().set_data_type(multiplied_as).set_name("c")
        out = torch.empty(2, 32, 32).to(TORCH[multiplied_as])
        pack = {"a": a, "b": b, "c": out} | {t: torch.empty_like(out) for t in cast if stored}
        graphs.run(g, pack)
        made.append(out)
    assert torch.equal(*made)
    exact = dense.matmul(*(x.to(TORCH[multiplied_as]).double() for x in (a, b)))
    hold(made[0], exact, 32)
    if multiplied_as is BF16 and HALF in types:  # which it has fewer bits than
        unrounded = torch.from_numpy(dense.matmul(a.double(), b.double())).to(torch.bfloat16)
        assert (made[0] != unrounded).float().mean() > 0.05


def test_what_others_read_of_an_operand_is_rounded_too():
    g = graphs.new(io_data_type=BF16, intermediate_data_type=BF16)
    x = g.tensor([8, 8], data_type=FLOAT, name="x")
    y = g.add(x, 1.0)
    g.sub(y, 1.0).set_output().set_name("read").set_data_type(FLOAT)
    g.matmul(y, g.tensor([8, 8], name="w")).set_output().set_name("c")
    x, read = torch.full((8, 8), 2.0**-10), torch.empty(8, 8)
    pack = {"x": x, "w": torch.eye(8).bfloat16(), "c": torch.empty(8, 8, dtype=torch.bfloat16), "read": read}
    graphs.run(g, pack)
    assert (read == 0).all(), "1 + 2^-10 is 1 in bfloat16"


# Integers

INT8, UINT8, INT32, BOOLEAN = data_type.INT8, data_type.UINT8, data_type.INT32, data_type.BOOLEAN


def integers(shape, dtype, seed):
    low, high = dtype.facts.integers
    drawn = torch.randint(low, high + 1, shape, generator=graphs.generator("cpu", seed), dtype=torch.int64)
    return drawn.to(getattr(torch, dtype.facts.torch))


def wrapped(values: np.ndarray) -> np.ndarray:
    """int64, of which the multiples of 2^64 are lost, modulo 2^32."""
    return values.astype(np.int64).astype(np.int32)


def as_stored(values: np.ndarray, dtype) -> torch.Tensor:
    """INT32 as a type: integers saturate, floats are rounded to nearest."""
    values = torch.from_numpy(values)
    if dtype.facts.integers is None:
        return values.float().to(getattr(torch, dtype.facts.torch))
    low, high = dtype.facts.integers
    return values.clamp(low, high).to(getattr(torch, dtype.facts.torch))


def integer_graph(**types):
    return graphs.new(io_data_type=INT32, intermediate_data_type=INT32, compute_data_type=INT32, **types)


@given(
    batch=st.integers(1, 3),
    extents=st.tuples(st.integers(0, 6), st.integers(0, 40), st.integers(0, 6)),
    types=st.tuples(*[st.sampled_from([INT8, UINT8, INT32, BOOLEAN])] * 2),
    made=st.sampled_from([INT32, INT8, UINT8, FLOAT, BF16, HALF]),
    longest=st.sampled_from([products._LONGEST, 7]),
)
def test_integers_are_exact_modulo_two_to_the_32(batch, extents, types, made, longest):
    m, k, n = extents
    a, b = integers((batch, m, k), types[0], 0), integers((1, k, n), types[1], 1)
    g = integer_graph()
    g.matmul(tensor(g, a, types[0], "a"), tensor(g, b, types[1], "b")).set_output().set_name("c").set_data_type(made)
    out = torch.ones(batch, m, n).to(getattr(torch, made.facts.torch))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "_LONGEST", longest)
        graphs.run(g, {"a": a, "b": b, "c": out})
    a, b = (x.numpy().astype(np.int64) for x in (a, b.expand(batch, k, n)))
    want = np.einsum("bmk,bkn->bmn", a, b)
    assert torch.equal(out, as_stored(wrapped(want), made))


INTEGER_OPS = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "scale": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "abs": np.abs,
    "neg": np.negative,
    "identity": np.positive,
    "cmp_eq": np.equal,
    "cmp_neq": np.not_equal,
    "cmp_gt": np.greater,
    "cmp_ge": np.greater_equal,
    "cmp_lt": np.less,
    "cmp_le": np.less_equal,
    "add_square": lambda a, b: a + b * b,
    "logical_and": np.logical_and,
    "logical_or": np.logical_or,
    "logical_not": np.logical_not,
    "binary_select": lambda a, b, mask: np.where(mask != 0, a, b),
}


def test_every_op_of_integers_is_here():
    assert {op.name for op in OPS.values() if op.integers} == {"matmul", "conv_fprop", *INTEGER_OPS}


@pytest.mark.parametrize("name", INTEGER_OPS)
def test_pointwise_ops_of_integers(name):
    """Modulo 2^32, at the ends too; between nodes all 32 bits are kept."""
    edge = torch.tensor([-(2**31), 2**31 - 1, -1, 0, 1, 2**24 + 1], dtype=torch.int32)
    a, b = edge.repeat_interleave(6), edge.repeat(6)
    operands = (a, b, (b > 0).to(torch.int32))[: len(OPS[name].inputs)]
    g = integer_graph()
    read = [g.identity(g.tensor([36], name=f"i{i}")) for i in range(len(operands))]
    g.identity(getattr(g, name)(*read)).set_output().set_name("out")
    out = torch.empty(36, dtype=torch.int32)
    graphs.run(g, {"out": out} | {f"i{i}": x for i, x in enumerate(operands)})
    with np.errstate(over="ignore"):
        want = INTEGER_OPS[name](*(x.numpy() for x in operands))
    np.testing.assert_array_equal(out.numpy(), want.astype(np.int32))


def test_an_epilogue_in_float_and_numbers():
    """Scales of a quantized product, a number in both kinds of nodes, a norm behind it by a kernel."""
    a, b, scale = integers((1, 6, 64), INT8, 0), integers((1, 64, 32), INT8, 1), torch.rand(1, 1, 32)
    want = (np.matmul(a.numpy().astype(np.int64), b.numpy()) + 3) * 0.5
    for device, mode in (("cpu", graphfuse.heur_mode.FALLBACK), ("emulator", graphfuse.heur_mode.A)):
        g = graphs.new(device=device, io_data_type=INT8)
        c = g.matmul(tensor(g, a, INT8, "a"), tensor(g, b, INT8, "b"), compute_data_type=INT32)
        y = g.mul(g.mul(g.add(c, 3, compute_data_type=INT32), 0.5), g.tensor([1, 1, 32], data_type=FLOAT, name="s"))
        y = g.softmax(g.mul(y, 1e-4)).set_output().set_name("y").set_data_type(FLOAT)
        out = torch.empty(1, 6, 32)
        graphs.run(g, {"a": a, "b": b, "s": scale, "y": out}, [mode])
        exact = torch.from_numpy(want) * scale.double() * 1e-4
        torch.testing.assert_close(out.double(), exact.softmax(-1), rtol=2e-5, atol=1e-7)


def test_a_value_that_is_cast_to_integers_is_multiplied_as_that():
    """Rounded to nearest and saturated, by a node in FLOAT."""
    x = torch.tensor([[0.4, 1.5, 2.5, -300.0]])
    g = graphs.new(io_data_type=FLOAT)
    y = g.mul(g.tensor([1, 4], name="x"), 1.0).set_data_type(INT8)
    c = g.matmul(y, g.tensor([4, 4], data_type=INT8, name="w"), compute_data_type=INT32)
    c.set_output().set_name("c").set_data_type(INT32)
    out = torch.empty(1, 4, dtype=torch.int32)
    graphs.run(g, {"x": x, "w": torch.eye(4).to(torch.int8), "c": out})
    assert out.tolist() == [[0, 2, 2, -128]]


def _read(dtype, **how):
    return lambda g: g.add(g.tensor([4], data_type=dtype, name="x", **how), 1)


WRONG_INTEGERS = {
    "float": (
        _read(HALF),
        r"computes in INT32 and a \(tensor 'x'.* is HALF; accepted: INT8, UINT8, INT32, BOOLEAN, and",
    ),
    "int64": (_read(data_type.INT64), "is INT64; accepted: INT8"),
    "number": (lambda g: g.add(g.tensor([4]), 1.5), r"and b \(.*\) is 1.5; accepted: .* numbers that INT32 holds"),
    "large number": (lambda g: g.add(g.tensor([4]), 2**31), r"and b \(.*\) is 2147483648.0; accepted"),
    "between": (
        lambda g: g.add(g.exp(g.tensor([4], data_type=FLOAT), compute_data_type=FLOAT), 1),
        "is FLOAT; accepted: .*A virtual tensor has the type that its node computes in",
    ),
    "op": (lambda g: g.exp(g.tensor([4])), "compute data type is INT32; accepted: FLOAT, DOUBLE$"),
    "type": (lambda g: g.add(g.tensor([4]), 1, compute_data_type=HALF), "is HALF; accepted: FLOAT, DOUBLE, INT32$"),
}


@pytest.mark.parametrize(("draw", "message"), WRONG_INTEGERS.values(), ids=WRONG_INTEGERS)
def test_what_is_not_computed_in_integers(draw, message):
    g = integer_graph()
    draw(g).set_output()
    with pytest.raises(GraphValidationError, match=message):
        g.validate()


def test_integers_have_no_gradient():
    g = graphs.new()
    y = g.identity(g.tensor([4, 4], name="x")).set_data_type(INT8)
    c = g.matmul(y, g.tensor([4, 4], data_type=INT8), compute_data_type=INT32)
    g.mul(c, 1.0).set_output().set_name("out")
    with pytest.raises(GraphNotSupportedError, match=r"\(matmul\): no gradient of A .*: what is computed in INT32 has"):
        differentiate(g, ["out"], ["x"])


def test_a_gated_pair_of_products_without_a_type_for_intermediates():
    """As cuDNN's samples draw it: products of transposed weights, SiLU written as nodes, every plan run by index."""
    x, gate, up = (
        torch.randn(1, rows, 16, generator=graphs.generator("cpu", rows + n)).bfloat16()
        for n, rows in enumerate((6, 10, 10))
    )
    handle = graphfuse.create_handle("cpu")
    g = graphfuse.pygraph(handle=handle, compute_data_type=FLOAT)
    tensors = [g.tensor(dim=list(t.shape), stride=list(t.stride()), data_type=BF16) for t in (x, gate.mT, up.mT)]
    X, G, U = tensors
    gated = g.matmul(name="gate", A=X, B=G, compute_data_type=FLOAT)
    gated = g.mul(a=gated, b=g.sigmoid(input=gated))
    out = g.mul(a=gated, b=g.matmul(name="up", A=X, B=U, compute_data_type=FLOAT))
    out.set_output(True).set_data_type(BF16)
    g.validate()
    g.build_operation_graph()
    g.create_execution_plans([graphfuse.heur_mode.A, graphfuse.heur_mode.FALLBACK])
    g.check_support()
    g.build_plans(graphfuse.build_plan_policy.ALL)
    exact = torch.nn.functional.silu(x.double() @ gate.double().mT) * (x.double() @ up.double().mT)
    for index in range(g.get_execution_plan_count()):
        made = torch.full(exact.shape, float("nan")).bfloat16()
        size = g.get_workspace_size_plan_at_index(index)
        space = torch.empty(size, dtype=torch.uint8) if size else None
        g.execute_plan_at_index({X: x, G: gate.mT, U: up.mT, out: made}, space, index=index, handle=handle)
        torch.testing.assert_close(made.double(), exact, rtol=2.0**-8, atol=1e-4)
