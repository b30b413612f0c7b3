"""The bench of Q's and K's heads, normalized and rotated: what is right and what is wrong."""

import pytest
import torch

from graphfuse.benchmarks import qk_norm_rope, session
from graphfuse.benchmarks.peer import Work
from graphfuse.benchmarks.peers import graphfuse, torch_eager
from graphfuse.benchmarks.qk_norm_rope import QkNormRopeCase
from graphfuse.benchmarks.qk_norm_rope_cache import TYPES
from graphfuse.benchmarks.qk_norm_rope_cache import QkNormRopeCacheCase as CacheCase
from graphfuse.benchmarks.qk_norm_rope_training import QkNormRopeTrainingCase as TrainingCase
from graphfuse.runtime.handle import create_handle
from support.bench_runs import made

CASES = [QkNormRopeCase(5, 4, 2), QkNormRopeCase(5, 4, 2, interleaved=True)]


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
    other = QkNormRopeCase(5, 4, 2, interleaved=not case.interleaved)
    right, wrong = (torch_eager.qk_norm_rope(*_given(operands), of.interleaved) for of in (case, other))

    def write(q, k) -> None:
        operands.q_out.copy_(q), operands.k_out.copy_(k)

    assert session.checked(case, operands, Work([lambda: write(*right)]), False) is None
    assert "wrong" in session.checked(case, operands, Work([lambda: write(*wrong)]), False)
    assert "wrong k_out" in session.checked(case, operands, Work([lambda: write(right[0], -right[1])]), False)
    assert sets


def _given(s):
    return s.q, s.k, s.q_weight, s.k_weight, s.table, s.positions, s.eps


CACHED = [CacheCase(5, 4, 2, output=output) for output in TYPES]
TRAINED = [TrainingCase(5, 4, 2), TrainingCase(5, 4, 2, interleaved=True)]


@pytest.mark.parametrize("case", [*CACHED, *TRAINED], ids=lambda c: f"{type(c).__module__} {c}")
def test_eager_torch_stores_heads_and_their_gradients(case):
    training = isinstance(case, TrainingCase)
    peer = torch_eager.QK_NORM_ROPE_TRAINING if training else torch_eager.QK_NORM_ROPE_CACHE
    sets, work = made(peer, case)
    assert session.checked(case, sets[0], work, False) is None


def test_a_rotated_value_larger_than_all_of_its_head_is_judged_by_its_own_size():
    case = CacheCase(1, 4, 2, output="fp8_e4m3")
    (operands,) = case.sets(1, "cpu")
    head = torch.full((128,), 0.52)
    head[[0, 64]] = torch.tensor([3.3, -3.3]) * 0.78  # an eighth of a turn makes one of them 3.3 times the root of two
    operands.k.copy_(head)
    operands.k_weight.fill_(1.0), operands.positions.fill_(0), operands.table.fill_(0.5**0.5)
    y = qk_norm_rope.normalized(operands.k.double(), operands.k_weight, operands.eps)
    exact, (scale, _) = case.turned(operands, y, torch.arange(1)), operands.scales
    assert exact.abs().amax() > 1.4 * y.abs().amax()
    for _ in range(200):  # to where FP8's step is large beside the head
        stored = (exact / scale.double()).float().to(torch.float8_e4m3fn)
        found = {name: (wanted, accepted) for name, wanted, accepted in case.exact(operands, torch.arange(1))}
        wanted, accepted = found["k_cache"]
        assert ((stored.double().flatten(1) - wanted).abs() <= accepted(True, wanted)).all()
        scale.mul_(1.005)


@pytest.mark.emulate
@pytest.mark.parametrize("case, kernels", [(CACHED[1], 2), (TRAINED[0], 3)], ids=["cache", "training"])
def test_our_kernels_store_heads_and_their_gradients(case, kernels):
    sets = case.sets(1, "cpu")
    work = graphfuse.work(case.graph(create_handle("emulator")), [s.pack() for s in sets])
    assert work.note.count("rows[") == kernels
    assert session.checked(case, sets[0], work, tight=True) is None


def test_a_wrong_slot_or_gradient_is_seen():
    """One value of each."""
    for case, fields in ((CACHED[0], ("k_cache", "v_cache")), (TRAINED[0], ("dq", "dk", "dq_weight", "dk_weight"))):
        sets = case.sets(1, "cpu")
        work = graphfuse.work(case.graph(create_handle("cpu")), [s.pack() for s in sets])
        assert session.checked(case, sets[0], work, tight=True) is None
        for name in fields:
            field = getattr(sets[0], name)
            place = (sets[0].slots[3], 1, 7) if name.endswith("cache") else (*(1,) * (field.dim() - 1), 7)
            before = field[place].clone()
            field[place] += 1
            assert "wrong" in case.wrong(sets[0], tight=False), name
            field[place] = before
        assert case.wrong(sets[0], tight=True) is None


@pytest.mark.parametrize("case", [CACHED[1], TRAINED[0]], ids=["cache", "training"])
def test_bytes_are_those_that_are_moved(case):
    """Each tensor as often as it is read or written; of the caches and the table the rows that are named."""
    (s,) = case.sets(1, "cpu")
    sizes = {name: t.numel() * t.itemsize for name, t in vars(s).items() if hasattr(t, "numel")}
    table = case.rows * s.table.shape[1] * s.table.itemsize
    count = dict.fromkeys(("q", "k", "q_out", "q_weight", "k_weight", "positions"), 1)
    if case is CACHED[1]:
        count |= dict.fromkeys(("v", "slots"), 1)
        stored, tables = 2 * case.rows * case.k_heads * 128, 1
    else:
        count |= dict.fromkeys(("dq_out", "dk_out", "dq", "dk", "dq_weight", "dk_weight", "k_out"), 1)
        count |= dict.fromkeys(("q", "k", "q_weight", "k_weight", "q_inverse_rms", "k_inverse_rms"), 2)
        count["positions"] = tables = 3
        stored = 0
    assert case.moved == sum(n * sizes[name] for name, n in count.items()) + tables * table + stored
