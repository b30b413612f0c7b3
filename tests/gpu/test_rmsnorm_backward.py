"""The backward kernel on the GPU: values, the same bits in every run, streams side by side, CUDA graphs, size."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from graphfuse import heur_mode
from graphfuse.contract.engine import knobs_to_dict
from graphfuse.engines.rows.persistent import PersistentKnobs
from support import gradients, graphs, oracle
from support.gradients import ACTIVATIONS, CASES, TYPES, Gradient
from support.graphs import BF16, FLOAT, HALF

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", TYPES, ids=lambda d: d.name)
def test_every_combination(dtype, activation):
    cases = [replace(c, rows=301) for c in CASES if (c.dtype, c.activation) == (dtype, activation)]
    with ThreadPoolExecutor(8) as pool:  # most of it is compiling
        list(pool.map(lambda case: gradients.check(case, "cuda", "cuda"), cases))


SHORT = (1, 17, 64, 111, 128, 760, 768, 1024, 2048, 3420)
LONG = (4096, 5120, 8192, 16384, 32768, 40000, 65537, 131072, 262144)


@pytest.mark.parametrize("columns", SHORT + LONG)
@pytest.mark.parametrize("dtype", [BF16, FLOAT], ids=lambda d: d.name)
def test_row_lengths(columns, dtype):
    rows = max(3, min(4096, (1 << 24) // columns))
    gradients.check(Gradient(rows, columns, dtype, activation="silu", residual=True, dbias=True), "cuda", "cuda")
    gradients.check(Gradient(rows, columns, dtype), "cuda", "cuda")


@pytest.mark.parametrize("rows", [0, 1, 2, 131, 132, 133, 1000, 100003])
def test_row_counts(rows):
    case = Gradient(rows, 256, dbias=True)
    pack, outputs = case.inputs("cuda"), case.outputs("cuda")
    gradients.run(gradients.fused(case, "cuda"), pack | outputs, "cuda")
    if rows:
        case.hold(pack, outputs)
    assert rows or not (outputs["dscale"].any() or outputs["dbias"].any())


LAYOUTS = {
    "rows apart": Gradient(333, 512, x_stride=520, grad_stride=640, dx_stride=528),
    "odd rows apart": Gradient(333, 512, x_stride=513, grad_stride=514, dx_stride=515, residual=True),
    "aligned to 8": Gradient(333, 512, alignment=8, offset=4),
    "aligned to 4": Gradient(333, 512, HALF, alignment=4, offset=2, activation="gate"),
    "aligned to 2": Gradient(333, 512, HALF, alignment=2, offset=1, dbias=True),
    "float aligned to 4": Gradient(333, 512, FLOAT, alignment=4, offset=1),
    "one row, any stride": Gradient(1, 512, x_stride=9999, dx_stride=7777),
    "one column": Gradient(4097, 1, x_stride=3, dx_stride=5),
}


@pytest.mark.parametrize("case", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts(case):
    gradients.check(case, "cuda", "cuda")


def test_heads_with_strides_of_their_own():
    shape = (3, 5, 8, 64)
    x = torch.randn(3, 8, 5, 72, device="cuda")[..., :64].permute(0, 2, 1, 3)
    grad = torch.randn(3, 1, 8, 64, device="cuda").expand(shape)
    weight = torch.randn(1, 1, 1, 64, device="cuda")
    g = graphs.new(device="cuda")
    made = g.rmsnorm_backward(
        g.tensor(list(shape), list(grad.stride()), FLOAT, name="grad"),
        g.tensor(list(shape), list(x.stride()), FLOAT, name="x"),
        g.tensor([1, 1, 1, 64], data_type=FLOAT, name="weight"),
        g.tensor([3, 5, 8, 1], data_type=FLOAT, name="inverse"),
        has_dbias=True,
    )
    for t, name in zip(made, ("dx", "dscale", "dbias"), strict=True):
        t.set_output().set_name(name)
    g.build([heur_mode.OPENSOURCE])
    inverse = torch.rsqrt((x * x).mean(-1, keepdim=True) + gradients.EPS)
    outputs = {
        name: torch.empty(t.get_dim(), device="cuda") for name, t in zip(("dx", "dscale", "dbias"), made, strict=True)
    }
    outputs["dx"] = torch.empty_strided(shape, made[0].get_stride(), device="cuda")
    gradients.run(g, {"grad": grad, "x": x, "weight": weight, "inverse": inverse} | outputs, "cuda")
    dx, dscale, _ = oracle.rmsnorm_gradients(grad, x, weight, gradients.EPS)
    torch.testing.assert_close(outputs["dx"].double(), dx, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(outputs["dscale"].double(), dscale, rtol=2e-5, atol=1e-4)
    wanted = grad.double().sum((0, 1, 2), keepdim=True)
    torch.testing.assert_close(outputs["dbias"].double(), wanted, rtol=2e-5, atol=1e-4)


class Made:
    """A problem on the GPU as one kernel, with knobs if given, and as often as wanted."""

    def __init__(self, case: Gradient, knobs: PersistentKnobs | None = None):
        self.case, self.pack = case, case.inputs("cuda")
        self.graph = case.graph("cuda")
        self.graph.validate()
        self.graph.build_operation_graph()
        if knobs is None:
            self.graph.create_execution_plans([heur_mode.OPENSOURCE])
            self.graph.build_plans()
        else:
            plan = self.graph.create_execution_plan("rows", knobs_to_dict(knobs))
            self.graph.build_plan_at_index(plan)

    def run(self, filled: int = 0xEE) -> dict[str, torch.Tensor]:
        """Outputs of one run, its workspace filled with a byte before."""
        outputs = self.case.outputs("cuda")
        workspace = torch.full((self.graph.get_workspace_size(),), filled, dtype=torch.uint8, device="cuda")
        self.graph.execute(self.pack | outputs, workspace)
        return outputs


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    for name in a:
        assert torch.equal(a[name].view(torch.uint8), b[name].view(torch.uint8)), name


BITS = ((4096, 1024), (4096, 4096), (4096, 16384), (8192, 128), (1000, 65537), (33, 262144))


@pytest.mark.parametrize(("rows", "columns"), BITS)
def test_ten_runs_have_the_same_bits(rows, columns):
    """Whatever the workspace held."""
    made = Made(Gradient(rows, columns, activation="gate", residual=True, dbias=True))
    first = made.run()
    made.case.hold(made.pack, first)
    for i in range(10):
        assert_same(first, made.run(filled=(0, 0xFF, 0x7F, 0x80)[i % 4]))


AROUND = {"activation": "silu", "residual": True, "dbias": True}
SPREAD = {
    "64 of 512": (Gradient(1001, 1024, **AROUND), PersistentKnobs(64, 512, 2, 1, 132)),
    "128 of 512": (Gradient(1001, 1024, **AROUND), PersistentKnobs(128, 512, 5, 1, 132)),
    "128 of 128, four an SM": (Gradient(1001, 1024, **AROUND), PersistentKnobs(128, 128, 4, 4, 528)),
    "none ahead": (Gradient(1001, 1024, **AROUND), PersistentKnobs(128, 128, 1, 4, 528)),
    "256 of 512": (Gradient(1001, 4096, **AROUND), PersistentKnobs(256, 512, 3, 1, 132)),
    "1024 of 1024": (Gradient(1001, 4096), PersistentKnobs(1024, 1024, 3, 1, 132)),
    "128 of 512, delayed": (Gradient(1001, 1024, residual=True, dbias=True), PersistentKnobs(128, 512, 5, 1, 132, 1)),
    "256 of 256, delayed": (Gradient(1001, 4096, HALF), PersistentKnobs(256, 256, 4, 1, 132, 1)),
    "a cluster of 2, delayed": (Gradient(1001, 16384, residual=True), PersistentKnobs(512, 256, 3, 1, 132, 1)),
    "a cluster of 4, delayed": (Gradient(1001, 16384, FLOAT), PersistentKnobs(512, 128, 3, 1, 132, 1)),
    "few CTAs": (Gradient(1001, 4096, **AROUND), PersistentKnobs(256, 512, 3, 1, 7)),
    "a cluster of 2": (Gradient(1001, 16384, **AROUND), PersistentKnobs(1024, 512, 3, 1, 132)),
    "a cluster of 4": (Gradient(1001, 16384, **AROUND), PersistentKnobs(1024, 256, 3, 1, 132)),
    "a cluster of 8": (Gradient(1001, 16384, **AROUND), PersistentKnobs(2048, 256, 2, 1, 128)),
    "a cluster of 16": (Gradient(1001, 16384, **AROUND), PersistentKnobs(4096, 256, 2, 1, 128)),
    "a cluster of 16, two an SM": (Gradient(1001, 16384, **AROUND), PersistentKnobs(2048, 128, 2, 2, 256)),
    "read again": (Gradient(1001, 40960, **AROUND), PersistentKnobs(512, 512, 1, 1, 132)),
}


@pytest.mark.parametrize(("case", "knobs"), SPREAD.values(), ids=SPREAD)
def test_every_way_of_spreading_rows(case, knobs):
    made, usual = Made(case, knobs), Made(case)
    first = made.run()
    made.case.hold(made.pack, first)
    assert torch.equal(first["dx"], usual.run()["dx"])
    assert_same(first, made.run(filled=0))


def test_two_streams_at_once():
    """Grids that all wait for their CTAs to run together: neither sees the other's barrier, sums or workspace."""
    ones = [Made(Gradient(4096, 4096, dbias=True)), Made(Gradient(3000, 1024, FLOAT, activation="silu"))]
    wanted = [made.run() for made in ones]
    streams = [torch.cuda.Stream() for _ in ones]
    rounds = 50
    outputs = [[made.case.outputs("cuda") for _ in range(rounds)] for made in ones]
    spaces = [graphs.workspace(made.graph.get_workspace_size(), "cuda") for made in ones]
    torch.cuda.synchronize()
    for i in range(rounds):
        for made, stream, out, space in zip(ones, streams, outputs, spaces, strict=True):
            with torch.cuda.stream(stream):
                made.graph.execute(made.pack | out[i], space)
    torch.cuda.synchronize()
    for made_outputs, want in zip(outputs, wanted, strict=True):
        for out in made_outputs:
            assert_same(want, out)


