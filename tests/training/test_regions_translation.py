"""What of aten translates to ops, and why other nodes do not."""

import math
import subprocess
import sys

import pytest
import torch

from graphfuse.ops import OPS
from graphfuse.torch import compile_report
from graphfuse.torch.regions.translate import TranslatedGraph
from support.regions import FULL, HALF, C, T, rows
from support.traces import recorded

pytestmark = pytest.mark.torch

CALLS = [(op.name, text) for op in OPS.values() for text in op.aten]


@pytest.mark.parametrize(("op", "text"), CALLS)
def test_what_ops_are_called_in_aten(op, text):
    name, *given = text.split()
    space, _, called = name.rpartition("::")
    packet, _, overload = called.partition(".")
    schema = getattr(getattr(getattr(torch.ops, space or "aten"), packet), overload)._schema
    parameters = {a.name for a in schema.arguments}
    targets = {port.name for port in OPS[op].inputs} | {a.name for a in OPS[op].attributes}
    assert given
    for one in given:
        parameter, _, target = one.replace("=", ":").partition(":")
        assert parameter in parameters
        assert "=" in one or target in targets


REFUSED = {
    "float64": (lambda x: x.double().sum(-1), "makes torch.float64"),
    "integers": (lambda x: x.int() + 1, "makes torch.int32"),
    "a step of a sum": (
        lambda x: torch.add(x, x.new_ones((), dtype=FULL), alpha=2),
        "no op computes add.Tensor",  # of a number that is rounded first
    ),
    "rounded down": (lambda x: torch.div(x, 3, rounding_mode="floor"), "computes with numbers alone"),
    "detached": (lambda x: x.detach(), "no op computes detach.default"),
    "truth values added": (lambda x: (x > 0) + (x < 1), "add.Tensor of truth values"),
    "one truth value": (lambda x: (x > 0) & x.new_ones((), dtype=torch.bool), "reads a truth value without dimensions"),
    "another dimension": (
        lambda x: x.sum(0),
        "sum.dim_IntList reduces dimensions (0,); accepted: those of other reductions",
    ),
    "all dimensions": (
        lambda x: x.mean((0, 1)),
        "mean.dim reduces dimensions (0, 1); accepted: those of other reductions",
    ),
    "dimensions apart": (
        lambda x: x[None].mean((0, 2)),
        "mean.dim reduces dimensions (0, 2); accepted: one, or neighbours whose extents do not vary",
    ),
    "elements rounded first": (lambda x: (x * 2).float().sum(-1, dtype=HALF), "sum.dim_IntList of torch.float32 to"),
    "transposed": (lambda x: (x * 2).t(), "no op computes t.default"),
    "what is repeated": (
        lambda x: x.float().mean(-1, keepdim=True).expand(T, C).sum(-1),
        "sum.dim_IntList reduces what is repeated",
    ),
    "NaN as a limit": (lambda x: x.clamp(min=math.nan), "clamp.default between nan and None; accepted: numbers"),
    "elements that move": (lambda x: (x * 2).view(-1, 2), "a view that moves elements"),
    "joined dimensions": (lambda x: (x[None] * 2).softmax(1), "_softmax.default reduces dimensions (1,); accepted:"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_translate(what):
    function, why = REFUSED[what]
    module, _ = recorded(function, (rows(),), "dynamo")
    translation = TranslatedGraph()
    for node in module.graph.nodes:
        translation.add(node)
    assert any(said.startswith(why) or why in said for said in translation.why.values()), translation.why


VARYING = """
import os, torch, torch._dynamo, graphfuse.torch
from torch.nn.functional import rms_norm
for of in (lambda n, x, w: torch.addcmul(n, x, w), lambda n, x, w: torch.lerp(n, w, 0.3)):
    if os.fork():
        os.wait()
        continue
    f = lambda x, w: of(rms_norm(x, (32,)), x, w)
    run = torch.compile(f, backend="graphfuse", dynamic=True, options={"then": "eager", "decline": False})
    x, w = torch.randn(2, 4, 32), torch.randn(32)
    torch.testing.assert_close(run(x, w), f(x, w))
    print(graphfuse.torch.compile_report(), flush=True)
    os._exit(0)
"""


def test_extents_that_vary_lose_no_operation():
    """Each in a process of its own: once something has imported them, torch's rules in C++ are not asked."""
    done = subprocess.run([sys.executable, "-c", VARYING], capture_output=True, text=True)
    assert done.stdout.count("region (rmsnorm, ") == 2 and "failed while" not in done.stderr, done.stderr


def test_what_is_written_in_place_is_told():
    def function(x):
        h = x * 2
        first = torch.nn.functional.rms_norm(h, (C,))
        h[:, :1] = 0
        return first, torch.nn.functional.rms_norm(h, (C,))

    torch.compiler.reset()
    x = rows(FULL)
    run = torch.compile(function, backend="graphfuse", options={"then": "eager", "decline": False})
    for made, wanted in zip(run(x), function(x), strict=True):
        torch.testing.assert_close(made, wanted)
    assert str(compile_report()).count("h, which it reads, is written in place") == 2
