"""Norms in every spelling, as regions: the ops that they become, and kernels like those of the operators for them, line
by line, with gradients, too. Gates, groups of rows and norms along channels are held against graphs drawn by hand."""

import re
from collections import Counter
from dataclasses import replace

import pytest
import torch

from graphfuse.functional.layout import ALIGNMENT, Layout
from graphfuse.functional.operator import FUNCTIONS
from graphfuse.functional.problem import planned
from graphfuse.functional.tensor_parameter import complete
from graphfuse.torch import RMSNorm  # noqa: F401  (its operators)
from graphfuse.torch.regions import choose
from graphfuse.torch.regions.graphs import RegionGraphs
from graphfuse.torch.regions.norm_recognition import recognize_norms
from graphfuse.torch.regions.program import Program, ProgramStep, RegionInput, Result
from support.drawn_norms import GatedNorm, NormAddNorm, UnitNorm
from support.traces import FULL, given, recorded
from training import test_regions_gates as gated
from training import test_regions_spellings as spelled

pytestmark = pytest.mark.torch

HALF = torch.bfloat16


def region_of(function, tensors):
    """The only region of a function's graph, and the tensors that it reads, by name."""
    graph, _ = recorded(function, tensors, "aten")
    nodes = {node: 0 for node in graph.graph.nodes if node.op not in ("placeholder", "output")}
    (region,) = choose.find(graph.graph, nodes)
    read = zip(region.program.inputs, region.tensors, region.orders, strict=False)
    return region, {one.name: t.permute(order) for one, t, order in read}


def tensors_of(variant, given):
    """Tensors of a call that asks for all gradients."""
    return complete(variant.arguments, given | {a.asked: True for a in variant.arguments if a.asked})


def plan(variant, given):
    """The first plan of a function."""
    named, tensors = {a.name: a for a in variant.arguments}, tensors_of(variant, given)
    layouts = {}
    for name, t in tensors.items():
        stored = named[name].types[t.dtype]
        layouts[name] = Layout(t.dtype, stored, tuple(t.shape), t.stride(), torch.device("cpu"), ALIGNMENT)
    _, planner = planned("a function", variant, layouts, "emulator")
    return planner.at(0)


def source(variant, given):
    """Lines of the kernels of a function."""
    text = "\n".join(plan(variant, given).sources)
    assert text, "no kernel"
    return text.splitlines()


def computed(variant, given):
    """Names of the steps of a function's kernels, and how many of these round."""
    made = [step for part in plan(variant, given).parts for step in part.facts.program.steps]
    names = Counter(step.op_name for step in made if step.op_name != "identity")
    return names, sum(step.rounded is not None and not getattr(step, "exact", False) for step in made)


def in_order(line):
    """A line, factors of products in one order."""
    factors = lambda m: " * ".join(sorted(m.groups()))  # noqa: E731
    return re.sub(r"([\w\[\]]+) \* ([\w\[\]]+)(?=\))", factors, line)


def lines(variant, given):
    return Counter(map(in_order, source(variant, given)))


def steps(variant, given):
    """Lines without numbers of variables, lists of these in one order, and without where tensors start."""
    found = Counter()
    for line in source(variant, given):
        line = in_order(re.sub(r"\b([a-z])\d+", r"\1", line)).strip()
        if "gf::settled" not in line:
            found[" ".join(sorted(re.findall(r"\w+", line))) if line.count(",") > 2 else line] += 1
    return found


ALIKE = [
    (spelled.llama, "xw", HALF, "llama_rms_norm"),
    (spelled.llama, "xw", FULL, "rms_norm"),
    (spelled.once, "xw", HALF, "rms_norm"),
    (spelled.once, "xW", HALF, "rms_norm"),
    (spelled.gemma, "xw", HALF, "gemma_rms_norm"),
    (spelled.by_power, "xw", HALF, "rms_norm"),
    (spelled.by_root, "xw", HALF, "rms_norm"),
    (spelled.by_reciprocal, "xw", HALF, "rms_norm"),
    (spelled.centred, "xwb", HALF, "layer_norm_bias"),
    (spelled.by_variance, "xwb", FULL, "layer_norm_bias"),
    (spelled.by_both, "xwb", HALF, "layer_norm_bias"),
    (spelled.by_both, "xwb", FULL, "layer_norm_bias"),
    (lambda x, w, b: spelled.once(x, w) + b, "xwb", FULL, "rms_norm_bias"),
    (lambda x, w, b: torch.nn.functional.layer_norm(x, (64,), w, b), "xwb", HALF, "layer_norm_bias"),
    (spelled.summed(spelled.llama), "xrw", HALF, "llama_add_rms_norm"),
    (spelled.summed(spelled.once), "xrw", HALF, "add_rms_norm"),
    (spelled.summed(spelled.gemma), "xrw", HALF, "gemma_add_rms_norm"),
    (spelled.summed(lambda t, w: torch.nn.functional.layer_norm(t, (64,), w)), "xrw", HALF, "add_layer_norm"),
    (lambda x, w: torch.nn.functional.silu(spelled.once(x, w)), "xw", FULL, "rms_norm_silu"),
]