def test_one_graph_on_two_streams():
    """The same kernel with itself, each with a workspace of its own."""
    made = Made(Gradient(4096, 2048, dbias=True))
    want = made.run()
    streams = [torch.cuda.Stream() for _ in range(2)]
    outputs = [made.case.outputs("cuda") for _ in range(40)]
    spaces = [graphs.workspace(made.graph.get_workspace_size(), "cuda") for _ in streams]
    torch.cuda.synchronize()
    for i, out in enumerate(outputs):
        with torch.cuda.stream(streams[i % 2]):
            made.graph.execute(made.pack | out, spaces[i % 2])
    torch.cuda.synchronize()
    for out in outputs:
        assert_same(want, out)


@pytest.mark.parametrize(("rows", "columns"), [(4096, 2048), (512, 16384)])
def test_replay_of_a_cuda_graph(rows, columns):
    made = Made(Gradient(rows, columns, activation="silu", residual=True, dbias=True))
    want = made.run()
    outputs = made.case.outputs("cuda")
    workspace = graphs.workspace(made.graph.get_workspace_size(), "cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        made.graph.execute(made.pack | outputs, workspace)  # what is loaded at the first start is loaded
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        for _ in range(3):
            made.graph.execute(made.pack | outputs, workspace)
    for filled in (0, 0xFF, 0x80, 0x3F):
        workspace.fill_(filled)
        for t in outputs.values():
            t.view(torch.uint8).fill_(0xA5)
        captured.replay()
        torch.cuda.synchronize()
        assert_same(want, outputs)


@pytest.mark.parametrize("name", ["x", "grad", "residual"])
@pytest.mark.parametrize(("rows", "columns"), [(4096, 1024), (1000, 16384), (100, 65536)])
def test_in_place(rows, columns, name):
    made = Made(Gradient(rows, columns, residual=True))
    want = made.run()
    outputs = made.case.outputs("cuda") | {"dx": made.pack[name].clone()}
    workspace = graphs.workspace(made.graph.get_workspace_size(), "cuda")
    made.graph.execute(made.pack | {name: outputs["dx"]} | outputs, workspace)
    assert_same(want, outputs)


@pytest.mark.parametrize("dtype", TYPES, ids=lambda d: d.name)
def test_a_row_is_the_same_alone_and_among_others(dtype):
    case = Gradient(4096, 1024, dtype, activation="silu", residual=True)
    made = Made(case)
    want = made.run()["dx"]
    for rows in (1, 7, 132, 1000):
        part = replace(case, rows=rows)
        pack = {n: t if n == "weight" else t[:rows].contiguous() for n, t in made.pack.items()}
        outputs = part.outputs("cuda")
        gradients.run(gradients.fused(part, "cuda"), pack | outputs, "cuda")
        assert torch.equal(outputs["dx"], want[:rows])


def test_offsets_above_2_31(room):
    """Nine rows that lie 2^28 elements and more apart."""
    room(40 << 30)
    far = (1 << 28) + 8
    gradients.check(Gradient(9, 512, x_stride=far, grad_stride=far + 8, dx_stride=far + 16), "cuda", "cuda")


def test_more_than_2_31_elements(room):
    """The last rows as those rows alone; sums of rows of which all are alike."""
    rows, columns = (1 << 31) // 4096 + 1003, 4096
    room(6 * 2 * rows * columns)
    case = Gradient(rows, columns)
    part = replace(case, rows=1003)
    small = part.inputs("cuda")
    times = -(-rows // 1003)
    pack = {n: t if n == "weight" else t.repeat(times, 1)[-rows:].clone() for n, t in small.items()}
    outputs = case.outputs("cuda")
    gradients.run(gradients.fused(case, "cuda"), pack | outputs, "cuda")
    alone = part.outputs("cuda")
    gradients.run(gradients.fused(part, "cuda"), small | alone, "cuda")
    assert torch.equal(outputs["dx"][-1003:], alone["dx"])
    x, grad, inverse = (small[n].double() for n in ("x", "grad", "inverse_rms"))
    terms = grad * x * inverse
    left = rows % 1003
    exact = terms.sum(0) * (rows // 1003) + (terms[-left:].sum(0) if left else 0)
    size = terms.abs().sum(0) * times
    error = (outputs["dscale"][0].double() - exact).abs()
    assert (error <= 1e-4 * size + exact.abs() * 2**-8).all(), error.max()


def test_more_than_2_31_rows(room):
    rows = (1 << 31) + 77
    room(24 * rows)
    case = Gradient(rows, 1, HALF, weight="none")
    x = torch.full((rows, 1), 0.5, dtype=torch.float16, device="cuda")
    grad = torch.ones(rows, 1, dtype=torch.float16, device="cuda")
    x[-1], grad[-1] = 2.0, 3.0
    inverse = torch.full((rows, 1), 1.0, device="cuda")
    dx = torch.full((rows, 1), 7.0, dtype=torch.float16, device="cuda")
    gradients.run(gradients.fused(case, "cuda"), {"x": x, "grad": grad, "inverse_rms": inverse, "dx": dx}, "cuda")
    # inverse * (grad - normal * mean(grad * normal)), of one column
    assert dx[:-1].eq(0.75).all() and dx[-1] == 3.0 - 2.0 * 6.0


def test_what_is_proposed_for_the_table_of_shapes_is_right():
    """The first three choices for each shape that is measured, of which two need not be the best."""
    shapes = [(4096, c) for c in (1024, 2048, 4096, 8192, 16384)] + [(8192, c) for c in (128, 768, 5120)]
    for (rows, columns), dtype in itertools.product(shapes, (BF16, FLOAT)):
        case = Gradient(rows, columns, dtype)
        graph = case.graph("cuda")
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([heur_mode.OPENSOURCE])
        pack, results = case.inputs("cuda"), []
        for index in range(graph.get_execution_plan_count()):
            graph.build_plan_at_index(index)
            outputs = case.outputs("cuda")
            gradients.run(graph, pack | outputs, "cuda")
            case.hold(pack, outputs)
            results.append(outputs["dx"])
        assert all(torch.equal(results[0], dx) for dx in results)
