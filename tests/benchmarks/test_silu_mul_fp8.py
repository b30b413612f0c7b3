"""The bench of SiLU times a tensor to FP8 by rows: what is right and what is wrong."""

import pytest
import torch

from graphfuse.benchmarks import session
from graphfuse.benchmarks.peer import Work
from graphfuse.benchmarks.peers import graphfuse, stream, torch_eager
from graphfuse.benchmarks.silu_mul_fp8 import SiluMulFp8Case
from graphfuse.runtime.handle import create_handle
from support.bench_runs import made

SMALL = SiluMulFp8Case(37, 96)


@pytest.mark.parametrize("peer", [graphfuse.PEER, torch_eager.SILU_MUL_FP8, stream.PEER], ids=lambda p: p.name)
def test_peers_quantize(peer):
    sets, work = made(peer, SMALL)
    assert session.checked(SMALL, sets[0], work, peer.tight) is None


@pytest.mark.emulate
def test_our_kernel_quantizes():
    sets = SMALL.sets(1, "cpu")
    work = graphfuse.work(SMALL.graph(create_handle("emulator")), [sets[0].pack()])
    assert work.note.count("rows[") == 1
    assert session.checked(SMALL, sets[0], work, tight=True) is None


@pytest.mark.parametrize("tight", [True, False])
def test_a_wrong_scale_or_element_is_seen(tight):
    sets, work = made(graphfuse.PEER, SMALL, 1)
    (operands,) = sets
    assert "wrong scale: 37 of 37" in session.checked(SMALL, operands, Work([lambda: None]), tight)
    work.calls[0]()
    assert SMALL.wrong(operands, tight) is None
    item = operands.out.view(torch.uint8)
    before = item[36, 95].item()
    item[36, 95] = before ^ 0x48  # bits of the exponent
    assert "wrong out: 1 of 3552 values checked, first in row 36, column 95" in SMALL.wrong(operands, tight)
    item[36, 95] = before
    operands.scale[36] *= 1 + 2**-5
    assert "wrong scale: 1 of 37 values checked, first in row 36" in SMALL.wrong(operands, tight)
    work.calls[0]()
    operands.x.copy_(operands.x.roll(96, 1))  # SiLU of the other half
    assert "wrong" in SMALL.wrong(operands, tight)
