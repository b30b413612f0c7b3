"""The benches of residual add → RMSNorm: their cases, and what is right and what is wrong."""

import pytest
import torch

from graphfuse.benchmarks import session
from graphfuse.benchmarks.add_rmsnorm import BENCH, FP8, AddRmsNormCase
from graphfuse.benchmarks.peer import Work, overwriting
from graphfuse.benchmarks.peers import graphfuse, stream, torch_eager
from graphfuse.runtime.handle import create_handle
from support.bench_runs import made

SMALL = [AddRmsNormCase(5, 96, output) for output in ("bf16", "fp8_e4m3")]
ADDING = {"bf16": torch_eager.ADD_RMSNORM, "fp8_e4m3": torch_eager.ADD_RMSNORM_FP8}


def test_the_sizes_asked_for():
    sizes = {(c.rows, c.columns) for c in BENCH.cases}
    assert len(sizes) == 28 and {(4096, 1024), (32768, 32768), (1, 3584)} <= sizes
    assert {(c.rows, c.columns) for c in FP8.cases} < sizes


@pytest.mark.parametrize("case", SMALL, ids=lambda c: c.output)
def test_peers_add(case):
    for peer in (graphfuse.PEER, ADDING[case.output], stream.PEER):
        sets, work = made(peer, case)
        assert session.checked(case, sets[0], work, peer.tight) is None, peer.name
        assert len({id(s.out) for s in sets}) == 2  # what a peer makes itself replaces nothing of the case's


@pytest.mark.emulate
@pytest.mark.parametrize("case", SMALL, ids=lambda c: c.output)
def test_our_kernel_adds(case):
    sets = case.sets(1, "cpu")
    work = graphfuse.work(case.graph(create_handle("emulator")), [sets[0].pack()])
    assert session.checked(case, sets[0], work, tight=True) is None


def in_place(s) -> None:
    """As FlashInfer does it."""
    s.sum += s.out
    s.out.copy_(torch.nn.functional.rms_norm(s.sum, s.weight.shape, s.weight, s.eps))


def test_who_writes_over_its_inputs_is_judged_by_the_first_call():
    case = SMALL[0]
    sets = case.sets(1, "cpu")
    given = sets[0].x.clone(), sets[0].residual.clone()
    work = overwriting(case, sets, in_place, out="x", sum="residual")
    assert session.checked(case, sets[0], work, False) is None
    work.calls[0]()
    assert "wrong sum" in work.check()  # of the second, as its inputs are the first one's results
    assert torch.equal(given[0], sets[0].x) and torch.equal(given[1], sets[0].residual)
    for wrong in (lambda s: None, lambda s: s.out.zero_()):
        assert "wrong" in session.checked(case, sets[0], overwriting(case, sets, wrong, out="x", sum="residual"), False)


@pytest.mark.parametrize("case", SMALL, ids=lambda c: c.output)
@pytest.mark.parametrize("tight", [True, False])
def test_a_wrong_sum_or_row_is_seen(case, tight):
    sets, work = made(graphfuse.PEER, case, 1)
    (operands,) = sets
    assert "wrong sum: 480 of 480" in session.checked(case, operands, Work([lambda: None]), tight)
    work.calls[0]()
    assert case.wrong(operands, tight) is None
    for tensor, said in ((operands.sum, "wrong sum"), (operands.out, "wrong out")):
        bits = tensor.view(torch.uint8)
        before, last = bits.clone(), bits[4, -1].item()
        bits[4, -1] = last ^ 0x24
        assert f"{said}: 1 of 480 values checked, first in row 4, column 95" in case.wrong(operands, tight)
        bits.copy_(before)
    operands.eps = 1.0
    assert "wrong out" in case.wrong(operands, tight)
