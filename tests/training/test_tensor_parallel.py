"""Sums over ranks of tensor-parallel layers, with the residual sums and norms behind them, on two ranks."""

import pytest
import torch

from graphfuse import SerializedError
from graphfuse.torch.regions.operator import RegionOperator
from graphfuse.torch.regions.over_ranks import SummedRegion, with_sum_before
from graphfuse.torch.regions.program import Program, ProgramStep, RegionInput, Result
from support import oracle, ranks, tensor_parallel

pytest.importorskip("transformers", minversion="5.0")

pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.torch]


@pytest.fixture(scope="module")
def on_cpus(request):
    return ranks.run("support.tensor_parallel", ranks.cases(request))


@pytest.mark.some(5)
@pytest.mark.parametrize("case", tensor_parallel.CASES)
def test_two_ranks(on_cpus, case):
    assert not on_cpus[case], "\n".join(on_cpus[case])


@pytest.fixture(scope="module")
def on_gpus():
    return ranks.on_two_gpus("support.tensor_parallel", [*tensor_parallel.ON_GPUS])


@pytest.mark.gpu
@pytest.mark.parametrize("case", tensor_parallel.ON_GPUS)
def test_two_gpus(on_gpus, case):
    assert not on_gpus[case], "\n".join(on_gpus[case])


def _norm() -> Program:
    """That of Llama, in bfloat16: rounded, and then multiplied by the weight."""
    bf16 = "BFLOAT16"
    inputs = RegionInput("in0", "nn", bf16), RegionInput("in1", "-n", bf16)
    norm = ProgramStep("rmsnorm", {"input": "in0", "epsilon": 1e-6}, {"norm_forward_phase": "INFERENCE"}, bf16)
    return Program(inputs, (norm, ProgramStep("mul", {"a": "in1", "b": "@0"}, {}, bf16)), (Result(1, "nn", bf16),))


def test_a_norm_behind_a_sum():
    x, residual, weight = torch.randn(3, 64).bfloat16(), torch.randn(3, 64).bfloat16(), torch.randn(64).bfloat16()
    program = Program.read(with_sum_before(_norm()).text)
    total, made = RegionOperator.of(program.text).inference.function(residual, x, weight)
    assert torch.equal(total, x + residual)
    exact = oracle.rmsnorm((x + residual).double(), weight, 1e-6)[0]
    torch.testing.assert_close(made.double(), exact, rtol=2.0**-6, atol=2.0**-6)


@pytest.mark.emulate
def test_the_kernel_of_one_rank(monkeypatch):
    monkeypatch.setenv("GRAPHFUSE_DEVICE", "emulator")
    x, residual, weight = torch.randn(3, 64).bfloat16(), torch.randn(3, 64).bfloat16(), torch.randn(64).bfloat16()
    text = with_sum_before(_norm()).text
    made = SummedRegion.of(text, 1).one_kernel(residual, x, weight, torch.zeros(66, dtype=torch.int64), 0)
    assert all(map(torch.equal, made, RegionOperator.of(text).inference.function(residual, x, weight)))


def test_sums_of_what_has_no_rows():
    with pytest.raises(SerializedError, match="input 1 of a region is a sum over ranks; accepted: one that has all"):
        SummedRegion.of(_norm().text, 1)
