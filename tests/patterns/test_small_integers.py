"""Rows that become integers of 8 bits: rounded and saturated by the store, and read as what they are."""

import pytest
import torch

from graphfuse import reduction_mode
from graphfuse.op_graph.freeze import freeze
from graphfuse.op_graph.lower import lower
from graphfuse.testing import reference
from support import graphs, small_integers
from support.emulation import Planned
from support.graphs import BF16, FLOAT
from support.small_integers import INT8, UINT8, Stored

C = 256
TYPES = pytest.mark.parametrize("dtype", [INT8, UINT8])


@pytest.mark.emulate
@pytest.mark.parametrize("spelled", [False, True])
@TYPES
def test_every_kind_of_number(dtype, spelled):
    case = Stored(dtype, "emulator", spelled)
    Planned(case.graph, case.pack).run()
    case.hold()


@TYPES
def test_the_reference_engine_stores_the_same(dtype):
    case = Stored(dtype, "cpu")
    graphs.run(case.graph, case.pack)
    case.hold()


def quantized(bounds, dtype):
    """Rows over their scale, rounded, bounded and stored. The names of the kernel's steps, codes, and those by torch of
    the scales that it wrote."""
    g = graphs.new(device="emulator")
    x = g.tensor([6, C], data_type=BF16, name="x")
    scale = g.mul(g.reduction(x, mode=reduction_mode.AMAX).set_dim([6, 1]), 1 / 127)
    scale.set_output().set_name("scale").set_data_type(FLOAT)
    y = g.round(g.div(x, scale))
    for bound, op in zip(bounds, (g.max, g.min), strict=True):
        y = op(y, bound)
    y.set_output().set_name("y").set_data_type(dtype)
    kind = getattr(torch, dtype.facts.torch)
    given = torch.randn(6, C, generator=graphs.generator("cpu", 4)).to(torch.bfloat16)
    scales = torch.empty(6, 1)
    planned = Planned(g, {"x": given, "scale": scales, "y": torch.empty(6, C, dtype=kind)})
    planned.run()
    want = (given.float() / scales).round().clamp(*bounds).to(kind)
    torch.testing.assert_close(scales, given.float().abs().amax(-1, keepdim=True) / 127)
    return {step.op_name for step in planned.part.facts.program.steps}, planned.pack["y"], want


@pytest.mark.emulate
@pytest.mark.parametrize(
    "dtype, bounds, kept",
    [
        (INT8, (-128.0, 127.0), set()),
        (INT8, (-1e9, 500.0), set()),
        (INT8, (-127.0, 127.0), {"max", "round"}),
        (UINT8, (0.0, 255.0), set()),
        (UINT8, (0.0, 15.0), {"max", "min", "round"}),
    ],
)
def test_what_the_store_does_anyway_is_not_computed(dtype, bounds, kept):
    names, made, want = quantized(bounds, dtype)
    assert names & {"max", "min", "round"} == kept
    assert torch.equal(made, want)


def test_checks_allow_a_few_integers_to_be_one_off():
    g = graphs.new()
    g.mul(g.tensor([8, C], data_type=FLOAT), 3.0).set_output().set_data_type(INT8)
    graph = lower(freeze(g))
    (t,) = (t for t in graph.tensors if not t.virtual and t.id in graph.producer)
    exact = torch.linspace(-200, 200, 8 * C, dtype=torch.float64).view(8, C)
    want = exact.round().clamp(-128, 127)

    def told(found):
        return reference.difference(torch, graph, t, found, exact, exact, 1e-5)

    some = (torch.arange(8 * C) % 100 == 0).view(8, C)
    assert told(want) is None and told(want + some) is None
    assert "are wrong" in told(want + 1) and "1 of 2048 elements are wrong" in told(want + 2 * (exact == exact.max()))


@pytest.mark.emulate
@TYPES
def test_integers_that_are_read(dtype):
    """Of rows and columns, one a row, and one a column."""
    g = graphs.new(device="emulator")
    x = g.tensor([5, C], data_type=dtype, name="x")
    zero = g.tensor([5, 1], data_type=dtype, name="zero")
    shift = g.tensor([1, C], data_type=dtype, name="shift")
    y = g.add(g.sub(x, zero), shift).set_output().set_name("y").set_data_type(FLOAT)
    total = g.reduction(y, mode=reduction_mode.ADD).set_dim([5, 1])
    total.set_output().set_name("total").set_data_type(FLOAT)
    kind, source = getattr(torch, dtype.facts.torch), graphs.generator("cpu", 2)
    low, high = map(int, small_integers.BOUNDS[dtype])
    shapes = {"x": (5, C), "zero": (5, 1), "shift": (1, C)}
    given = {n: torch.randint(low, high + 1, d, dtype=kind, generator=source) for n, d in shapes.items()}
    pack = given | {"y": torch.empty(5, C), "total": torch.empty(5, 1)}
    Planned(g, pack).run()
    want = given["x"].float() - given["zero"].float() + given["shift"].float()
    assert torch.equal(pack["y"], want) and torch.equal(pack["total"], want.sum(-1, keepdim=True))
