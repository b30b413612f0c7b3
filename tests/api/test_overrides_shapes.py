"""What follows from other shapes: extents of several axes, strides, reductions, block scales, workspace."""

import numpy as np
import pytest
import torch

from graphfuse import (
    VariantPackError,
    WorkspaceError,
    data_type,
    heur_mode,
    norm_forward_phase,
    reduction_mode,
    tensor_reordering,
)
from graphfuse.contract.row_counts import row_class
from support import graphs, oracle
from support.graphs import BF16, E4M3, FLOAT
from support.overridden import COLUMNS, FALLBACK, OPEN, PLANS, check, new, norm, to, values


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
    assert [part.engine.name for part in g._planner.at(0).parts] == ["rows", "reference", "rows"]
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
