"""The bench of Q's and K's heads, normalized and rotated: what is right and what is wrong."""

import pytest

from graphfuse.benchmarks import session
from graphfuse.benchmarks.peer import Work
from graphfuse.benchmarks.peers import graphfuse, torch_eager
from graphfuse.benchmarks.qk_norm_rope import Case
from graphfuse.runtime.handle import create_handle
from support.bench_runs import made

CASES = [Case(5, 4, 2), Case(5, 4, 2, interleaved=True)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_eager_torch_rotates_heads(case):
    sets, work = made(torch_eager.QK_NORM_ROPE, case)
    assert session.checked(case, sets[0], work, False) is None


@pytest.mark.emulate
@pytest.mark.parametrize("case", CASES, ids=str)
def test_our_kernel_rotates_heads(case):
    sets = case.sets(1, "cpu")
    work = graphfuse.work(case.graph(create_handle("emulator")), [s.pack() for s in sets])
    assert work.note.count("rows[") == 1
    assert session.checked(case, sets[0], work, tight=True) is None


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_wrong_head_is_seen(case):
    (operands,) = sets = case.sets(1, "cpu")
    assert "wrong" in session.checked(case, operands, Work([lambda: None]), False)
    other = Case(5, 4, 2, interleaved=not case.interleaved)
    right, wrong = (torch_eager.qk_norm_rope(*_given(operands), of.interleaved) for of in (case, other))

    def write(q, k) -> None:
        operands.q_out.copy_(q), operands.k_out.copy_(k)

    assert session.checked(case, operands, Work([lambda: write(*right)]), False) is None
    assert "wrong" in session.checked(case, operands, Work([lambda: write(*wrong)]), False)
    assert "K" in session.checked(case, operands, Work([lambda: write(right[0], -right[1])]), False)
    assert sets


def _given(s):
    return s.q, s.k, s.q_weight, s.k_weight, s.table, s.positions, s.eps
