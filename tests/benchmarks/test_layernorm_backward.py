"""The bench of LayerNorm backward: what is right and what is wrong."""

import pytest

from graphfuse.benchmarks import session
from graphfuse.benchmarks.layernorm_backward import LayerNormBackwardCase
from graphfuse.benchmarks.peers import graphfuse, stream, torch_eager
from support.bench_runs import made

SMALL = LayerNormBackwardCase(1100, 24)


@pytest.mark.parametrize("peer", [graphfuse.PEER, stream.PEER], ids=lambda p: p.name)
def test_peers_make_gradients(peer):  # torch's own kernel takes these types on GPUs alone
    sets, work = made(peer, SMALL)
    assert session.checked(SMALL, sets[0], work, peer.tight) is None


def test_gradients_are_judged():
    (operands,) = SMALL.sets(1, "cpu")
    SMALL.spoil(operands)
    assert "wrong dx: 26400 of 26400 values checked, first in row 0" in SMALL.wrong(operands, tight=False)
    right = torch_eager.layernorm_backward(operands.dy, operands.x, operands.weight, operands.mean, operands.inverse)
    for found, exact in zip((operands.dx, operands.dweight, operands.dbias), right, strict=True):
        found.copy_(exact)
    assert SMALL.wrong(operands, tight=True) is None
    operands.dbias[3] += 10
    assert "wrong dbias: 1 of 24 values checked" in SMALL.wrong(operands, tight=False)
    operands.dweight[3] += 10
    assert "wrong dweight: 1 of 24 values checked" in SMALL.wrong(operands, tight=False)
    operands.dx[1099, 5] += 0.5
    assert "wrong dx: 1 of 26400 values checked, first in row 1099, column 5" in SMALL.wrong(operands, tight=False)


def test_bytes_are_those_of_the_tensors():
    (operands,) = SMALL.sets(1, "cpu")
    assert SMALL.moved == sum(t.numel() * t.itemsize for t in operands.pack().values())
