"""The bench of cross entropy: what is right and what is wrong."""

import pytest
import torch

from graphfuse.benchmarks import row_case, session
from graphfuse.benchmarks.cross_entropy import CrossEntropyCase
from graphfuse.benchmarks.peers import graphfuse, stream, torch_eager
from graphfuse.runtime.handle import create_handle
from support.bench_runs import made

SMALL = CrossEntropyCase(37, 96)


@pytest.mark.parametrize(
    "peer",
    [graphfuse.PEER, torch_eager.CROSS_ENTROPY, stream.PEER],
    ids=lambda p: p.name,
)
def test_peers_make_losses(peer):
    sets, work = made(peer, SMALL)
    assert session.checked(SMALL, sets[0], work, peer.tight) is None


@pytest.mark.emulate
def test_our_kernel_makes_losses():
    sets = SMALL.sets(1, "cpu")
    work = graphfuse.work(SMALL.graph(create_handle("emulator")), [sets[0].pack()])
    assert work.note.count("[") == 1
    assert session.checked(SMALL, sets[0], work, tight=True) is None


@pytest.mark.parametrize("tight", [True, False])
def test_a_wrong_loss_is_seen_in_any_part_of_the_rows(tight, monkeypatch):
    monkeypatch.setattr(row_case, "_JUDGED", 960)  # ten rows
    (operands,) = SMALL.sets(1, "cpu")
    SMALL.spoil(operands)
    assert "wrong loss: 10 of 10 values checked, first in row 0" in SMALL.wrong(operands, tight)
    logits = operands.x.double()
    right = logits.logsumexp(1) - logits[torch.arange(37), operands.target]
    operands.loss.copy_(right)
    assert SMALL.wrong(operands, tight) is None
    for row in (36, 10, 0):
        operands.loss[row] += 0.25
        assert f"first in row {row}, column 0" in SMALL.wrong(operands, tight)


def test_bytes_are_those_of_the_tensors():
    (operands,) = SMALL.sets(1, "cpu")
    assert SMALL.moved == sum(t.numel() * t.itemsize for t in operands.pack().values())
