"""execute with override_uids, override_shapes, override_strides: one build, any number of rows.

What a graph computes with other shapes is held against float64, and bit by bit against a graph that was built for them.
"""

import dataclasses
import random
import re
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphfuse import (
    GraphfuseError,
    GraphStateError,
    VariantPackError,
    VariantPackTypeError,
    WorkspaceError,
    data_type,
    heur_mode,
    norm_forward_phase,
    reduction_mode,
    reshaped,
    tensor_reordering,
)
from graphfuse.emulator import kernel
from graphfuse.planner import Planner
from graphfuse.runtime.fastcall import row_class
from support import graphs, oracle, whole
from support.graphs import BF16, E4M3, FLOAT

OPEN, FALLBACK = [heur_mode.OPENSOURCE], [heur_mode.FALLBACK]
COLUMNS = 40
PLANS = [
    pytest.param(FALLBACK, "cpu", id="reference"),
    pytest.param(OPEN, "emulator", id="kernels", marks=pytest.mark.emulate),
]


def new(device="cpu", **types):
    return graphs.new(device=device, is_override_shape_enabled=True, **types)


def norm(device="cpu", rows=64, columns=COLUMNS, **types):
    """swish(rmsnorm(x)): tensors x, w, out."""
    g = new(device, **types)
    x, w = g.tensor([rows, columns], name="x", uid=1), g.tensor([1, columns], name="w", uid=2)
    y, _ = g.rmsnorm(x, w, 1e-5, norm_forward_phase=norm_forward_phase.INFERENCE)
    g.swish(y).set_output().set_name("out").set_uid(3)
    return g


def values(rows, columns=COLUMNS, seed=0):
    source = graphs.generator("cpu", seed)
    x, w = torch.randn(rows, columns, generator=source), torch.randn(1, columns, generator=source)
    return {"x": x, "w": w, "out": torch.full((rows, columns), float("nan"))}


def check(pack, rows=None):
    x = pack["x"][:rows]
    want = oracle.swish(oracle.rmsnorm(x, pack["w"], 1e-5)[0])
    torch.testing.assert_close(pack["out"][:rows].double(), want, rtol=1e-5, atol=1e-5)


def to(rows, columns=COLUMNS):
    """What execute is told of `norm`."""
    return [1, 3], [[rows, columns]] * 2


@pytest.fixture
def work(monkeypatch):
    """What is planned and compiled from now on: work() tells how many graphs, and how many kernels."""
    planned, create = [], Planner.create
    monkeypatch.setattr(Planner, "create", lambda self, modes: planned.append(self.graph) or create(self, modes))
    compiled = kernel.load.cache_info().misses
    return lambda: (len(planned), kernel.load.cache_info().misses - compiled)


@pytest.mark.emulate
def test_any_number_of_rows_of_one_build(work):
    """Each class of counts is planned once, and kernels are compiled by their text alone."""
    g = norm("emulator", rows=4096)
    g.build(OPEN)
    counts = [1, 2, 3, 15, 16, 17, 18, 19, 31, 33, 63, 64, 65, 100, 127, 129, 200, 255, 257, 300, 511, 513]
    random.Random(0).shuffle(counts)
    for n, rows in enumerate(counts):
        pack = values(rows, seed=n)
        g.execute(pack, None, None, *to(rows))
        check(pack)
    classes = {row_class(rows) for rows in counts}
    planned, compiled = work()
    assert planned == 1 + len(classes) and compiled <= 4
    for rows in (r for r in range(1, 514) if row_class(r) in classes and r % 3):
        pack = values(rows)
        g.execute(pack, None, None, *to(rows))
        g.execute(pack, None, None, *to(rows))
        check(pack)
    assert work() == (planned, compiled)