_PARAMETERS = {"x": "x", "r": "residual", "w": "weight", "W": "weight", "b": "bias"}
"""What operators call tensors of ``given``."""


def called_by(names, tensors):
    return dict(zip(map(_PARAMETERS.get, names), tensors, strict=True))


@pytest.mark.parametrize(("function", "names", "dtype", "operator"), ALIKE)
def test_the_kernel_is_that_of_the_operator(function, names, dtype, operator):
    tensors = given(names, dtype)
    held_against(function, tensors, called_by(names, tensors), operator)


def variants(operator):
    """Graphs of an operator, by its name, or of what is drawn by hand: inference, training, gradients."""
    if isinstance(operator, str):
        return [FUNCTIONS[f"graphfuse::{operator}{step}"].variant({}) for step in ("", "_training", "_backward")]
    return operator.inference, operator.training, operator.backward


def held_against(function, tensors, of_operator, operator):
    region, read = region_of(function, tensors)
    graphs = RegionGraphs.of(region.program.text)
    assert lines(graphs.inference, read) == lines(variants(operator)[0], of_operator)
    norms = [step for step in region.program.steps if step.op in ("rmsnorm", "layernorm")]
    assert len(graphs.statistics) == sum(1 + (step.op == "layernorm") for step in norms)


GATED = [
    (gated.rounded_then_gate, GatedNorm(rounded=True)),
    (gated.gate_at_once, GatedNorm(sigmoid=True)),
    (gated.zero_centred_gate, GatedNorm(zero_centred=True)),
    (gated.of_gated, GatedNorm(gate_first=True, rounded=True)),
    (gated.gated_groups, GatedNorm(gate_first=True, rounded=True)),
    (gated.weighted_groups, GatedNorm()),
]


def of_gate(function, tensors):
    """What the norm is given: of groups of rows these, and a weight for each."""
    if function in (gated.gated_groups, gated.weighted_groups):
        tensors = [t.view(*t.shape[:-1], 4, 16) for t in tensors]
    return dict(zip(("x", "gate", "weight"), tensors, strict=True))


@pytest.mark.parametrize(("function", "drawn"), GATED)
def test_the_kernel_of_a_gated_norm_is_as_drawn_by_hand(function, drawn):
    tensors = given("xrw", HALF)
    held_against(function, tensors, of_gate(function, tensors), drawn)


SIDES = [
    (gated.llama, NormAddNorm(rounded=True)),
    (gated.plain, NormAddNorm()),
    (gated.gemma, NormAddNorm(zero_centred=True)),
]


def on_both_sides(norm):
    def function(x, r, w, b):
        total = norm(x, w) + r
        return norm(total, b), total

    return function


def of_sides(tensors):
    return dict(zip(("x", "residual", "weight", "next_weight"), tensors, strict=True))


@pytest.mark.parametrize(("norm", "drawn"), SIDES)
def test_the_kernel_of_both_sides_of_a_sum_is_as_drawn_by_hand(norm, drawn):
    tensors = given("xrwb", HALF)
    held_against(on_both_sides(norm), tensors, of_sides(tensors), drawn)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d], ids=str)
@pytest.mark.parametrize(("function", "drawn"), [(gated.by_hand, UnitNorm(rounded=True)), (gated.in_full, UnitNorm())])
def test_kernels_along_channels_are_as_drawn_by_hand_but_for_the_limit(function, drawn, layout):
    """The limit is one number a row. A rounded length is selected, not clamped."""
    x, w = gated.video(HALF, layout), gated.scales(HALF, 1, 1, 1)
    region, read = region_of(function, (x, w))
    want = lines(drawn.inference, {"x": x.movedim(1, -1), "weight": w.flatten()})
    got = lines(RegionGraphs.of(region.program.text).inference, read)
    selected, clamped = "v2 <=? s.s0 [?] 1.0f : 0.0f", r"gf::max\(s.s0, v2\)"  # the first by the version of torch
    assert got.total() - want.total() in ((3, 4) if drawn.rounded else (0, 2, 3))
    assert any("gf::max(v2, s.s0)" in line for line in want - got)
    assert any(re.search(selected if drawn.rounded else f"{selected}|{clamped}", line) for line in got - want)


TRAINED = [
    (spelled.llama, "xw", HALF, "llama_rms_norm", 1),
    (spelled.llama, "xw", FULL, "rms_norm", 0),
    (spelled.once, "xw", HALF, "rms_norm", 0),
    (spelled.gemma, "xw", HALF, "gemma_rms_norm", 0),
    (lambda x, w: torch.nn.functional.layer_norm(x, (64,), w), "xw", HALF, "layer_norm", 0),
    (lambda x, w, b: torch.nn.functional.layer_norm(x, (64,), w, b), "xwb", FULL, "layer_norm_bias", 0),
    (spelled.summed(spelled.llama), "xrw", HALF, "llama_add_rms_norm", 1),
    (spelled.summed(spelled.once), "xrw", HALF, "add_rms_norm", 0),
    (spelled.summed(spelled.gemma), "xrw", HALF, "gemma_add_rms_norm", 0),
    (spelled.summed(lambda t, w: torch.nn.functional.layer_norm(t, (64,), w)), "xrw", HALF, "add_layer_norm", 0),
]


