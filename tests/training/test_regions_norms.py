"""Norms in every spelling, as regions: the ops that they become, and kernels like those of the operators for them, line
by line. Gates and norms along channels, too."""

import re
from collections import Counter
from dataclasses import replace

import pytest
import torch

from graphfuse.functional.layout import ALIGNMENT, Layout
from graphfuse.functional.operator import FUNCTIONS
from graphfuse.functional.problem import planned
from graphfuse.functional.tensor_parameter import used
from graphfuse.torch import RMSNorm  # noqa: F401  (its operators)
from graphfuse.torch.fusion import find as find_sites
from graphfuse.torch.fusion.meaning import value
from graphfuse.torch.regions import choose
from graphfuse.torch.regions.graphs import RegionGraphs
from graphfuse.torch.regions.program import Program, ProgramStep, RegionInput, Result
from graphfuse.torch.regions.spelled_norms import with_norms
from support.traces import FULL, given, recorded
from training import test_fusion_gates as gated
from training import test_fusion_match as spelled

pytestmark = pytest.mark.torch

HALF = torch.bfloat16


def regions(function, names, dtype):
    graph, _ = recorded(function, given(names, dtype), "aten")
    nodes = {node: 0 for node in graph.graph.nodes if node.op not in ("placeholder", "output")}
    return graph, choose.find(graph.graph, nodes)


def lines(variant, tensors):
    """Lines of the kernels of a function, factors of products in one order."""
    layouts, shapes, made = {}, {}, {}
    for a in used(variant.arguments, tensors):
        t = tensors.get(a.name)
        if t is None:
            dtype = a.new if isinstance(a.new, torch.dtype) else a.new(made)
            like = made.get(a.strides)
            t = torch.empty(a.shape(shapes)[0], device="meta") if like is None else torch.empty_like(like)
            t = t.to(dtype)
        shape = shapes[a.name] = tuple(t.shape)
        layouts[a.name] = Layout(t.dtype, a.types[t.dtype], shape, t.stride(), torch.device("cpu"), ALIGNMENT)
        made[a.name] = t
    _, planner = planned("a function", variant, layouts, "emulator")
    text = "\n".join(planner.at(0).sources)
    assert text, "no kernel"
    in_order = lambda m: " * ".join(sorted(m.groups()))  # noqa: E731
    return Counter(re.sub(r"([\w\[\]]+) \* ([\w\[\]]+)(?=\))", in_order, line) for line in text.splitlines())


ALIKE = [
    (spelled.llama, "xw", HALF),
    (spelled.llama, "xw", FULL),
    (spelled.once, "xw", HALF),
    (spelled.once, "xW", HALF),
    (spelled.gemma, "xw", HALF),
    (spelled.by_power, "xw", HALF),
    (spelled.by_root, "xw", HALF),
    (spelled.by_reciprocal, "xw", HALF),
    (spelled.centred, "xwb", HALF),
    (spelled.by_variance, "xwb", FULL),
    (spelled.by_both, "xwb", HALF),
    (spelled.by_both, "xwb", FULL),
    (lambda x, w, b: spelled.once(x, w) + b, "xwb", FULL),
    (lambda x, w, b: torch.nn.functional.layer_norm(x, (64,), w, b), "xwb", HALF),
    (spelled.summed(spelled.llama), "xrw", HALF),
    (spelled.summed(spelled.once), "xrw", HALF),
    (spelled.summed(spelled.gemma), "xrw", HALF),
    (spelled.summed(lambda t, w: torch.nn.functional.layer_norm(t, (64,), w)), "xrw", HALF),
    (lambda x, w: torch.nn.functional.silu(spelled.once(x, w)), "xw", FULL),
]


@pytest.mark.parametrize(("function", "names", "dtype"), ALIKE)
def test_the_kernel_is_that_of_the_operator(function, names, dtype):
    graph, (region,) = regions(function, names, dtype)
    site = find_sites(graph)[-1]
    operator = FUNCTIONS[f"graphfuse::{site.serving.name}"].variant({})
    graphs = RegionGraphs.of(region.program.text)
    inputs = {one.name: value(node) for one, node in zip(region.program.inputs, region.inputs, strict=True)}
    of_operator = lines(operator, {name: value(node) for name, node in site.tensors.items()})
    assert lines(graphs.inference, inputs) == of_operator
    norms = [step for step in region.program.steps if step.op in ("rmsnorm", "layernorm")]
    assert len(graphs.statistics) == sum(1 + (step.op == "layernorm") for step in norms)


GATED = [gated.rounded_then_gate, gated.gate_at_once, gated.zero_centred_gate, gated.of_gated]


