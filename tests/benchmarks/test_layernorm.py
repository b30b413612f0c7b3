"""The bench of LayerNorm forward: what is right and what is wrong."""

import pytest

from graphfuse.benchmarks import session
from graphfuse.benchmarks.layernorm import BENCH, LayerNormCase
from graphfuse.benchmarks.peer import Work
from graphfuse.benchmarks.peers import graphfuse, stream, torch_eager
from graphfuse.runtime.handle import create_handle
from support.bench_runs import made

SMALL = LayerNormCase(37, 96)


def test_the_sizes_asked_for():
    assert {(c.rows, c.columns) for c in BENCH.cases} == {
        (r, c) for r in (4096, 32768) for c in (1024, 2048, 4096, 8192)
    }


@pytest.mark.parametrize("peer", [graphfuse.PEER, torch_eager.LAYERNORM, stream.PEER], ids=lambda p: p.name)
def test_peers_normalize(peer):
    sets, work = made(peer, SMALL)
    assert session.checked(SMALL, sets[0], work, peer.tight) is None


@pytest.mark.emulate
def test_our_kernel_normalizes():
    sets = SMALL.sets(1, "cpu")
    work = graphfuse.work(SMALL.graph(create_handle("emulator")), [sets[0].pack()])
    assert session.checked(SMALL, sets[0], work, tight=True) is None


@pytest.mark.parametrize("tight", [True, False])
def test_a_wrong_row_is_seen(tight):
    sets, work = made(graphfuse.PEER, SMALL, 1)
    (operands,) = sets
    assert "wrong y: 3552 of 3552" in session.checked(SMALL, operands, Work([lambda: None]), tight)
    work.calls[0]()
    assert SMALL.wrong(operands, tight) is None
    before = operands.y[36, 95].clone()
    operands.y[36, 95] *= -1.5
    assert "wrong y: 1 of 3552 values checked, first in row 36, column 95" in SMALL.wrong(operands, tight)
    operands.y[36, 95] = before
    operands.x += 1  # another mean, the same differences but for their rounding
    assert tight or SMALL.wrong(operands, tight) is None
    without = operands.x.float()
    without *= (without.square().mean(1, keepdim=True) + operands.eps).rsqrt()
    operands.y.copy_(without * operands.weight + operands.bias)  # RMSNorm
    assert "wrong y" in SMALL.wrong(operands, tight)
