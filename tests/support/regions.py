"""A program, what it computes in torch, and the regions of a function of torch."""

import torch

from graphfuse.torch.regions import selection
from graphfuse.torch.regions.program import Program, ProgramStep, RegionInput, Result
from support.traces import recorded

HALF, FULL, BINARY16 = torch.bfloat16, torch.float32, torch.float16
T, C = 4, 32

PROGRAM = Program(
    (RegionInput("in0", "nn", "FLOAT"), RegionInput("in1", "-n", "BFLOAT16")),
    (
        ProgramStep("reduction", {"input": "in0"}, {"mode": "ADD"}),
        ProgramStep("mul", {"a": "in0", "b": "@0"}),
        ProgramStep("mul", {"a": "@1", "b": "in1"}, {}, "BFLOAT16"),
    ),
    (Result(2, "nn", "BFLOAT16"), Result(0, "n-", "FLOAT")),
)


def rows(dtype=HALF, seed=0, shape=(T, C)):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def found(function, *tensors, how="dynamo"):
    """The graph with regions in it, what it is called with, and the regions' verdicts."""
    module, given = recorded(function, tensors, how)
    verdicts, _ = selection.replace_in(module, False)
    return module, given, verdicts


def summed(x):
    return x + x.float().sum(-1, keepdim=True).to(x.dtype)


def own(x, w):
    return (x * x.sum(-1, keepdim=True) * w).to(HALF), x.sum(-1)
