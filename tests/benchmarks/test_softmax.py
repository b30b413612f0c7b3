"""The bench of softmax: what is right and what is wrong."""

import pytest

from graphfuse.benchmarks import row_case, session
from graphfuse.benchmarks.peer import Work
from graphfuse.benchmarks.peers import graphfuse, stream, torch_eager
from graphfuse.benchmarks.softmax import SoftmaxCase
from graphfuse.runtime.handle import create_handle
from support.bench_runs import made

SMALL = SoftmaxCase(37, 96)


@pytest.mark.parametrize("peer", [graphfuse.PEER, torch_eager.SOFTMAX, stream.PEER], ids=lambda p: p.name)
def test_peers_take_softmax(peer):
    sets, work = made(peer, SMALL)
    assert session.checked(SMALL, sets[0], work, peer.tight) is None


@pytest.mark.emulate
def test_our_kernel_takes_softmax():
    sets = SMALL.sets(1, "cpu")
    work = graphfuse.work(SMALL.graph(create_handle("emulator")), [sets[0].pack()])
    assert work.note.count("rows[") == 1
    assert session.checked(SMALL, sets[0], work, tight=True) is None


@pytest.mark.parametrize("tight", [True, False])
def test_a_wrong_element_is_seen_in_any_part_of_the_rows(tight, monkeypatch):
    monkeypatch.setattr(row_case, "_JUDGED", 960)  # ten rows
    sets, work = made(graphfuse.PEER, SMALL, 1)
    (operands,) = sets
    assert "wrong y: 960 of 960 values checked, first in row 0" in session.checked(
        SMALL, operands, Work([lambda: None]), tight
    )
    work.calls[0]()
    assert SMALL.wrong(operands, tight) is None
    for row in (36, 10, 0):
        operands.y[row, 95] *= 1 + 2**-5
        assert f"first in row {row}, column 95" in SMALL.wrong(operands, tight)
