"""The bench of RMSNorm → SiLU: its cases, and what is right and what is wrong."""

import pytest
import torch

from graphfuse.benchmarks import session
from graphfuse.benchmarks.peer import Work
from graphfuse.benchmarks.peers import flashinfer, graphfuse, stream, torch_eager
from graphfuse.benchmarks.rmsnorm_silu import BENCH, RmsNormSiluCase
from graphfuse.benchmarks.sizes import OUTPUTS
from support.bench_runs import made

SMALL = [RmsNormSiluCase(33, 64, output) for output in OUTPUTS]


def test_the_seeds_sizes():
    assert len(set(BENCH.cases)) == 120
    assert len(BENCH.quick) == 12 and set(BENCH.quick) <= set(BENCH.cases)


@pytest.mark.parametrize("output, each", [("bf16", 4), ("fp8_e4m3", 3), ("nvfp4", 2 + 0.5 + 1 / 16)])
def test_bytes_are_those_of_the_tensors(output, each):
    case = RmsNormSiluCase(48, 160, output)
    (operands,) = case.sets(1, "cpu")
    tensors = [t for t in (operands.x, operands.weight, operands.out, operands.block_scale) if t is not None]
    assert case.moved == sum(t.numel() * t.itemsize for t in tensors) == 48 * 160 * each + 320


@pytest.mark.parametrize("case", SMALL, ids=lambda c: c.output)
@pytest.mark.parametrize("peer", [graphfuse.PEER, torch_eager.RMSNORM_SILU, stream.PEER], ids=lambda p: p.name)
def test_peers_compute_the_case(peer, case):
    if peer.why_absent(case, 90):
        pytest.skip(peer.why_absent(case, 90))
    sets, work = made(peer, case)
    assert len(work.calls) == 2
    assert session.checked(case, sets[0], work, peer.tight) is None


@pytest.mark.parametrize("case", SMALL, ids=lambda c: c.output)
@pytest.mark.parametrize("tight", [True, False])
def test_a_wrong_result_is_seen(case, tight):
    (operands,) = sets = case.sets(1, "cpu")
    work = graphfuse.PEER.make(case, sets)
    nothing = Work([lambda: None])
    assert "wrong out: 2112 of 2112" in session.checked(case, operands, nothing, tight)
    work.calls[0]()
    assert case.wrong(operands, tight) is None
    item = operands.out.view(torch.uint8)
    before = item[32, 3].item()
    item[32, 3] = before ^ 0x44  # exponent bits of both nibbles
    assert "first in row 32" in case.wrong(operands, tight)
    item[32, 3] = before
    operands.eps = 1.0
    assert case.wrong(operands, tight)


def test_our_own_result_is_held_to_one_rounding():
    case, (operands,) = SMALL[0], SMALL[0].sets(1, "cpu")
    graphfuse.PEER.make(case, [operands]).calls[0]()
    operands.out[0] *= 1 + 2**-6
    assert case.wrong(operands, tight=True) and case.wrong(operands, tight=False) is None


def test_the_last_row_is_always_checked():
    case = RmsNormSiluCase(9000, 64, "bf16")
    (operands,) = case.sets(1, "cpu")
    graphfuse.PEER.make(case, [operands]).calls[0]()
    operands.out[-1] = 0
    assert "row 8999" in case.wrong(operands, tight=False)


def test_flashinfer_says_what_it_cannot():
    assert "SM100" in flashinfer.RMSNORM_SILU.why_not(SMALL[2], 90)
    assert flashinfer.RMSNORM_SILU.why_not(SMALL[2], 100) is None


def test_every_case_has_somebody_to_compare_with():
    assert [p.name for p in BENCH.peers][0] == BENCH.ours and BENCH.peers[-1].name == BENCH.stream
    assert len({p.name for p in BENCH.peers}) == len(BENCH.peers)
