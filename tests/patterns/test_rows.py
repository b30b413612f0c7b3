"""Whatever stands around an RMSNorm is one kernel, and computes what float64 says."""

import io
import re

import pytest
import torch

from graphfuse import heur_mode, norm_forward_phase, tensor_reordering
from graphfuse.base.device import ARCHES, for_arch
from graphfuse.planning.planner import Planner
from graphfuse.runtime import nvrtc
from graphfuse.runtime.handle import Handle
from support import cubin, graphs, rows
from support.graphs import E4M3, FP4
from support.rows import CASES, Case


def planned(case: Case, arch: str) -> Planner:
    """The plans of a case for a chip that need not be there."""
    graph = case.graph("cpu")
    graph.handle = Handle(for_arch(arch))
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([heur_mode.OPENSOURCE])
    return graph._planner


@pytest.mark.some(1)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
def test_every_combination_is_one_kernel(arch):
    assert len(CASES) == 576
    for case in CASES:
        plan = planned(case, arch).plans[0]
        assert [part.engine.name for part in plan.parts] == ["rows"] and plan.workspace_bytes == 0, case


@pytest.mark.some(1)
@pytest.mark.compile
@pytest.mark.parametrize("place, arch", [pytest.param(i, a, id=a) for i, a in enumerate(ARCHES)])
def test_combinations_compile(place, arch):
    """A third of them, each for one chip, for time's sake: without a warning, with all it needs in registers. On a GPU
    all are compiled and run."""
    for case in CASES[place :: 3 * len(ARCHES) + 1]:
        (part,) = planned(case, arch).plans[0].parts
        log = io.StringIO()
        code = nvrtc.compile(part.engine.source(part.facts, part.knobs), arch, "by_row.cu", log)
        used = cubin.usage(code)
        assert not log.getvalue().strip("\0 \n") and used["STACK"] == used["LOCAL"] == 0, (case, used, log.getvalue())


@pytest.mark.parametrize("case", CASES[::5], ids=str)
def test_the_reference_engine(case):
    rows.check(case, [heur_mode.FALLBACK])


@pytest.mark.some(12)
@pytest.mark.emulate
@pytest.mark.parametrize("case", CASES[::17], ids=str)
def test_the_generated_kernel(case):
    rows.check(case, [heur_mode.OPENSOURCE], "emulator")


@pytest.mark.emulate
def test_one_row_of_one_column():
    """All tensors have one element: rows, weights and scalars are told apart by what reads them."""
    g = graphs.new(device="emulator")
    total = g.add(g.tensor([1, 1], name="x"), g.tensor([1, 1], name="residual")).set_output().set_name("sum")
    epsilon, weight = g.tensor([1, 1], name="epsilon"), g.add(g.tensor([1, 1], name="weight"), 1.0)
    y = g.rmsnorm(total, weight, epsilon, norm_forward_phase=norm_forward_phase.INFERENCE)[0]
    g.mul(y, g.tensor([1, 1], name="factor")).set_output().set_name("out")
    given = {"x": 1.0, "residual": 2.0, "epsilon": 7.0, "weight": 0.5, "factor": -4.0}
    pack = {name: torch.full((1, 1), value) for name, value in (given | {"sum": 0.0, "out": 0.0}).items()}
    graphs.run(g, pack, [heur_mode.OPENSOURCE])
    assert (pack["sum"].item(), pack["out"].item()) == (3.0, 3 / 4 * 1.5 * -4)


@pytest.mark.parametrize("dim", [[1, 1], [5, 1]], ids=["of all", "of a row"])
def test_the_largest_magnitude_of_what_is_one_a_row_is_not_fused(dim):
    g = graphs.new(device="emulator")
    x = g.tensor([5, 1], name="x")
    y, inverse = g.rmsnorm(x, epsilon=0.0, norm_forward_phase=norm_forward_phase.TRAINING)
    y.set_output().set_name("y")
    g.reduction(inverse).set_dim(dim).set_output().set_name("amax")
    pack = {"x": torch.tensor([[2.0], [4.0], [8.0], [16.0], [32.0]]), "y": torch.zeros(5, 1), "amax": torch.zeros(dim)}
    graphs.run(g, pack, [heur_mode.A])
    assert torch.equal(pack["amax"], torch.tensor([[0.5]]) if dim == [1, 1] else 1 / pack["x"])


def test_more_largest_magnitudes_of_a_row_than_shared_memory_holds_are_several_kernels():
    g = graphs.new(device="emulator")
    x = g.add(g.tensor([128, 65536], name="x"), 0.0)
    for factor in range(1, 13):
        g.reduction(g.mul(x, float(factor))).set_dim([128, 1]).set_output()
    g.rmsnorm(x, epsilon=1e-5, norm_forward_phase=norm_forward_phase.INFERENCE)[0].set_output()
    g.validate(), g.build_operation_graph(), g.create_execution_plans([heur_mode.OPENSOURCE])
    assert re.search(r"12 largest magnitudes of a row: \d+ bytes of shared memory", g.explain())
    parts = g._planner.plans[0].parts
    assert len(parts) > 1 and {part.engine.name for part in parts} == {"rows"}


def test_tiles_of_scales_have_rows_of_one_axis():
    """Rows of F8_128x4 are all axes but the last, those of the normalization another number."""
    found = []
    for device, mode in (("emulator", heur_mode.OPENSOURCE), ("cpu", heur_mode.FALLBACK)):
        g = graphs.new(device=device)
        x, weight = g.tensor([5, 2, 64], name="x"), g.tensor([1, 2, 64], name="weight")
        y = g.rmsnorm(x, weight, 1e-5, norm_forward_phase=norm_forward_phase.INFERENCE)[0]
        y, scale = g.block_scale_quantize(y)
        y.set_output().set_name("y").set_data_type(FP4)
        scale.set_output().set_name("scale").set_data_type(E4M3).set_reordering_type(tensor_reordering.F8_128x4)
        source = graphs.generator("cpu", 5)
        pack = {n: torch.randn(t.get_dim(), generator=source) for n, t in (("x", x), ("weight", weight))}
        pack |= {"y": torch.zeros(5, 2, 32, dtype=torch.uint8), "scale": torch.zeros(512, dtype=torch.uint8)}
        graphs.run(g, pack, [mode])
        found.append((pack["y"], pack["scale"]))
        if device == "emulator":
            assert re.search(r"accepted where one axis is normalized.*got \[1, 2\]", g.explain())
            assert [part.engine.name for part in g._planner.plans[0].parts] == ["rows", "rows"]
    assert all(map(torch.equal, *found))
