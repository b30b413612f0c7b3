"""The bench of RMSNorm of Q's and K's heads: what is right and what is wrong."""

import pytest
import torch

from graphfuse.benchmarks import session
from graphfuse.benchmarks.peer import Work
from graphfuse.benchmarks.peers import graphfuse, torch_eager
from graphfuse.benchmarks.qk_norm import QkNormCase
from graphfuse.runtime.handle import create_handle
from support.bench_runs import made

QK = QkNormCase(5, 4, 2)


def test_eager_torch_normalizes_heads():
    sets, work = made(torch_eager.QK_NORM, QK)
    assert session.checked(QK, sets[0], work, False) is None
    assert torch.equal(sets[0].x, sets[0].before)


@pytest.mark.emulate
@pytest.mark.parametrize("joint", [False, True])
def test_our_kernels_normalize_heads_in_place(joint):
    sets = QK.sets(2, "cpu")
    handle = create_handle("emulator")
    graph, packs = QK.graph(handle), [s.pack() for s in sets]
    if joint:
        graph, packs = QK.joint_graph(handle), [QK.joint_pack(s) for s in sets]
    work = graphfuse.work(graph, packs)
    assert work.note.count("rows[") == (1 if joint else 2) and work.knobs_from
    assert session.checked(QK, sets[0], work, tight=True) is None
    for _ in range(20):
        work.calls[0]()
    assert sets[0].q.float().square().mean().item() == pytest.approx(1, abs=0.01)  # again and again, and yet not worn


def test_a_wrong_head_is_seen():
    (operands,) = sets = QK.sets(1, "cpu")
    assert "wrong q_out" in session.checked(QK, operands, Work([lambda: None]), False)
    right = torch_eager.qk_norm(operands.q, operands.k, operands.q_weight, operands.k_weight, operands.eps)

    def write(s, q, k) -> None:
        s.q.copy_(q), s.k.copy_(k)

    assert session.checked(QK, operands, Work([lambda: write(sets[0], *right)]), False) is None
    operands.x[2, -1] += 1
    assert "wrong v: 1 of 1280" in QK.wrong(operands, False)
    swapped = Work([lambda: write(sets[0], right[0], -right[1])])
    assert "wrong k_out" in session.checked(QK, operands, swapped, False)