@pytest.mark.emulate
def test_every_class_up_to_4096_is_compiled_by_its_text_alone(work):
    """As many kernels as graphs built for each class would have texts."""
    g = norm("emulator", rows=4096, columns=48)
    g.build(OPEN)
    classes = sorted({row_class(rows) for rows in range(1, 4097)})
    assert len(classes) == 80 <= reshaped.CLASSES_KEPT
    for rows in classes:
        g.get_workspace_size(None, *to(rows, 48))
    texts = set()
    for rows in classes:
        other = norm("emulator", rows, 48)
        other.validate(), other.build_operation_graph(), other.create_execution_plans(OPEN)
        texts |= {*other.get_kernel_source_at_index(0)}
    assert work()[1] == len(texts) < 8


@pytest.mark.parametrize("modes, device", PLANS)
def test_the_same_bits_as_a_graph_of_that_shape(modes, device):
    g = norm(device)
    g.build(modes)
    for rows in (1, 7, 64, 65, 200):
        one, other = norm(device, rows), values(rows)
        pack = values(rows)
        g.execute(pack, None, None, *to(rows))
        graphs.run(one, other, modes)
        assert torch.equal(pack["out"], other["out"])


@pytest.mark.parametrize("modes, device", PLANS)
def test_no_rows(modes, device):
    g = norm(device)
    g.build(modes)
    g.execute(values(0), None, None, *to(0))


def test_a_built_graph_of_no_or_one_row():
    for rows in (0, 1):
        g = norm(rows=rows)
        g.build(FALLBACK)
        pack = values(9)
        g.execute(pack, None, None, *to(9))
        check(pack)


@settings(max_examples=40)
@given(graph=graphs.drawn(), rows=st.integers(1, 40), mode=st.sampled_from([heur_mode.A, heur_mode.FALLBACK]))
def test_any_graph_of_rows(graph, rows, mode):
    _check_drawn(graph, graphs.SHAPE, (rows, *graphs.SHAPE[1:]), [mode], "cpu")


@pytest.mark.emulate
@settings(max_examples=8)
@given(graph=graphs.drawn(), rows=st.integers(1, 40))
def test_any_graph_of_rows_with_kernels(graph, rows):
    _check_drawn(graph, graphs.SHAPE, (rows, *graphs.SHAPE[1:]), [heur_mode.A], "emulator")


@settings(max_examples=25)
@given(graph=whole.drawn(max_ops=8), samples=st.sampled_from([1, 3, 5]))
def test_any_whole_graph_with_other_numbers_of_samples(graph, samples):
    _check_drawn(graph, whole.SHAPE, (samples, *whole.SHAPE[1:]), [heur_mode.A], "cpu")


@pytest.mark.emulate
@settings(max_examples=6)
@given(graph=whole.drawn(max_ops=6), samples=st.sampled_from([1, 3, 5]))
def test_any_whole_graph_with_kernels(graph, samples):
    """Where kernels and the reference engine take parts in turns."""
    _check_drawn(graph, whole.SHAPE, (samples, *whole.SHAPE[1:]), [heur_mode.A], "emulator")


def _check_drawn(graph, shape, other, modes, device):
    """Build with leaves of one shape, execute with them of another."""

    def resized(leaf):
        if leaf == whole.KEYS:
            return (other[0], *leaf[1:])
        return other if leaf == shape else leaf

    there = dataclasses.replace(graph, leaves=tuple(map(resized, graph.leaves)))
    pack = there.inputs()
    exact = there.exact(pack)
    model = there.build(device=device)
    model.validate()
    outputs = {t.name: torch.empty_strided(t.dim, t.stride).fill_(float("nan")) for t in model._ir.outputs}
    g = graph.build(device=device, is_override_shape_enabled=True)
    g.build(modes)
    built = {t.name: t for t in g._ir.bound}
    changed = [t for t in model._ir.bound if t.dim != built[t.name].dim]
    lists = [built[t.name].uid for t in changed], [t.dim for t in changed], [t.stride for t in changed]
    g.execute(pack | outputs, graphs.workspace(g.get_workspace_size(None, *lists)), None, *lists)
    for name, want in exact.items():
        torch.testing.assert_close(outputs[name].double(), want, rtol=2e-4, atol=2e-4)


