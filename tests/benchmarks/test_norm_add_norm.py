"""The bench of a norm before a residual sum and one after it: what is right, what is wrong, what is compared."""

import pytest
import torch

from graphfuse.benchmarks import session
from graphfuse.benchmarks.norm_add_norm import BENCH, NormAddNormCase
from graphfuse.benchmarks.peer import Work
from graphfuse.benchmarks.peers import graphfuse, stream, torch_eager
from graphfuse.benchmarks.results import Results
from graphfuse.runtime.handle import create_handle
from support import bench_record
from support.bench_runs import made

SMALL = NormAddNormCase(37, 96)
OURS = (graphfuse.PEER, graphfuse.NORM_ADD_THEN_NORM, graphfuse.NORM_THEN_ADD_NORM)


@pytest.mark.parametrize("peer", [*OURS, torch_eager.NORM_ADD_NORM, stream.PEER], ids=lambda p: p.name)
def test_peers_normalize_twice(peer):
    sets, work = made(peer, SMALL)
    given = sets[0].residual.clone()
    assert session.checked(SMALL, sets[0], work, peer.tight) is None
    assert torch.equal(given, sets[0].residual)  # also where the sum takes its place


@pytest.mark.emulate
def test_our_kernel_and_our_two_are_right():
    sets, on = SMALL.sets(1, "cpu"), create_handle("emulator")
    one = graphfuse.work(SMALL.graph(on), [sets[0].pack()])
    assert session.checked(SMALL, sets[0], one, tight=True) is None and one.note.count("rows[") == 1
    found = sets[0].sum.clone(), sets[0].out.clone()
    SMALL.spoil(sets[0])
    for graph, pack in (
        (SMALL.first_graph, sets[0].pack("x", "before", "residual", "sum")),
        (SMALL.second_graph, sets[0].pack("sum", "after", "out")),
    ):
        graphfuse.work(graph(on), [pack]).calls[0]()
    assert torch.equal(found[0], sets[0].sum) and torch.equal(found[1], sets[0].out)  # to the bit


@pytest.mark.parametrize("tight", [True, False])
def test_a_wrong_sum_or_row_is_seen(tight):
    sets, work = made(graphfuse.PEER, SMALL, 1)
    (operands,) = sets
    assert "wrong sum: 3552 of 3552" in session.checked(SMALL, operands, Work([lambda: None]), tight)
    work.calls[0]()
    assert SMALL.wrong(operands, tight) is None
    for tensor, said in ((operands.out, "wrong out"), (operands.sum, "wrong sum")):
        before = tensor[36, 95].clone()
        tensor[36, 95] += 0.5
        assert f"{said}: 1 of 3552 values checked, first in row 36, column 95" in SMALL.wrong(operands, tight)
        tensor[36, 95] = before
    total = operands.x + operands.residual  # as if nothing were normalized before
    operands.sum.copy_(total)
    assert "wrong sum" in SMALL.wrong(operands, tight)


def test_two_kernels_of_ours_are_no_competitors():
    r = Results(bench_record.record(BENCH.name))
    assert r.best_peer(r.record["cases"][0]) in ("quack", "torch_compile", "torch_eager")
    (faster,) = (t for t in BENCH.targets if "4096x5376" in t.text)
    for case in r.cases():
        wide = (case["rows"], case["columns"]) == (4096, 5376)
        for name, us in (("graphfuse", 2.0), ("graphfuse_norm_then_add_norm", 2.8 if wide else 1.0)):
            case["peers"][name]["us"] = {"median": us, "low": us, "high": us}
    assert faster.verdict(r).value == pytest.approx(1.4)
