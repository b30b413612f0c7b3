"""Every kernel variant on the emulator under sanitizers, in all schedules: nothing is found, and what comes
out is right.

AddressSanitizer and UndefinedBehaviorSanitizer see all variants, ThreadSanitizer those that
differ in how threads meet or in what they share.
"""

import ctypes
import dataclasses
import functools

import pytest
import torch

import emulation
import graphs
from graphfuse.device import EMULATOR
from graphfuse.dtypes import data_type
from graphfuse.emulator.compiler import Build
from graphfuse.engine import knobs_to_dict
from graphfuse.engines.rmsnorm import RmsNormEngine, RmsNormKnobs
from variants import VARIANTS, Variant

pytestmark = pytest.mark.emulate

SMALL = {name: v for name, v in VARIANTS.items() if v.small}


class Problem:
    """A variant with a number of rows: its tensors by name and by the number that the kernel's launch uses."""

    def __init__(self, variant: Variant, rows: int):
        self.case = dataclasses.replace(variant.problem, rows=rows)
        graph = self.case.graph("emulator")
        graph.validate()
        graph.build_operation_graph()
        self.graph = graph
        self.index = graph.create_execution_plan(variant.engine.name, knobs_to_dict(variant.knobs_on(EMULATOR)))
        plan = graph._planner.at(self.index)
        (self.part,) = plan.parts
        assert plan.workspace_bytes == 0
        self.inputs, self.outputs = self.case.inputs(), self.case.outputs()
        lowered = graph._planner.graph
        self.scalars = {t.id: t.value for t in lowered.tensors if t.value is not None}
        self.memory: dict[int, torch.Tensor] = {}
        for t in lowered.bound:
            value = (self.inputs | self.outputs)[t.name]
            if isinstance(value, torch.Tensor):
                self.memory[t.id] = value
            else:
                self.scalars[t.id] = value

    def run(self) -> None:
        """Through the public API, in this process."""
        self.graph.build_plan_at_index(self.index)
        self.graph.execute(self.inputs | self.outputs)

    def check(self, build: Build) -> dict[int, bytes]:
        part = self.part
        source = part.engine.source(part.facts, part.knobs)
        views = {t: _bytes(tensor) for t, tensor in self.memory.items()}
        return emulation.checked(source, part.engine.entry, part.launch, views, self.scalars, [build])

    def contents(self) -> dict[int, bytes]:
        return {t: ctypes.string_at(*emulation.extent(_bytes(tensor))) for t, tensor in self.memory.items()}


def _bytes(tensor: torch.Tensor):
    """The bytes from the first element of a tensor to the end of its last."""
    size = tensor.element_size()
    span = 1 + sum((e - 1) * s for e, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((span,), (1,)).view(torch.uint8).numpy()[: span * size]


@functools.cache
def rows_of(name: str) -> tuple[int, ...]:
    return VARIANTS[name].row_counts(EMULATOR)


def clean(problem: Problem, build: Build) -> None:
    """Nothing is found, and every byte is what a run without sanitizers leaves."""
    found = problem.check(build)
    problem.run()
    for number, content in problem.contents().items():
        assert found[number] == content, f"tensor {number}"


@pytest.mark.parametrize("name", SMALL)
def test_addresses(name):
    for rows in rows_of(name):
        problem = Problem(SMALL[name], rows)
        clean(problem, Build.ADDRESS)
        graphs.hold(problem.case, problem.inputs, problem.outputs)


# The knobs that spread rows over lanes, warps and CTAs; blocks, whose scales lanes agree on; the rest of the code once.
SHARING = [name for name in SMALL if " a row" in name or "blocks in" in name]
SHARING += ["three blocks", "nvfp4 rows apart", "odd columns", "scalars in half", "long e5m2"]


@pytest.mark.parametrize("name", SHARING)
def test_races(name):
    clean(Problem(SMALL[name], rows_of(name)[-1]), Build.RACE)


def all_knobs(variant: Variant) -> list[RmsNormKnobs]:
    """Every legal number of threads a row with every number of chunks, each with some size of a CTA, and every
    legal number of threads a row and a CTA, each with some number of chunks."""
    powers, facts = range(11), variant.facts()
    every = [RmsNormKnobs(1 << t, 1 << c, n) for t in powers for c in powers[5:] for n in (1, 2, 4)]
    found: dict[tuple, RmsNormKnobs] = {}
    for knobs in every:
        if RmsNormEngine().illegal(facts, knobs, EMULATOR) is None:
            found.setdefault((knobs.threads_per_row, "chunks", knobs.chunks), knobs)
            found.setdefault((knobs.threads_per_row, "threads", knobs.threads), knobs)
    return list(dict.fromkeys(found.values()))


KNOBS = {
    f"{columns} {output.name} {knobs.chunks} x {knobs.threads_per_row} of {knobs.threads}": (columns, output, knobs)
    for columns, output in ((992, data_type.BFLOAT16), (64, data_type.FP4_E2M1))
    for knobs in all_knobs(Variant(graphs.Norm(1, columns, output=output, blocks=output is data_type.FP4_E2M1)))
}


@pytest.mark.parametrize(("columns", "output", "knobs"), KNOBS.values(), ids=KNOBS)
def test_all_knobs(columns, output, knobs):
    case = graphs.Norm(5, columns, output=output, blocks=output is data_type.FP4_E2M1)
    clean(Problem(Variant(case, knobs), 5), Build.ADDRESS)


@pytest.mark.parametrize("build", [Build.ADDRESS, Build.RACE])
@pytest.mark.parametrize("columns", [1000, 40960])
def test_in_place(columns, build):
    variant = Variant(graphs.Norm(2, columns, graphs.FLOAT, output=graphs.FLOAT))
    apart, same = Problem(variant, 2), Problem(variant, 2)
    apart.run()
    program = same.part.facts.program
    x, out = program.inputs[0].tensor, program.stores[0].view.tensor
    same.memory[out] = same.memory[x]
    assert same.check(build)[out] == apart.contents()[out]
