"""The sum over ranks with a residual sum and RMSNorm: on ranks of gloo, and where kernels read other ranks' memory."""

import pytest
import torch

from graphfuse import VariantPackError, VariantPackTypeError
from graphfuse.functional import all_reduce, all_reduce_add_rmsnorm, sequence_parallel
from support import oracle, ranks, reduced

pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.torch]


@pytest.fixture(scope="module", params=[2, 4])
def on_cpus(request):
    return ranks.run("support.reduced", ranks.cases(request), ranks=request.param)


@pytest.mark.parametrize("case", reduced.ON_CPUS)
def test_ranks_of_gloo(on_cpus, case):
    assert not on_cpus[case], "\n".join(on_cpus[case])


@pytest.fixture(scope="module")
def on_gpus():
    return ranks.on_two_gpus("support.reduced", [*reduced.CASES])


@pytest.mark.gpu
@pytest.mark.parametrize("case", reduced.CASES)
def test_two_gpus(on_gpus, case):
    assert not on_gpus[case], "\n".join(on_gpus[case])


def test_without_a_group():
    x, weight = torch.zeros(3, 64), torch.zeros(64)
    with pytest.raises(VariantPackError, match="group is not initialized"):
        all_reduce_add_rmsnorm(x, x.clone(), weight)


def test_the_kernel_of_one_rank(monkeypatch):
    """What several ranks run is held by tests/emulator/test_ranks.py."""
    monkeypatch.setenv("GRAPHFUSE_DEVICE", "emulator")
    x, residual, weight = torch.randn(3, 64).bfloat16(), torch.randn(3, 64).bfloat16(), torch.randn(64).bfloat16()
    total = x.double() + residual.double()
    peers = torch.zeros(66, dtype=torch.int64)
    out = all_reduce._one_kernel(x, residual, weight, peers, 0, 1e-6, None, None, None)
    torch.testing.assert_close(residual.double(), total, rtol=2.0**-8, atol=2.0**-8)
    torch.testing.assert_close(out.double(), oracle.rmsnorm(total, weight, 1e-6)[0], rtol=2.0**-7, atol=2.0**-7)


def test_kernels_of_parts_of_one_rank(monkeypatch):
    """What several ranks run is held by tests/emulator/test_gathered_rows.py."""
    monkeypatch.setenv("GRAPHFUSE_DEVICE", "emulator")
    x, residual, weight = torch.randn(3, 64).bfloat16(), torch.randn(3, 64).bfloat16(), torch.randn(64).bfloat16()
    total, peers, scale = x.double() + residual.double(), torch.zeros(66, dtype=torch.int64), torch.full((1,), 0.5)
    summed, out, quantized = residual.clone(), torch.empty_like(x), torch.empty_like(x, dtype=torch.float8_e4m3fn)
    sequence_parallel._scatters(x, residual, weight, peers, 0, 1e-6, out, None, None)
    sequence_parallel._does_both(x, summed, weight, peers, peers.clone(), 0, 1e-6, quantized, scale, None)
    exact = oracle.rmsnorm(total, weight, 1e-6)[0]
    for made, wanted, least in ((residual, total, 2.0**-8), (out, exact, 2.0**-7), (quantized, 2 * exact, 1 / 15)):
        torch.testing.assert_close(made.double(), wanted, rtol=least, atol=0.02)
    assert torch.equal(summed, residual)
    sequence_parallel._gathers(x, weight, peers, 0, 1e-6, out, None, None)
    torch.testing.assert_close(out.double(), oracle.rmsnorm(x.double(), weight, 1e-6)[0], rtol=2.0**-7, atol=2.0**-7)


@pytest.mark.parametrize(
    ("peers", "rank", "said"),
    [
        (torch.zeros(67, dtype=torch.int64), 0, r"peers has shape \(67,\)"),
        (torch.zeros(68, dtype=torch.int32), 0, "peers is of torch.int32; accepted: int64"),
        (torch.zeros(68, dtype=torch.int64), 2, "rank must be 0 to 1, as peers has 2 ranks, got 2"),
        (torch.zeros(68, dtype=torch.int64), 8, "rank is 8; accepted: 0, 1, 2, 3, 4, 5, 6, 7"),
    ],
)
def test_peers_that_are_none(peers, rank, said):
    x, weight = torch.zeros(3, 64), torch.zeros(64)
    with pytest.raises((VariantPackError, VariantPackTypeError), match=said):
        all_reduce._one_kernel(x, x.clone(), weight, peers, rank, 1e-6, None, None, None)
