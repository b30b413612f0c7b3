"""The op rmsnorm_backward: shapes, what is refused, and its values against torch.autograd in float64."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphfuse import GraphNotSupportedError, GraphTypeError, GraphValidationError, data_type, heur_mode
from graphfuse import norm_forward_phase as phase
from support import graphs, oracle
from support.graphs import BF16, E4M3, FLOAT, HALF, TORCH

EPS = 1e-5
DOUBLE = data_type.DOUBLE
NAMES = ("DX", "DScale", "DBias")


def drawn(g, grad, x, weight, inverse, **given):
    """The op on tensors like these, with its outputs marked and named."""
    given = {"has_dbias": weight is not None, "compute_data_type": g.compute_data_type} | given
    tensors = [
        None if t is None else g.tensor(list(t.shape), list(t.stride()), dtype, name=name, byte_alignment=1)
        for name, (t, dtype) in {"grad": grad, "x": x, "weight": weight or (None, None), "inverse": inverse}.items()
    ]
    made = g.rmsnorm_backward(*tensors, **given)
    for name, t in zip(NAMES, made, strict=True):
        if t is not None:
            t.set_output().set_name(name)
    return made


def gradients(grad, x, weight, inverse, compute=FLOAT, modes=(heur_mode.FALLBACK,), dbias=None):
    """(DX, DScale, DBias) as the op makes them of (tensor, data type) pairs, in the compute type."""
    g = graphs.new(io_data_type=compute, compute_data_type=compute)
    made = drawn(g, grad, x, weight, inverse, **({} if dbias is None else {"has_dbias": dbias}))
    g.validate()
    kind = torch.float64 if compute is DOUBLE else torch.float32
    outputs = {
        n: torch.empty_strided(t.get_dim(), t.get_stride(), dtype=kind).fill_(7)
        for n, t in zip(NAMES, made, strict=True)
        if t is not None
    }
    values = {"grad": grad, "x": x, "weight": weight, "inverse": inverse}
    graphs.run(g, {n: v[0] for n, v in values.items() if v is not None} | outputs, modes)
    return tuple(outputs.get(n) for n in NAMES)


def check(grad, x, weight, axes, compute=FLOAT):
    """Of (tensor, data type) pairs. A sum's error is relative to the magnitudes that it adds."""
    scale = None if weight is None else weight[0]
    inverse = oracle.rmsnorm(x[0], None, EPS, axes=axes)[1]
    kind = torch.float64 if compute is DOUBLE else torch.float32
    got = gradients(grad, x, weight, (inverse.to(kind), compute), compute)
    want = oracle.rmsnorm_gradients(grad[0], x[0], scale, EPS, axes)
    normal, unit = x[0].double() * inverse, 2.0**-50 if compute is DOUBLE else 2.0**-20
    g = grad[0].double() * (1 if scale is None else scale.double())
    rows = [axis for axis in range(x[0].dim()) if scale is not None and scale.shape[axis] == 1]

    def summed(values):
        return values.abs().sum(rows, keepdim=True) if rows else values.abs()

    of = (
        inverse * (g.abs() + normal.abs() * (g * normal).abs().mean(axes, keepdim=True)),
        summed(grad[0].double() * normal),
        summed(grad[0].double()),
    )
    for name, a, b, size in zip(NAMES, got, want, of, strict=False):
        assert a.shape == b.shape
        assert ((a.double() - b).abs() <= unit * size).all(), (name, (a.double() - b).abs().max())
    assert got[len(want) :] == (None,) * (3 - len(want))


def placed(shape, dtype, seed, strides="packed"):
    """Random values as a (tensor, data type) pair."""
    source = graphs.generator("cpu", seed)
    values = torch.randn(shape, generator=source)
    if strides == "channels last":
        values = values.to(memory_format=torch.channels_last)
    if strides == "apart":
        values = torch.nn.functional.pad(values, (2, 3))[..., 2:-3]
    if strides == "turned":
        values = values.mT.contiguous().mT
    if strides == "expanded":
        values = values[:1].expand(shape)
    return values.to(TORCH[dtype]) if dtype is not DOUBLE else values.double(), dtype


