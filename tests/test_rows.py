"""Whatever stands around an RMSNorm is one kernel, and computes what float64 says."""

import pytest

import rows
from graphfuse import heur_mode
from graphfuse.device import for_arch
from graphfuse.runtime.handle import Handle
from rows import CASES


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
def test_every_combination_is_one_kernel(arch):
    assert len(CASES) == 504
    for case in CASES:
        graph = case.graph("cpu")
        graph.handle = Handle(for_arch(arch))  # planning needs no GPU
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([heur_mode.OPENSOURCE])
        assert graph.get_engine_and_knobs_at_index(0)[0] == "rmsnorm", case
        assert graph.get_workspace_size_plan_at_index(0) == 0, case


@pytest.mark.parametrize("case", CASES[::5], ids=str)
def test_the_reference_engine(case):
    rows.check(case, [heur_mode.FALLBACK])


@pytest.mark.emulate
@pytest.mark.parametrize("case", CASES[::17], ids=str)
def test_the_generated_kernel(case):
    rows.check(case, [heur_mode.OPENSOURCE], "emulator")
