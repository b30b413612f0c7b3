"""Scale and bias of a lower rank than the input: as if extents of 1 stood before theirs, to values and engines."""

import pytest
import torch

from graphfuse import heur_mode, norm_forward_phase
from graphfuse.contract import match
from graphfuse.op_graph.freeze import freeze
from graphfuse.patterns.rows import PATTERN
from support import graphs, oracle
from support.graphs import FLOAT

# Shape of the input, and the shapes that its scale may be given in.
SHAPES = {
    "rows": ((5, 64), ((1, 64), (64,))),
    "one row": ((1, 64), ((1, 64), (64,))),
    "heads": ((3, 4, 2, 32), ((1, 1, 1, 32), (1, 32), (32,))),
    "two axes": ((6, 4, 16), ((1, 4, 16), (4, 16))),
    "weights for each position": ((2, 6, 4, 16), ((1, 6, 1, 16), (6, 1, 16))),
    "no axis": ((4, 8), ((1, 1), (1,))),
}


def forward(shape, scale, bias, centred, device="cpu"):
    """x and what is made of it; the weight plus 1, which makes it a virtual tensor of its rank."""
    g = graphs.new(device=device)
    x, w, b = (g.tensor(dim, name=name) for name, dim in {"x": shape, "w": scale, "b": bias}.items())
    w = g.add(w, 1.0) if centred else w
    y, inverse = g.rmsnorm(x, w, 1e-5, b, norm_forward_phase=norm_forward_phase.TRAINING)
    g.swish(y).set_output().set_name("y")
    inverse.set_output().set_name("inverse")
    return g


def backward(shape, scale, rows, centred, device="cpu"):
    g = graphs.new(device=device)
    grad, x, inverse = (g.tensor(dim, name=n) for n, dim in {"grad": shape, "x": shape, "inverse": rows}.items())
    w = g.tensor(scale, name="w")
    w = g.add(w, 1.0) if centred else w
    for name, t in zip(("dx", "dw", "db"), g.rmsnorm_backward(grad, x, w, inverse, has_dbias=True), strict=True):
        t.set_output().set_name(name)
    return g


def values(*shape, seed):
    return torch.randn(shape, generator=graphs.generator("cpu", seed))


def axes_of(scale):
    return tuple(axis for axis, extent in enumerate(scale) if extent != 1)


def rows_of(shape, scale):
    return tuple(1 if axis in axes_of(scale) else extent for axis, extent in enumerate(shape))


def run(g, modes, pack, outputs):
    graphs.run(g, pack | outputs, modes)
    return outputs


@pytest.mark.parametrize("centred", [False, True], ids=["weight", "weight + 1"])
@pytest.mark.parametrize("case", SHAPES.values(), ids=SHAPES)
def test_values(case, centred):
    """Against float64, in each rank, of which all give the same bits."""
    shape, (full, *lower) = case
    x, w, b, grad = values(*shape, seed=0), values(*full, seed=1), values(*full, seed=2), values(*shape, seed=3)
    rows = rows_of(shape, full)
    found = []
    for scale in (full, *lower):
        pack = {"x": x, "w": w.reshape(scale), "b": b.reshape(scale)}
        made = run(
            forward(shape, scale, scale, centred),
            [heur_mode.FALLBACK],
            pack,
            {"y": torch.empty(shape), "inverse": torch.empty(rows)},
        )
        pack = {"grad": grad, "x": x, "w": pack["w"], "inverse": made["inverse"]}
        made |= run(
            backward(shape, scale, rows, centred),
            [heur_mode.FALLBACK],
            pack,
            {"dx": torch.empty(shape), "dw": torch.empty(scale), "db": torch.empty(scale)},
        )
        found.append(made)
    if axes_of(full):  # of no axes torch would take all
        weight = w.double() + centred
        y, inverse = oracle.rmsnorm(x, weight, 1e-5, b, axes=axes_of(full))
        exact = oracle.rmsnorm_gradients(grad, x, weight, 1e-5, axes_of(full))
        exact = dict(zip(("y", "inverse", "dx", "dw", "db"), (oracle.swish(y, 1.0), inverse, *exact), strict=True))
        for name, want in exact.items():
            torch.testing.assert_close(found[0][name].double(), want, rtol=2e-5, atol=2e-5)
    for other in found[1:]:
        assert all(torch.equal(other[name].flatten(), made.flatten()) for name, made in found[0].items())


def facts(pattern, graph):
    return next(m for m in match.find(pattern, freeze(graph)) if isinstance(m, match.Region)).facts


@pytest.mark.parametrize("centred", [False, True], ids=["weight", "weight + 1"])
@pytest.mark.parametrize("name", sorted(SHAPES.keys() - {"weights for each position"}))  # axes that are not one run
def test_engines_see_no_difference(name, centred):
    shape, (full, *lower) = SHAPES[name]
    rows = rows_of(shape, full)
    for scale in lower:
        for bias in (full, scale):
            assert facts(PATTERN, forward(shape, scale, bias, centred)) == facts(
                PATTERN, forward(shape, full, full, centred)
            )
        assert facts(PATTERN, backward(shape, scale, rows, centred)) == facts(
            PATTERN, backward(shape, full, rows, centred)
        )


@pytest.mark.emulate
@pytest.mark.parametrize("centred", [False, True], ids=["weight", "weight + 1"])
def test_one_kernel_takes_it(centred):
    shape, scale, rows = (3, 4, 64), (64,), (3, 4, 1)
    x, w, b, grad = values(*shape, seed=0), values(*scale, seed=1), values(*scale, seed=2), values(*shape, seed=3)
    g = forward(shape, scale, (1, 64), centred, "emulator")
    pack = {"x": x, "w": w, "b": b.view(1, 64)}
    made = run(g, [heur_mode.OPENSOURCE], pack, {"y": torch.empty(shape), "inverse": torch.empty(rows)})
    pack = {"grad": grad, "x": x, "w": w, "inverse": made["inverse"]}
    g = backward(shape, scale, rows, centred, "emulator")
    made |= run(
        g,
        [heur_mode.OPENSOURCE],
        pack,
        {"dx": torch.empty(shape), "dw": torch.empty(scale), "db": torch.empty(scale)},
    )
    weight = w.double() + centred
    y, inverse = oracle.rmsnorm(x, weight, 1e-5, b)
    dx, dw, db = oracle.rmsnorm_gradients(grad, x, weight.expand(1, 1, 64), 1e-5, (2,))
    exact = {"y": oracle.swish(y, 1.0), "inverse": inverse, "dx": dx, "dw": dw.view(64), "db": db.view(64)}
    for name, want in exact.items():
        torch.testing.assert_close(made[name].double(), want, rtol=2e-5, atol=2e-5)


def test_the_gradients_have_the_scales_shape():
    g = graphs.new(io_data_type=FLOAT)
    x, w, inverse = g.tensor([4, 8]), g.tensor([8]), g.tensor([4, 1])
    dx, dw, db = g.rmsnorm_backward(x, x, w, inverse, has_dbias=True)
    for t in (dx, dw, db):
        t.set_output()
    g.validate()
    assert (dx.get_dim(), dw.get_dim(), db.get_dim()) == ([4, 8], [8], [8]) and dw.get_stride() == [1]
