"""The bench of the training phase beside the inference phase: what is right, what is wrong, what is compared."""

import pytest

from graphfuse import heur_mode
from graphfuse.base.device import for_arch
from graphfuse.benchmarks import session
from graphfuse.benchmarks.peer import Work, changed
from graphfuse.benchmarks.peers import graphfuse, stream
from graphfuse.benchmarks.results import Results
from graphfuse.benchmarks.rmsnorm_training import BENCH, OUTPUTS, RmsNormTrainingCase
from graphfuse.runtime.handle import Handle, create_handle
from support import bench_record
from support.bench_runs import made

SMALL = [RmsNormTrainingCase(37, 96, output) for output in OUTPUTS]


@pytest.mark.parametrize("case", SMALL, ids=lambda c: c.output)
@pytest.mark.parametrize("peer", [graphfuse.PEER, graphfuse.INFERENCE, stream.PEER], ids=lambda p: p.name)
def test_both_phases_compute_the_case(peer, case):
    sets, work = made(peer, case)
    assert session.checked(case, sets[0], work, peer.tight) is None
    assert bool(sets[0].inverse_rms.isnan().all()) == (peer is not graphfuse.PEER)  # who does not write it


@pytest.mark.emulate
@pytest.mark.parametrize("case", SMALL, ids=lambda c: c.output)
def test_our_kernels_of_both_phases_are_right(case):
    (operands,) = case.sets(1, "cpu")
    for graph, s in ((case.graph, operands), (case.inference_graph, changed(operands, inverse_rms=None))):
        work = graphfuse.work(graph(create_handle("emulator")), [s.pack()])
        case.spoil(operands)
        work.calls[0]()
        assert case.wrong(s, tight=True) is None


@pytest.mark.parametrize("case", SMALL, ids=lambda c: c.output)
@pytest.mark.parametrize("peer", [graphfuse.PEER, graphfuse.INFERENCE], ids=lambda p: p.name)
def test_a_wrong_inverse_rms_or_row_is_seen(peer, case):
    sets, work = made(peer, case, 1)
    (operands,) = sets
    check = work.check or (lambda: case.wrong(operands, tight=True))
    assert session.checked(case, operands, Work([lambda: None], check=work.check), False).startswith("wrong ")
    work.calls[0]()
    assert check() is None
    operands.inverse_rms[36] *= 1 + 2**-12  # which inference does not have
    assert ("inverse_rms: 1 of 37 values checked, first in row 36" in (check() or "")) == (peer is graphfuse.PEER)
    work.calls[0]()
    operands.y[36, 95] *= 1 + 2**-6
    assert "wrong y: 1 of 3552 values checked, first in row 36, column 95" in check()


@pytest.mark.parametrize("case", BENCH.cases, ids=str)
def test_the_phases_are_compared_with_the_same_knobs(case):
    """Or the target would tell of knobs, as where one phase alone is tuned."""
    plans = []
    for graph in (case.graph, case.inference_graph):
        made = graph(Handle(for_arch("sm_90a")))
        made.validate()
        made.build_operation_graph()
        made.create_execution_plans([heur_mode.OPENSOURCE])
        plans.append((made.get_plan_name_at_index(0), *(part.why for part in made._plan(0).parts)))
    assert plans[0] == plans[1]


def test_the_training_phase_is_held_to_the_inference_phase():
    (goal,) = BENCH.targets
    r = Results(bench_record.record("rmsnorm-training"))
    for case in r.cases():
        case["peers"]["graphfuse_inference"]["us"] = case["peers"]["graphfuse"]["us"]
    assert goal.verdict(r).value == 1 and goal.verdict(r).met
    slow = r.record["cases"][3]["peers"]
    slow["graphfuse"] = {"us": {"median": 1.03 * slow["graphfuse_inference"]["us"]["median"]}}
    found = goal.verdict(r)
    assert (found.met, found.where, found.value) == (False, "bf16 4096x8192", pytest.approx(1.03))
    assert r.best_peer(r.record["cases"][3]) == "quack"  # never our other phase