# Shape of the input, of the scale, and the strides of gradient and input.
SHAPES = {
    "rows": ((7, 64), (1, 64), "packed", "packed"),
    "one column": ((5, 1), (1, 1), "packed", "packed"),
    "one row": ((1, 33), (1, 33), "packed", "packed"),
    "a vector": ((33,), (33,), "packed", "packed"),
    "rows apart": ((7, 33), (1, 33), "apart", "apart"),
    "turned": ((7, 33), (1, 33), "turned", "packed"),
    "expanded gradient": ((7, 33), (1, 33), "expanded", "packed"),
    "heads": ((3, 5, 2, 16), (1, 1, 1, 16), "packed", "apart"),
    "channels": ((2, 8, 3, 5), (1, 8, 1, 1), "packed", "packed"),
    "channels last": ((2, 8, 3, 5), (1, 8, 1, 1), "channels last", "channels last"),
    "two axes": ((4, 3, 8), (1, 3, 8), "packed", "turned"),
    "axes apart": ((4, 3, 8), (4, 1, 8), "packed", "packed"),
    "all axes": ((4, 8), (4, 8), "packed", "packed"),
    "no axis": ((4, 8), (1, 1), "packed", "packed"),
    "no rows": ((0, 16), (1, 16), "packed", "packed"),
}


@pytest.mark.parametrize("compute", [FLOAT, DOUBLE], ids=lambda d: d.name)
@pytest.mark.parametrize("case", SHAPES.values(), ids=SHAPES)
def test_gradients(case, compute):
    shape, scale, of_grad, of_x = case
    axes = tuple(axis for axis, extent in enumerate(scale) if extent != 1)
    if not axes:  # each element is its own row: torch takes no axes for all
        x = placed(shape, compute, 1)
        return no_axis(placed(shape, compute, 0), x, placed(scale, compute, 2), compute)
    check(placed(shape, compute, 0, of_grad), placed(shape, compute, 1, of_x), placed(scale, compute, 2), axes, compute)


def no_axis(grad, x, weight, compute):
    """A trailing axis of one element, normalized over, says the same."""
    inverse = (x[0].double() ** 2 + EPS).rsqrt()
    got = gradients(grad, x, weight, (inverse.to(x[0].dtype), compute), compute)
    wide = weight[0].expand(x[0].shape).unsqueeze(-1)
    want = oracle.rmsnorm_gradients(grad[0].unsqueeze(-1), x[0].unsqueeze(-1), wide, EPS)
    tolerance = {"rtol": 1e-12, "atol": 1e-12} if compute is DOUBLE else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(got[0].double(), want[0].squeeze(-1), **tolerance)
    for a, b in zip(got[1:], want[1:], strict=True):
        torch.testing.assert_close(a.double(), b.sum().view(weight[0].shape), **tolerance)


def test_without_a_scale():
    for shape in ((7, 33), (2, 3, 5, 8), (0, 8)):
        check(placed(shape, FLOAT, 0), placed(shape, FLOAT, 1), None, (-1,))


@pytest.mark.parametrize(
    "types", list(itertools.product((BF16, HALF, FLOAT), repeat=3)), ids=lambda t: "-".join(map(str, t))
)
def test_types(types):
    grad, x, weight = types
    check(placed((6, 48), grad, 0), placed((6, 48), x, 1), placed((1, 48), weight, 2), (-1,))


