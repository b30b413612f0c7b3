"""Every op with an expansion against float64: the expansion computed in torch, and the kernels made from it."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import combinations, product

import pytest
import torch

from graphfuse.base.dtypes import data_type
from graphfuse.op_graph.freeze import freeze
from graphfuse.ops import EXPANSIONS, OPS, Join, torch_expansion
from graphfuse.patterns.computing import Expanding
from graphfuse.patterns.roles import ROLES
from graphfuse.testing.reference import evaluated
from support import graphs, row_ops
from support.emulation import Planned
from support.graphs import FLOAT
from support.row_ops import BETWEEN, INPUTS, NAMES, OUTPUTS, SHAPES, Problem


@cache
def outputs_of(name: str) -> tuple[data_type, ...]:
    """The types of an op's first output that kernels write: no FP8 of which there is one a row."""
    problem = Problem(name)
    first, _ = next(iter(problem.exact(problem.inputs()).values()))
    return OUTPUTS if first.shape[-1] > 1 else tuple(t for t in OUTPUTS if t.bits > 8)


def problems(name: str, kernels: bool) -> Iterator[Problem]:
    """The reference in every type of input, of output and rounding; kernels in a few of these, so that over the table
    any two choices meet."""
    if not kernels:
        for number, (x, y, between) in enumerate(product(INPUTS, OUTPUTS, BETWEEN)):
            shape = (2, 3, 24) if number % 2 else (1, 1, 1) if number % 5 == 0 else (3, 2, 7)
            yield Problem(name, x, INPUTS[number % 3], y, between, shape, number)
        return
    outputs = outputs_of(name)
    n = [other for other in NAMES if outputs_of(other) == outputs].index(name)
    for k, x in enumerate(INPUTS):
        weight, y, between = INPUTS[(k + n // 2) % 3], outputs[(k + n) % len(outputs)], BETWEEN[(k + n // 3) % 3]
        yield Problem(name, x, weight, y, between, SHAPES[(k + n // 5) % 3], k)


def run(problem: Problem, kernels: bool) -> None:
    pack = problem.inputs()
    exact = problem.exact(pack)
    outputs = problem.outputs(exact)
    if kernels:
        Planned(problem.graph("emulator"), pack | outputs).run()
    else:
        graphs.run(problem.graph(), pack | outputs)
    problem.hold(exact, outputs)


KERNELS = [pytest.param(False, id="reference"), pytest.param(True, id="kernel", marks=pytest.mark.emulate)]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", NAMES)
def test_an_op_of_rows(name, kernels):
    row_ops.of(name)
    for problem in problems(name, kernels):
        run(problem, kernels)


def test_what_kernels_are_tried_with_meets():
    tried = [p for name in NAMES for p in problems(name, True)]
    for a, b in combinations(("input", "weight", "output", "between", "shape"), 2):
        met = {(getattr(p, a), getattr(p, b)) for p in tried}
        assert len(met) == len({x for x, _ in met}) * len({y for _, y in met}), (a, b)


@pytest.mark.parametrize("name", NAMES)
def test_in_float64_nothing_is_rounded_to_float32(name):
    """Neither are numbers that an expansion has."""
    problem = Problem(name, FLOAT, FLOAT, FLOAT, None, (1, 3, 24), 1)
    pack, graph = {port: t.double() for port, t in problem.inputs().items()}, freeze(problem.graph())
    pack |= row_ops.of(name).given(pack)
    read = (t for t in graph.tensors if t.id not in graph.producer)
    given = {t.id: pack[t.name] if t.name in pack else torch.full(t.dim, t.value, dtype=torch.float64) for t in read}
    made = evaluated(torch, graph, given, wide=True)
    for port, (value, size) in problem.exact(pack).items():
        (t,) = (t.id for t in graph.tensors if t.name == f"made {port}")
        assert ((made[t] - value).abs() <= 1e-14 * size).all(), port


def without_root(e, x, a):
    mean = e.op("fma", a=e.reduce(Join.SUM, e.op("mul", a=x["input"], b=x["input"])), b=1.0 / e.columns, c=x["epsilon"])
    inverse = e.op("reciprocal", input=mean)
    y = e.op("mul", a=e.op("mul", a=x["input"], b=inverse), b=x["scale"])
    return {"inv_variance": inverse, "Y": e.op("add", a=y, b=x["bias"])}


def epsilon_outside(e, x, a):
    mean = e.op("mul", a=e.reduce(Join.SUM, e.op("mul", a=x["input"], b=x["input"])), b=1.0 / e.columns)
    inverse = e.op("reciprocal", input=e.op("add", a=e.op("sqrt", input=mean), b=x["epsilon"]))
    y = e.op("mul", a=e.op("mul", a=x["input"], b=inverse), b=x["scale"])
    return {"inv_variance": inverse, "Y": e.op("add", a=y, b=x["bias"])}


def without_largest(e, x, a):
    powers = e.op("exp", input=x["input"])
    return {"output": e.op("mul", a=powers, b=e.op("reciprocal", input=e.reduce(Join.SUM, powers)))}


def of_squares(e, x, a, right=EXPANSIONS["layernorm"].of):
    """The variance as the mean of squares, the mean not subtracted."""
    squares = e.mean(e.op("mul", a=x["input"], b=x["input"]))
    inverse = e.op("rsqrt", input=e.op("add", a=squares, b=x["epsilon"]))
    return {**right(e, x, a), "inv_variance": inverse}


def product_of_signs(e, x, a):
    total = e.reduce(Join.SUM, x["grad"])
    return {"DX": e.op("add", a=x["grad"], b=e.op("mul", a=e.op("exp", input=x["output"]), b=total))}


PLANTED = {
    "the root is left out": ("rmsnorm", without_root),
    "epsilon is added to the root": ("rmsnorm", epsilon_outside),
    "the largest is not subtracted": ("softmax", without_largest),
    "the mean is not subtracted": ("layernorm", of_squares),
    "a sign is another": ("log_softmax_backward", product_of_signs),
}


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("planted", PLANTED)
def test_a_wrong_expansion_is_found(monkeypatch, planted, kernels):
    name, wrong = PLANTED[planted]
    expansion = replace(EXPANSIONS[name], of=wrong)
    if kernels:
        monkeypatch.setitem(ROLES, name, Expanding(expansion))
    else:
        op = replace(OPS[name], expansion=expansion)
        monkeypatch.setitem(
            OPS, name, replace(op, reference=lambda t, x, a: torch_expansion.expanded(OPS, op, t, x, a))
        )
    with pytest.raises(AssertionError, match="is off in"):
        for problem in problems(name, kernels):
            run(problem, kernels)


def test_an_op_without_an_entry_says_what_to_add(monkeypatch):
    monkeypatch.delitem(row_ops.ROW_OPS, "softmax")
    with pytest.raises(AssertionError, match=r"op 'softmax' has an expansion, and no entry in ROW_OPS of tests/"):
        test_an_op_of_rows("softmax", False)