def mixed(device, samples=2, rows=6):
    """matmul(swish(rmsnorm(x)), b) + x: a kernel, then what no kernel takes."""
    g = new(device)
    x = g.tensor([samples, rows, 32], name="x", uid=1)
    w, b = g.tensor([1, 1, 32], name="w"), g.tensor([1, 32, 32], name="b")
    y, _ = g.rmsnorm(x, w, 1e-5, norm_forward_phase=norm_forward_phase.INFERENCE)
    g.add(g.matmul(g.swish(y), b), x).set_output().set_name("out").set_uid(9)
    return g


@pytest.mark.emulate
def test_parts_of_the_reference_engine_have_the_shapes_of_the_call(work):
    g = mixed("emulator")
    g.build([heur_mode.A])
    assert [part.engine.name for part in g._planner.at(0).parts] == ["rows", "reference"]
    shapes = [(1, 1), (5, 6), (3, 10), (29, 1), (1, 30), (2, 6), (3, 9)]
    for again in (False, True):
        before = work()
        for n, (samples, rows) in enumerate(shapes):
            source = graphs.generator("cpu", n)
            x, w, b = (torch.randn(s, generator=source) for s in ((samples, rows, 32), (1, 1, 32), (1, 32, 32)))
            out = torch.full_like(x, float("nan"))
            lists = [1, 9], [x.shape, x.shape]
            space = graphs.workspace(g.get_workspace_size(None, *lists))
            assert len(space) >= 4 * x.numel()  # what the kernel hands on
            g.execute({"x": x, "w": w, "b": b, "out": out}, space, None, *lists)
            want = oracle.swish(oracle.rmsnorm(x, w, 1e-5)[0]) @ b.double() + x.double()
            torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-4)
        if again:
            assert work() == before
    before = work()
    g.get_workspace_size(None, [1, 9], [(4, 7, 32)] * 2)  # has a plan of its own, with the knobs of its class
    assert row_class(28) == row_class(27) and work() == before


@pytest.mark.emulate
def test_leading_axes_are_counted_together(work):
    """[samples, tokens] of one product are one class; heads with weights of their own are none of them."""
    g = new("emulator")
    x, w = g.tensor([2, 8, 3, 56], name="x", uid=1), g.tensor([1, 1, 3, 56], name="w", uid=2)
    y, _ = g.rmsnorm(x, g.tensor([1, 1, 1, 56], name="v"), 1e-5, norm_forward_phase=norm_forward_phase.INFERENCE)
    g.mul(y, w).set_output().set_name("out").set_uid(3)
    g.build(OPEN)
    before = work()
    for shape in ((4, 12), (1, 48), (47, 1), (3, 15), (5, 9)):
        source = graphs.generator("cpu", 1)
        x, w, v = (torch.randn(s, generator=source) for s in ((*shape, 3, 56), (1, 1, 3, 56), (1, 1, 1, 56)))
        out = torch.empty_like(x)
        g.execute({"x": x, "w": w, "v": v, "out": out}, None, None, [1, 3], [x.shape] * 2)
        torch.testing.assert_close(out.double(), oracle.rmsnorm(x, v, 1e-5)[0] * w.double(), rtol=1e-5, atol=1e-5)
    assert work()[0] - before[0] == 1  # 45 to 48