@pytest.mark.parametrize("function", GATED)
def test_the_kernel_of_a_gated_norm_is_that_of_the_operator(function):
    test_the_kernel_is_that_of_the_operator(function, "xrw", HALF)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d], ids=str)
@pytest.mark.parametrize("function", [gated.by_hand, gated.in_full])
def test_kernels_along_channels_select_what_those_of_operators_clamp(function, layout):
    """That is one number a row: with torch's gradient where it is the limit."""
    graph, _ = recorded(function, (gated.video(HALF, layout), gated.scales(HALF, 1, 1, 1)), "aten")
    nodes = {node: 0 for node in graph.graph.nodes if node.op not in ("placeholder", "output")}
    (region,), (site,) = choose.find(graph.graph, nodes), find_sites(graph)
    tensors = {name: value(node) for name, node in site.tensors.items()}
    of_operator = {name: t.movedim(1, -1) if name == "x" else t.flatten() for name, t in tensors.items()}
    program = zip(region.program.inputs, region.inputs, region.orders, strict=False)
    inputs = {one.name: value(node).permute(order) for one, node, order in program}
    operator = FUNCTIONS[f"graphfuse::{site.serving.name}_rows"].variant({})
    got, want = lines(RegionGraphs.of(region.program.text).inference, inputs), lines(operator, of_operator)
    assert got.total() - want.total() in (3, 4)  # the fourth rounds behind the quotient
    assert any("gf::max(v2, s.s0)" in line for line in want - got)
    assert any(re.search("v2 <=? s.s0 [?] 1.0f : 0.0f", line) for line in got - want)  # by the version of torch


NOT_NORMS = [
    # Another number.
    (lambda x: x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) / 63 + 1e-5), "x"),
    (lambda x, r: r * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5), "xr"),
    (lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True)), "x"),
    (lambda x: x / torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5), "x"),
    (lambda x: torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) / x, "x"),
    (lambda x: (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 1e-5).sqrt(), "x"),
    # Numbers of its steps that somebody else reads, who would have them computed once more.
    (lambda x: (x * (r := torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)), r), "x"),
]


@pytest.mark.parametrize(("function", "names"), NOT_NORMS)
def test_what_is_none_keeps_its_steps(function, names):
    _, found = regions(function, names, FULL)
    assert not any(step.op in ("rmsnorm", "layernorm") for region in found for step in region.program.steps)


def test_a_sum_that_is_read_centred_is_an_rms_norm():
    """Of x less the mean of something else."""
    _, (region,) = regions(lambda x, r: spelled.once((x - r.mean(-1, keepdim=True)), torch.ones(())), "xr", FULL)
    assert [step.op for step in region.program.steps] == ["reduction", "sub", "rmsnorm"]


def test_truth_values_are_not_read_as_numbers():
    """And what rounds nothing is left out."""
    inputs = RegionInput("in0", "nn", "FLOAT"), RegionInput("in1", "nn", "BOOLEAN")
    steps = (
        ProgramStep("identity", {"input": "in1"}),
        ProgramStep("identity", {"input": "in0"}),
        ProgramStep("mul", {"a": "@1", "b": "@0"}),
        ProgramStep("reduction", {"input": "@2"}, {"mode": "MAX"}),
    )
    made = with_norms(Program(inputs, steps, (Result(3, "n1", "FLOAT"),)), 64)
    assert [step.op for step in made.steps] == ["identity", "mul", "reduction"]
    assert made.steps[1].inputs == {"a": "in0", "b": "@0"}


def test_a_weight_from_a_view_is_read_there():
    """What no step makes stands between no steps."""
    _, (region,) = regions(lambda x, w: spelled.llama(x.view(2, 3, 4, 16), w[:16]), "xw", HALF)
    assert [step.op for step in region.program.steps] == ["rmsnorm", "mul"]


def test_a_number_of_the_weight_is_no_weight():
    """It has no columns."""
    inputs = RegionInput("in0", "nn", "FLOAT"), RegionInput("in1", "-n", "FLOAT")
    steps = (
        ProgramStep("rmsnorm", {"input": "in0", "epsilon": 1e-5}, {"norm_forward_phase": "INFERENCE"}),
        ProgramStep("reduction", {"input": "in1"}, {"mode": "AVG"}),
        ProgramStep("mul", {"a": "@0", "b": "@1"}),
    )
    program = Program(inputs, steps, (Result(2, "nn", "FLOAT"),))
    assert with_norms(program, 64).steps == steps
    weighted = replace(program, steps=(*steps[:2], ProgramStep("mul", {"a": "@0", "b": "in1"})))
    assert [step.op for step in with_norms(weighted, 64).steps] == ["rmsnorm"]
