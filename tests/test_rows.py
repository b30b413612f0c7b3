"""Whatever stands around an RMSNorm is one kernel, and computes what float64 says."""

import io

import pytest

import cubin
import rows
from graphfuse import heur_mode
from graphfuse.device import ARCHES, for_arch
from graphfuse.planner import Planner
from graphfuse.runtime import nvrtc
from graphfuse.runtime.handle import Handle
from rows import CASES, Case


def planned(case: Case, arch: str) -> Planner:
    """The plans of a case for a chip that need not be there."""
    graph = case.graph("cpu")
    graph.handle = Handle(for_arch(arch))
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([heur_mode.OPENSOURCE])
    return graph._planner


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
def test_every_combination_is_one_kernel(arch):
    assert len(CASES) == 504
    for case in CASES:
        plan = planned(case, arch).plans[0]
        assert [part.engine.name for part in plan.parts] == ["rmsnorm"] and plan.workspace_bytes == 0, case


@pytest.mark.compile
@pytest.mark.parametrize("place, arch", [pytest.param(i, a, id=a) for i, a in enumerate(ARCHES)])
def test_every_combination_compiles_for_some_chip(place, arch):
    """Each for one chip, for time's sake: without a warning, with all it needs in registers."""
    for case in CASES[place :: len(ARCHES)]:
        (part,) = planned(case, arch).plans[0].parts
        log = io.StringIO()
        code = nvrtc.compile(part.engine.source(part.facts, part.knobs), arch, "rmsnorm.cu", log)
        used = cubin.usage(code)
        assert not log.getvalue().strip("\0 \n") and used["STACK"] == used["LOCAL"] == 0, (case, used, log.getvalue())


@pytest.mark.parametrize("case", CASES[::5], ids=str)
def test_the_reference_engine(case):
    rows.check(case, [heur_mode.FALLBACK])


@pytest.mark.emulate
@pytest.mark.parametrize("case", CASES[::17], ids=str)
def test_the_generated_kernel(case):
    rows.check(case, [heur_mode.OPENSOURCE], "emulator")