@pytest.mark.parametrize("modes, device", PLANS)
def test_rows_apart_and_more_memory_than_rows(modes, device):
    """Strides of the call; memory of which the first rows are used; nothing else is written."""
    g = norm(device)
    g.build(modes)
    wide, space = values(50, COLUMNS + 8), values(50)
    given = {"x": wide["x"][:20, :COLUMNS], "w": space["w"], "out": wide["out"][:20, :COLUMNS]}
    strides = [[COLUMNS + 8, 1]] * 2
    g.execute(given, None, None, *to(20), strides)
    check(given)
    assert wide["out"][:20, COLUMNS:].isnan().all()
    for last in (17, 5):  # dense memory, and a slice of rows that are apart
        g.execute(space, None, None, *to(last))
        check(space, last)
        assert space["out"][20:].isnan().all()
        given = {name: t[:, :COLUMNS] for name, t in values(50, COLUMNS + 8, seed=3).items()}
        g.execute(given, None, None, *to(last), strides)
        check(given, last)
        assert given["out"][last:].isnan().all()


@pytest.mark.emulate
def test_rows_side_by_side(work):
    """Of a contiguous [N, C, H, W] normalized over C, whose kernels are for one number of rows: the knobs of its class,
    and no kernel that another count of the class has not compiled."""
    g = new("emulator")
    x, w = g.tensor([2, 8, 4, 6], name="x", uid=1), g.tensor([1, 8, 1, 1], name="w")
    y, _ = g.rmsnorm(x, w, 1e-5, norm_forward_phase=norm_forward_phase.INFERENCE)
    y.set_output().set_name("out").set_uid(2)
    g.build(OPEN)
    for samples in (17, 18, 1, 0, 17):
        compiled = work()[1]
        x, w = (torch.randn(s, generator=graphs.generator("cpu", samples)) for s in ((samples, 8, 4, 6), (1, 8, 1, 1)))
        out = torch.empty_like(x)
        g.execute({"x": x, "w": w, "out": out}, None, None, [1, 2], [x.shape] * 2)
        torch.testing.assert_close(out.double(), oracle.rmsnorm(x, w, 1e-5, axes=1)[0], rtol=1e-5, atol=1e-5)
        assert samples != 18 or work()[1] == compiled


def test_strides_follow_those_of_the_graph():
    """Where rows were apart they stay so; axes without gaps between have none."""
    g = new()
    x = g.tensor([2, 3, 8], [30, 10, 1], name="x", uid=1)
    g.relu(x).set_output().set_name("out").set_dim([2, 3, 8]).set_stride([24, 8, 1]).set_uid(2)
    g.build(FALLBACK)
    x = torch.randn(4, 5, 10)[:, :, :8]
    out = torch.empty(4, 5, 8)
    g.execute({1: x, 2: out}, None, None, [1, 2], [[4, 5, 8]] * 2)
    assert torch.equal(out, x.relu())
    with pytest.raises(VariantPackError, match=r"'x'.*the stride given is \[40, 8, 1\].*accepted: \[50, 10, 1\]"):
        g.execute(
            {1: torch.as_strided(x, (4, 5, 8), (40, 8, 1))[:, :, :8], 2: out}, None, None, [1, 2], [[4, 5, 8]] * 2
        )


def test_a_reduction_written_as_nodes_follows():
    """The virtual mean of squares, whose dim the user set, has as many rows as the call."""
    g = new()
    x = g.tensor([6, 16], name="x", uid=1)
    total = g.reduction(g.mul(x, x), mode=reduction_mode.ADD).set_dim([6, 1])
    g.mul(x, g.rsqrt(total)).set_output().set_name("out").set_uid(2)
    g.reduction(x, mode=reduction_mode.AMAX).set_output().set_name("amax").set_dim([1, 1])
    g.build(FALLBACK)
    x, out, amax = torch.randn(11, 16), torch.empty(11, 16), torch.empty(1, 1)
    g.execute({"x": x, "out": out, "amax": amax}, None, None, [1, 2], [[11, 16]] * 2)
    torch.testing.assert_close(out, x / x.norm(dim=1, keepdim=True))
    assert amax.item() == x.abs().max().item()