@given(
    rows=st.integers(0, 40),
    columns=st.integers(2, 70),
    strides=st.tuples(*[st.sampled_from(["packed", "apart", "turned"])] * 2),
    scaled=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_rows(rows, columns, strides, scaled, seed):
    weight = placed((1, columns), BF16, seed + 2) if scaled else None
    shape = (rows, columns)
    check(placed(shape, HALF, seed, strides[0]), placed(shape, BF16, seed + 1, strides[1]), weight, (-1,))


def test_outputs_are_rounded_to_their_types():
    grad, x, weight = (placed(shape, FLOAT, i) for i, shape in enumerate(((6, 48), (6, 48), (1, 48))))
    inverse = (oracle.rmsnorm(x[0], None, EPS)[1].float(), FLOAT)
    exact = gradients(grad, x, weight, inverse)
    g = graphs.new()
    made = drawn(g, grad, x, weight, inverse)
    types = (BF16, E4M3, HALF)
    for t, dtype in zip(made, types, strict=True):
        t.set_data_type(dtype)
    outputs = [torch.empty(e.shape, dtype=TORCH[dtype]) for e, dtype in zip(exact, types, strict=True)]
    pack = {"grad": grad[0], "x": x[0], "weight": weight[0], "inverse": inverse[0]}
    graphs.run(g, pack | dict(zip(NAMES, outputs, strict=True)))
    for out, value in zip(outputs, exact, strict=True):
        assert torch.equal(out.float(), oracle.rounded(value, out.dtype).float())


def test_a_row_of_nan_and_infinity_stays_in_its_row():
    grad, x, weight = (placed(shape, FLOAT, i) for i, shape in enumerate(((5, 16), (5, 16), (1, 16))))
    inverse = oracle.rmsnorm(x[0], None, EPS)[1].float()
    clean = gradients(grad, x, weight, (inverse, FLOAT))
    for bad in (float("nan"), float("inf")):
        grad[0][2, 3] = bad
        dx, dscale, dbias = gradients(grad, x, weight, (inverse, FLOAT))
        assert not dx[2].isfinite().any() and torch.equal(dx[[0, 1, 3, 4]], clean[0][[0, 1, 3, 4]])
        for got, before in ((dscale, clean[1]), (dbias, clean[2])):
            others = [c for c in range(16) if c != 3]
            assert not got[0, 3].isfinite() and torch.equal(got[0, others], before[0, others])


def test_rows_whose_norm_overflowed_have_no_gradient():
    """Their inverse RMS is 0, as rmsnorm makes it."""
    x = torch.full((2, 64), 1e30)
    dx, dscale, dbias = gradients(
        (torch.ones(2, 64), FLOAT), (x, FLOAT), (torch.ones(1, 64), FLOAT), (torch.zeros(2, 1), FLOAT)
    )
    assert (dx == 0).all() and (dscale == 0).all() and (dbias == 2).all()


def test_the_training_phase_feeds_it():
    """Forward and backward in one graph, with a loss of their own: sum(w * rmsnorm(x) * s)."""
    x, scale, w = torch.randn(6, 40), torch.randn(1, 40), torch.randn(6, 40)
    g = graphs.new()
    tx, ts, tw = g.tensor([6, 40], name="x"), g.tensor([1, 40], name="s"), g.tensor([6, 40], name="w")
    y, inverse = g.rmsnorm(tx, ts, EPS, norm_forward_phase=phase.TRAINING)
    for name, t in zip(NAMES, g.rmsnorm_backward(tw, tx, ts, inverse, has_dbias=True), strict=True):
        t.set_output().set_name(name)
    g.mul(y, tw).set_output().set_name("loss")
    out = {name: torch.empty_like(t) for name, t in zip(NAMES, (x, scale, scale), strict=True)}
    graphs.run(g, {"x": x, "s": scale, "w": w, "loss": torch.empty(6, 40)} | out)
    for got, want in zip(out.values(), oracle.rmsnorm_gradients(w, x, scale, EPS), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def test_shapes_types_and_strides_that_are_inferred():
    g = graphs.new(io_data_type=BF16)
    strides = [8 * 12, 1, 8 * 4, 8]
    x, grad = (g.tensor([2, 8, 3, 4], strides) for _ in range(2))
    scale, inverse = g.tensor([1, 8, 1, 1]), g.tensor([2, 1, 3, 4], data_type=FLOAT)
    dx, dscale, dbias = g.rmsnorm_backward(grad, x, scale, inverse, True)
    for t in (dx, dscale, dbias):
        t.set_output()
    g.validate()
    assert (dx.get_dim(), dx.get_stride()) == ([2, 8, 3, 4], strides)
    assert dscale.get_dim() == dbias.get_dim() == [1, 8, 1, 1]
    assert {t.get_data_type() for t in (dx, dscale, dbias)} == {BF16}


def test_outputs_that_are_not_made_are_none():
    def made(scale, has_dbias):
        g = graphs.new()
        given = (g.tensor([4, 8]), g.tensor([4, 8]), g.tensor([1, 8]) if scale else None, g.tensor([4, 1]))
        outputs = g.rmsnorm_backward(*given, has_dbias=has_dbias)
        outputs[0].set_output()
        g.validate()
        assert len(g._ir.nodes[0].outputs) == sum(t is not None for t in outputs)
        return [t is not None for t in outputs]

    assert made(True, True) == [True, True, True]
    assert made(True, False) == [True, True, False]
    assert made(False, False) == [True, False, False]


def outputs_of(g, *shapes, **given):
    tensors = [None if shape is None else g.tensor(list(shape), name=f"t{i}") for i, shape in enumerate(shapes)]
    g.rmsnorm_backward(*tensors, **({"has_dbias": True} | given))[0].set_output()


REFUSED = {
    "grad": (((4, 7), (4, 8), (1, 8), (4, 1)), {}, r"rmsnorm_backward.0.*grad.*\[4, 8\], got \[4, 7\]"),
    "scale": (((4, 8), (4, 8), (1, 7), (4, 1)), {}, r"scale must.*input \[4, 8\].*got \[1, 7\]"),
    "scale rank": (((4, 8), (4, 8), (1, 1, 8), (4, 1)), {}, r"scale must have the rank.*got \[1, 1, 8\]"),
    "scale of lower rank": (((4, 8), (4, 8), (4,), (4, 1)), {}, r"scale must have the rank.*got \[4\]"),
    "inverse": (((4, 8), (4, 8), (1, 8), (4, 8)), {}, r"inv_variance.*axes \[1\], \[4, 1\], got \[4, 8\]"),
    "one inverse": (((4, 8), (4, 8), (1, 8), (1, 1)), {}, r"inv_variance.*\[4, 1\], got \[1, 1\]"),
    "inverse without scale": (((2, 4, 8), (2, 4, 8), None, (2, 1, 1)), {"has_dbias": False}, r"\[2\], \[2, 4, 1\]"),
    "columns": (((4, 0), (4, 0), (1, 0), (4, 1)), {}, "no elements along a normalized axis"),
    "dbias": (((4, 8), (4, 8), None, (4, 1)), {}, "has_dbias=True without a scale; accepted: False"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_refused(case):
    shapes, given, message = case
    g = graphs.new()
    outputs_of(g, *shapes, **given)
    with pytest.raises(GraphValidationError, match=message):
        g.validate()


def test_an_output_that_is_not_made_says_why():
    g = graphs.new()
    outputs_of(g, (4, 8), (4, 8), None, (4, 1), has_dbias=False)
    g.nodes[0].outputs["DScale"].set_output()
    with pytest.raises(GraphValidationError, match="DScale is marked as output, but with has_dbias=False, no scale"):
        g.validate()


def test_arguments_that_must_be_given():
    g = graphs.new()
    t = g.tensor([4, 8])
    with pytest.raises(GraphTypeError, match="has_dbias must be bool, got None"):
        g.rmsnorm_backward(t, t, g.tensor([1, 8]), g.tensor([4, 1]))
    with pytest.raises(GraphTypeError, match="missing a required argument: 'inv_variance'"):
        g.rmsnorm_backward(t, t, has_dbias=False)


def test_a_printed_graph_makes_the_node_again():
    for scale, dbias in ((True, True), (True, False), (False, False)):
        g = graphs.new()
        outputs_of(g, (4, 8), (4, 8), (1, 8) if scale else None, (4, 1), has_dbias=dbias)
        scope: dict = {}
        exec(str(g), scope)  # noqa: S102
        g.validate(), scope["graph"].validate()
        assert scope["graph"].key() == g.key() and str(scope["graph"]) == str(g)


@pytest.mark.emulate
def test_a_generated_kernel_takes_it_where_there_is_one():
    g = graphs.new(device="emulator")
    outputs_of(g, (4, 8), (4, 8), (1, 8), (4, 1))
    g.build([heur_mode.A])
    assert g.get_engine_and_knobs_at_index(0)[0] == "rows"
    g = graphs.new(device="emulator", compute_data_type=DOUBLE)
    outputs_of(g, (4, 8), (4, 8), (1, 8), (4, 1))
    with pytest.raises(GraphNotSupportedError, match=r"computes in DOUBLE; accepted: FLOAT"):
        g.build([heur_mode.OPENSOURCE])
    g = graphs.new(device="emulator", compute_data_type=DOUBLE)
    outputs_of(g, (4, 8), (4, 8), (1, 8), (4, 1))
    g.build([heur_mode.A])
    assert g.get_engine_and_knobs_at_index(0)[0] == "reference"


@pytest.mark.emulate
@pytest.mark.parametrize("training_after", [False, True])
def test_around_it_kernels_are_generated(training_after):
    """A norm beside it becomes a kernel of its own, which it does not join."""
    x, scale, w = torch.randn(6, 64), torch.randn(1, 64), torch.randn(6, 64)
    g = graphs.new(device="emulator")
    tx, ts, tw = g.tensor([6, 64], name="x"), g.tensor([1, 64], name="s"), g.tensor([6, 64], name="w")
    y, inverse = g.rmsnorm(tx, ts, EPS, norm_forward_phase=phase.TRAINING)
    y.set_output().set_name("y")
    dx, dscale, _ = g.rmsnorm_backward(tw, tx, ts, inverse, has_dbias=False)
    dscale.set_output().set_name("DScale")
    outputs = {"y": torch.empty(6, 64), "DScale": torch.empty(1, 64), "DX": torch.empty(6, 64)}
    if training_after:  # and a second norm reads what it made
        dx = g.rmsnorm(dx, ts, EPS, norm_forward_phase=phase.TRAINING)[0]
    dx.set_output().set_name("DX")
    graphs.run(g, {"x": x, "s": scale, "w": w} | outputs, [heur_mode.A])
    engines = g.get_engine_and_knobs_at_index(0)[0]
    assert engines == ("rows", "rows", *["rows"] * training_after)
    want_dx, want_dscale, _ = oracle.rmsnorm_gradients(w, x, scale, EPS)
    want = oracle.rmsnorm(want_dx, scale, EPS)[0] if training_after else want_dx
    torch.testing.assert_close(outputs["DX"].double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(outputs["DScale"].double(), want_dscale, rtol=1e-5, atol=1e-5)
