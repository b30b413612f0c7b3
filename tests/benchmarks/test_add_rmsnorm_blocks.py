"""The bench of a residual sum and its norm to FP8 in blocks of 128: what is right and what is wrong."""

import pytest
import torch

from graphfuse.benchmarks import session
from graphfuse.benchmarks.add_rmsnorm_blocks import OUTPUTS, AddRmsNormBlocksCase
from graphfuse.benchmarks.peers import graphfuse, stream, torch_eager
from graphfuse.runtime.handle import create_handle
from support.bench_runs import made

SMALL = [AddRmsNormBlocksCase(37, 384, output) for output in OUTPUTS]


@pytest.mark.parametrize("case", SMALL, ids=lambda c: c.output)
@pytest.mark.parametrize(
    "peer",
    [graphfuse.PEER, torch_eager.ADD_RMSNORM_BLOCKS, stream.PEER],
    ids=lambda p: p.name,
)
def test_peers_quantize(peer, case):
    sets, work = made(peer, case)
    assert session.checked(case, sets[0], work, peer.tight) is None


@pytest.mark.emulate
@pytest.mark.parametrize("case", SMALL, ids=lambda c: c.output)
def test_our_kernel_quantizes(case):
    sets = case.sets(1, "cpu")
    work = graphfuse.work(case.graph(create_handle("emulator")), [sets[0].pack()])
    assert work.note.count("[") == 1
    assert session.checked(case, sets[0], work, tight=True) is None


@pytest.mark.parametrize("case", SMALL, ids=lambda c: c.output)
def test_what_is_wrong_is_seen(case):
    sets, work = made(torch_eager.ADD_RMSNORM_BLOCKS, case, 1)
    operands = work.calls[0].args[0]  # a peer that makes its outputs has sets of its own
    case.spoil(operands)
    assert "wrong sum: 14208 of 14208" in case.wrong(operands, False)
    work.calls[0]()
    assert case.wrong(operands, False) is None
    item = operands.out.view(torch.uint8)
    before = item[36, 383].item()
    item[36, 383] = before ^ 0x48  # bits of the exponent
    assert "wrong out: 1 of 14208 values checked, first in row 36, column 383" in case.wrong(operands, False)
    item[36, 383] = before
    operands.scales[36, 2] *= 1.5
    assert "wrong scales: 1 of 111 values checked, first in row 36, column 2" in case.wrong(operands, False)
    if case.both:
        operands.normed[36, 383] += 0.5
        assert "wrong normed: 1 of 14208 values checked, first in row 36" in case.wrong(operands, False)
    operands.sum[36, 383] += 0.5
    assert "wrong sum: 1 of 14208 values checked, first in row 36, column 383" in case.wrong(operands, False)


@pytest.mark.parametrize("case", SMALL, ids=lambda c: c.output)
def test_bytes_are_those_of_the_tensors(case):
    (operands,) = case.sets(1, "cpu")
    assert case.moved == sum(t.numel() * t.itemsize for t in operands.pack().values())