@pytest.mark.parametrize("modes, device", PLANS)
def test_block_scales_in_tiles(modes, device):
    """Of reordered scales the memory grows by whole tiles of 128 rows."""
    g = new(device)
    x = g.tensor([16, 128], name="x", uid=1)
    y, scale = g.block_scale_quantize(x, block_size=32)
    y.set_output().set_name("out").set_uid(2).set_data_type(E4M3)
    scale.set_output().set_name("scale").set_uid(3).set_reordering_type(tensor_reordering.F8_128x4)
    g.build(modes)
    for rows in (130, 3):
        x = torch.randn(rows, 128, generator=graphs.generator("cpu", rows))
        out = torch.empty(rows, 128, dtype=torch.float8_e4m3fn)
        tiles = torch.full((-(-rows // 128) * 128, 4), 0xAB, dtype=torch.uint8)
        lists = [1, 2, 3], [[rows, 128], [rows, 128], [rows, 4]]
        g.execute({"x": x, "out": out, "scale": tiles}, None, None, *lists)
        codes, scales = oracle.mxfp8(x.numpy(), "e4m3")
        assert np.array_equal(out.view(torch.uint8).numpy(), codes)
        assert np.array_equal(tiles.numpy().reshape(-1), oracle.swizzled(scales, 0xAB).reshape(-1))
    x, out = torch.zeros(130, 128), torch.empty(130, 128, dtype=torch.float8_e4m3fn)
    with pytest.raises(VariantPackError, match=r"'scale'.*accepted for reordered scales: .*at least 1024 bytes"):
        g.execute({"x": x, "out": out, "scale": tiles}, None, None, [1, 2, 3], [[130, 128], [130, 128], [130, 4]])


def test_workspace_of_the_shapes_of_the_call():
    """Scales that callers find in the workspace lie where a graph of that shape has them."""

    def quantized(rows):
        g = new(io_data_type=BF16)
        x, w = g.tensor([rows, 64], name="x", uid=1), g.tensor([1, 64], name="w")
        y, _ = g.rmsnorm(x, w, 1e-5, norm_forward_phase=norm_forward_phase.INFERENCE)
        y.set_output().set_name("out").set_uid(2).set_data_type(data_type.FP4_E2M1)
        g.build(FALLBACK)
        return g

    x, w = torch.randn(200, 64).bfloat16(), torch.randn(1, 64).bfloat16()
    found = []
    for g, lists in ((quantized(200), ()), (quantized(8), ([1, 2], [[200, 64]] * 2))):
        size = g.get_workspace_size(None, *lists)
        space, out = graphs.workspace(size), torch.empty(200, 32, dtype=torch.uint8)
        g.execute({"x": x, "w": w, "out": out}, space, None, *lists)
        found.append((size, bytes(out.numpy()), bytes(space.numpy())))
    assert found[0] == found[1]
    assert g.get_workspace_size() < size == g.get_workspace_size_plan_at_index(0, None, *lists)
    with pytest.raises(WorkspaceError, match=f"has {size - 1} bytes; accepted: at least {size}"):
        g.execute({"x": x, "w": w, "out": out}, space[:-1], None, *lists)


@pytest.mark.emulate
def test_sums_over_rows(work):
    """The workspace of more CTAs is told, and enough."""
    columns = 48
    g = new("emulator")
    t = {n: g.tensor([4, columns], name=n, uid=u) for u, n in enumerate(("grad", "x"), 1)}
    w, inverse = g.tensor([1, columns], name="w"), g.tensor([4, 1], name="inverse", uid=3)
    dx, dw, _ = g.rmsnorm_backward(t["grad"], t["x"], w, inverse, has_dbias=False)
    dx.set_output().set_name("dx").set_uid(4)
    dw.set_output().set_name("dw").set_data_type(FLOAT)
    g.build(OPEN)
    for rows in (1, 300, 299, 40):
        grad, x = (torch.randn(rows, columns, generator=graphs.generator("cpu", n)) for n in (1, 2))
        w = torch.randn(1, columns, generator=graphs.generator("cpu", 3))
        pack = {"grad": grad, "x": x, "w": w, "inverse": (x.square().mean(1, True) + 1e-5).rsqrt()}
        made = {"dx": torch.empty_like(x), "dw": torch.empty_like(w)}
        lists = [1, 2, 3, 4], [[rows, columns], [rows, columns], [rows, 1], [rows, columns]]
        g.execute(pack | made, graphs.workspace(g.get_workspace_size(None, *lists)), None, *lists)
        want = oracle.rmsnorm_gradients(grad, x, w, 1e-5)
        torch.testing.assert_close(made["dx"].double(), want[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(made["dw"].double(), want[1].reshape(1, -1), rtol=1e-4, atol=1e-4)
    assert work()[0] == 4  # the graph's own, and three classes


@pytest.mark.emulate
def test_bound_and_by_index_and_dependent():
    g = norm("emulator")
    g.build(OPEN)
    pack = values(33)
    g.bind(pack, None, None, *to(33))()
    check(pack)
    for way in ({}, {"programmatic_dependent_launch": True}):
        pack = values(34, seed=1)
        g.execute(pack, None, None, *to(34), **way)
        g.execute_plan_at_index(pack, None, 0, None, *to(34), **way)
        check(pack)
    g.execute(values(64))  # the graph's own shape, still


def test_the_users_tensors_stay_as_they_are():
    g = norm()
    g.build(FALLBACK)
    text = str(g)
    g.execute(values(5), None, None, *to(5))
    assert g.query_tensor_attributes_of_uid(1).get_dim() == [64, COLUMNS] and str(g) == text
    g.execute(values(64))
    with pytest.raises(VariantPackError, match=r"'x'.*the shape given is \[5, 40\]; accepted: \[64, 40\]"):
        g.execute(values(5))


def test_a_changed_graph_is_built_anew():
    g = norm()
    g.build(FALLBACK)
    g.execute(values(5), None, None, *to(5))
    g.query_tensor_attributes_of_uid(3).set_data_type(data_type.DOUBLE)
    with pytest.raises(GraphStateError, match="call build"):
        g.execute(values(5), None, None, *to(5))
    g.build(FALLBACK)
    pack = values(5)
    pack["out"] = pack["out"].double()
    g.execute(pack, None, None, *to(5))
    check(pack)


def test_what_is_deselected_stays_so():
    g = norm("emulator")
    g.build(OPEN)
    g.execute(values(5), None, None, *to(5))
    g.deselect_engines(["rows"])
    with pytest.raises(GraphStateError, match="no plan is built and allowed"):
        g.execute(values(5), None, None, *to(5))


def test_it_is_for_graphs_that_ask_for_it():
    g = graphs.new()
    g.relu(g.tensor([4, 8], name="x")).set_output()
    g.build(FALLBACK)
    for call in (lambda: g.execute({}, None, None, [1], [[2, 8]]), lambda: g.get_workspace_size(None, [1], [[2, 8]])):
        with pytest.raises(GraphStateError, match="made with is_override_shape_enabled=True"):
            call()
    dynamic = graphs.new(is_dynamic_shape_enabled=True)
    x = dynamic.tensor([4, 8], name="x", uid=1)
    dynamic.relu(x).set_output().set_name("out").set_uid(2)
    dynamic.build(FALLBACK)
    x, out = torch.randn(9, 8), torch.empty(9, 8)
    dynamic.execute({1: x, 2: out}, None, None, [1, 2], [x.shape] * 2)
    assert torch.equal(out, x.relu())


REFUSED = {
    "no uids": ((None, [[5, COLUMNS]] * 2), VariantPackError, "override_shapes is given without override_uids"),
    "no shapes": (([1, 3], None), VariantPackError, "override_uids is given without override_shapes"),
    "strides alone": ((None, None, [[1, 1]]), VariantPackError, "given without override_uids and override_shapes"),
    "no list": ((1, [[5, COLUMNS]]), VariantPackTypeError, "override_uids is a int; accepted: a list or tuple"),
    "lengths": (([1, 3], [[5, COLUMNS]]), VariantPackError, "2 entries, override_shapes 1, override_strides 2"),
    "a name": ((["x", 3], [[5, COLUMNS]] * 2), VariantPackTypeError, "override_uids has 'x'; accepted: uids"),
    "a bool": (([True, 3], [[5, COLUMNS]] * 2), VariantPackTypeError, "override_uids has True; accepted: uids"),
    "twice": (([1, 1], [[5, COLUMNS]] * 2), VariantPackError, "override_uids has 1 twice; accepted: each uid once"),
    "unknown": (([1, 77], [[5, COLUMNS]] * 2), VariantPackError, "77 is of no tensor .*'x' \\(1\\), 'w' \\(2\\)"),
    "virtual": (([1, 4], [[5, COLUMNS]] * 2), VariantPackError, "4 is tensor .*its shape follows|as it is virtual"),
    "no numbers": (([1, 3], ["ab", [5, COLUMNS]]), VariantPackTypeError, "uid 1: 'ab' is given; accepted: a sequence"),
    "a bool extent": (([1, 3], [[True, COLUMNS]] * 2), VariantPackError, "uid 1: .* accepted: a sequence of int, 0"),
    "half a row": (([1, 3], [[2.5, COLUMNS]] * 2), VariantPackTypeError, "uid 1: .* accepted: a sequence of int, 0"),
    "below zero": (([1, 3], [[-5, COLUMNS]] * 2), VariantPackError, "uid 1: .* accepted: a sequence of int, 0"),
    "rank": (([1, 3], [[5, 1, COLUMNS]] * 2), VariantPackError, "'x'.*has \\[5, 1, 40\\]; accepted: 2 extents"),
    "columns": (([1, 3], [[5, 8]] * 2), VariantPackError, "'x'.*has \\[5, 8\\]; .*that of the last stays 40"),
    "another output": (([1, 3], [[5, COLUMNS], [6, COLUMNS]]), VariantPackError, "'out'.*\\[6, 40\\]; accepted: \\[5,"),
    "input alone": (([1], [[5, COLUMNS]]), VariantPackError, "'out', uid 3, is not overridden .*accepted: override it"),
    "output alone": (([3], [[5, COLUMNS]]), VariantPackError, "'out'.*has \\[5, 40\\]; accepted: \\[64, 40\\]"),
    "weight, too": (
        ([1, 2, 3], [[5, COLUMNS]] * 3),
        VariantPackError,
        "'x'.* along axis 0 \\(extent 5\\) and .*: along axis 1",
    ),
    "rank of strides": ((*to(5), [[1], None]), VariantPackError, "'x'.*override_strides has \\[1\\]; accepted: 2"),
    "strides below zero": ((*to(5), [[-1, 1], None]), VariantPackError, "override_strides, tensor with uid 1"),
    "strides that overlap": ((*to(5), [None, [1, 1]]), VariantPackError, "'out'.*several elements to one address"),
}


@pytest.mark.parametrize("lists, kind, message", REFUSED.values(), ids=REFUSED)
def test_refused(lists, kind, message):
    """With the tensor, what is given and what is accepted, and before anything is written."""
    g, pack = norm(), values(5)
    g.build(FALLBACK)
    g.execute(values(7), None, None, *to(7))
    lists = (*lists, None)[:3]
    for call in (g.execute, g.execute_plan_at_index, g.bind):
        options = {name: v for name, v in zip(("uids", "shapes", "strides"), lists, strict=True)}
        with pytest.raises(kind, match=message) as error:
            call(pack, **{f"override_{name}": v for name, v in options.items()})
        assert isinstance(error.value, GraphfuseError) and type(error.value) is kind
    with pytest.raises(kind, match=message):
        g.get_workspace_size(None, *lists)
    assert pack["out"].isnan().all()


def test_rows_along_several_axes_keep_their_length():
    g = new()
    x, w = g.tensor([6, 4, 8], name="x", uid=1), g.tensor([1, 4, 8], name="w", uid=2)
    y, _ = g.rmsnorm(x, w, 1e-5, norm_forward_phase=norm_forward_phase.INFERENCE)
    y.set_output().set_uid(3)
    g.build(FALLBACK)
    message = (
        r"'x'.*node 'rmsnorm.0' .* along axis 1 \(extent 5\) .*of \[6, 5, 8\]; accepted: along axis 1 \(extent 4\)"
    )
    with pytest.raises(VariantPackError, match=message):
        g.get_workspace_size(None, [1, 2, 3], [[6, 5, 8], [1, 5, 8], [6, 5, 8]])


def test_numbers_have_no_shape_to_override():
    g = new()
    x = g.tensor([6, 8], name="x", uid=1)
    factor = g.tensor([1, 1], name="factor", uid=2, is_pass_by_value=True)
    g.mul(x, factor).set_output().set_uid(3)
    g.build(FALLBACK)
    with pytest.raises(VariantPackError, match="2 is tensor 'factor' .*passed by value; accepted: .*'x' \\(1\\)"):
        g.get_workspace_size(None, [2], [[1, 1]])


SMALLER = {
    "fewer rows": lambda p: p | {"x": p["x"][:8]},
    "a row less in memory": lambda p: p | {"out": torch.empty(9 * COLUMNS - 1)},
    "other strides": lambda p: p | {"x": p["x"].t().contiguous().t()[:, :COLUMNS].expand(9, COLUMNS)[::2]},
    "overlap": lambda p: p | {"out": p["x"].view(-1)[: 9 * COLUMNS].view(9, COLUMNS)[:, :]} | {"w": p["x"][8:]},
    "type": lambda p: p | {"x": p["x"].half()},
    "missing": lambda p: {"x": p["x"]},
}


@pytest.mark.parametrize("change", SMALLER.values(), ids=SMALLER)
def test_memory_too_small_is_refused_after_a_call_as_before(change):
    first, again = norm(), norm()
    first.build(FALLBACK), again.build(FALLBACK)
    again.execute(values(9), None, None, *to(9))
    errors = []
    for g in (first, again):
        pack = change(values(9))
        with pytest.raises(VariantPackError) as error:
            g.execute(pack, None, None, *to(9))
        errors.append((type(error.value), re.sub("0x[0-9a-f]+", "", str(error.value))))
    assert errors[0] == errors[1]


def test_no_more_is_kept_than_said(monkeypatch):
    """Shapes and classes that were used last."""
    monkeypatch.setattr(reshaped, "SHAPES_KEPT", 4)
    monkeypatch.setattr(reshaped, "CLASSES_KEPT", 3)
    g = norm("emulator")
    g.build(OPEN)
    for rows in range(1, 30):
        g.get_workspace_size(None, *to(rows))
    ((_, kept),) = g._reshaped.values()
    assert kept.executable.cache_info().currsize == 4 and kept._built_class.cache_info().currsize == 3
    pack = values(1)
    g.execute(pack, None, None, *to(1))
    check(pack)


@pytest.mark.parametrize("modes, device", PLANS)
def test_many_threads_at_once(modes, device):
    g = norm(device)
    g.build(modes)
    failed = []

    def calls(seed):
        try:
            for rows in random.Random(seed).choices(range(1, 60), k=25):
                pack = values(rows, seed=seed)
                g.execute(pack, None, None, *to(rows))
                check(pack)
        except BaseException as error:
            failed.append(error)
            raise

    threads = [threading.Thread(target=calls, args=(n,)) for n in range(6)]
    [t.start() for t in threads], [t.join() for t in threads]
    assert not failed