@pytest.mark.parametrize(("function", "names", "dtype", "operator", "roundings"), TRAINED)
def test_the_kernels_with_gradients_are_those_of_the_operator(function, names, dtype, operator, roundings):
    tensors = given(names, dtype)
    held_with_gradients(function, tensors, called_by(names, tensors), operator, roundings)


@pytest.mark.parametrize(("function", "drawn"), GATED)
def test_the_kernels_of_gated_norms_with_gradients_are_as_drawn_by_hand(function, drawn):
    tensors = given("xrw", HALF)
    roundings = drawn.rounded + (drawn.rounded and not drawn.gate_first)
    held_with_gradients(function, tensors, of_gate(function, tensors), drawn, roundings)


@pytest.mark.parametrize(("norm", "drawn"), SIDES)
def test_the_kernels_of_both_sides_with_gradients_are_as_drawn_by_hand(norm, drawn):
    tensors = given("xrwb", HALF)
    held_with_gradients(on_both_sides(norm), tensors, of_sides(tensors), drawn, 2 * drawn.rounded)


def held_with_gradients(function, tensors, of_operator, operator, roundings):
    """A region's kernel copies what it keeps of a row, and its gradients read what was rounded as it was rounded."""
    (forward, _, backward), (of_forward, _, of_backward), graphs = trained(function, tensors, of_operator, operator)
    kept = len(graphs.statistics)
    assert forward - of_forward == Counter({"float v;": kept, "v = v;": kept})
    assert not of_forward - forward
    (names, rounded), (of_names, of_rounded) = backward, of_backward
    assert names == of_names and rounded - of_rounded == roundings


def trained(function, tensors, of_operator, operator):
    """Lines of the kernels of the training forward and of all gradients, and what the latter compute: of the region,
    and of the operator."""
    region, read = region_of(function, tensors)
    graphs = RegionGraphs.of(region.program.text)
    own = variants(operator)[1:]
    found = []
    for (forward, backward), inputs in (((graphs.training, graphs.backward), read), (own, of_operator)):
        made = tensors_of(forward, inputs)
        known = {f"d{name}": t for name, t in made.items()} | made
        if "total" in made and "next_weight" not in made:  # what was normalized
            known["x"] = made["total"]
        asked = {a.name: known[a.name] for a in backward.arguments if not a.written}
        found.append((steps(forward, inputs), steps(backward, asked), computed(backward, asked)))
    return *found, graphs


def test_the_gradient_of_a_bias_has_its_type_at_once():
    """That of the operator is converted by autograd."""
    layer_norm = lambda x, w, b: torch.nn.functional.layer_norm(x, (64,), w, b)  # noqa: E731
    tensors = given("xwb", HALF)
    (_, got, _), (_, want, _), _ = trained(layer_norm, tensors, called_by("xwb", tensors), "layer_norm_bias")
    (wide,), (narrow,) = want - got, got - want
    assert "gf::encode<float>" in wide and "gf::encode<gf::bf16>" in narrow


def test_a_sum_that_is_read_centred_is_an_rms_norm():
    """Of x less the mean of something else."""
    function = lambda x, r: spelled.once((x - r.mean(-1, keepdim=True)), torch.ones(()))  # noqa: E731
    region, _ = region_of(function, given("xr", FULL))
    assert [step.op for step in region.program.steps] == ["reduction", "sub", "rmsnorm", "mul"]


def test_truth_values_are_not_read_as_numbers():
    """And what rounds nothing is left out."""
    inputs = RegionInput("in0", "nn", "FLOAT"), RegionInput("in1", "nn", "BOOLEAN")
    steps = (
        ProgramStep("identity", {"input": "in1"}),
        ProgramStep("identity", {"input": "in0"}),
        ProgramStep("mul", {"a": "@1", "b": "@0"}),
        ProgramStep("reduction", {"input": "@2"}, {"mode": "MAX"}),
    )
    made = recognize_norms(Program(inputs, steps, (Result(3, "n1", "FLOAT"),)), 64)
    assert [step.op for step in made.steps] == ["identity", "mul", "reduction"]
    assert made.steps[1].inputs == {"a": "in0", "b": "@0"}


def test_a_weight_from_a_view_is_read_there():
    """What no step makes stands between no steps."""
    region, _ = region_of(lambda x, w: spelled.llama(x.view(2, 3, 4, 16), w[:16]), given("xw", HALF))
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
    assert recognize_norms(program, 64).steps == steps
    weighted = replace(program, steps=(*steps[:2], ProgramStep("mul", {"a": "@0", "b": "in1"})))
    assert [step.op for step in recognize_norms(weighted, 64).steps] == ["rmsnorm"]
