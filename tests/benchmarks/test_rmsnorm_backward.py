"""The benches of RMSNorm backward: what is right and what is wrong."""

import pytest

from graphfuse.benchmarks import session
from graphfuse.benchmarks.peers import graphfuse, stream, torch_eager
from graphfuse.benchmarks.rmsnorm_backward import OUTPUTS, AddRmsNormBackwardCase, RmsNormBackwardCase
from support.bench_runs import made

SMALL = [*(RmsNormBackwardCase(37, 96, output) for output in OUTPUTS), AddRmsNormBackwardCase(1100, 24, "bf16")]


@pytest.mark.parametrize("case", SMALL, ids=lambda c: f"{type(c).__name__} {c.output}")
def test_gradients_are_judged(case):
    for peer in (graphfuse.PEER, stream.PEER):  # torch's own kernel is on GPUs alone
        sets, work = made(peer, case)
        assert session.checked(case, sets[0], work, peer.tight) is None, peer.name
    (operands,) = case.sets(1, "cpu")
    dx, dweight = torch_eager.rmsnorm_backward(
        operands.dy, operands.x, operands.weight, operands.inverse_rms, operands.residual
    )
    operands.dx.copy_(dx), operands.dweight.copy_(dweight)
    assert case.wrong(operands, tight=True) is None
    operands.dweight[3] += 10
    assert "wrong dweight: 1 of " in case.wrong(operands, tight=False)
    operands.dx[case.rows - 1, 5] += 0.5
    assert f"wrong dx: 1 of {case.rows * case.columns} values checked, first in row {case.rows - 1}, " in case.wrong(
        operands, tight=False
    )
