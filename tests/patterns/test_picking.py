"""An element of each row, found by its column's number: what is read as one, values, memory that is written over."""

import itertools

import pytest
import torch

from graphfuse import GraphNotSupportedError, data_type, heur_mode, reduction_mode
from graphfuse.contract.engine import knobs_to_dict
from graphfuse.emulator.compiler import Build
from graphfuse.engines.rows.by_row import ByRowKnobs
from graphfuse.engines.rows.persistent import PersistentKnobs
from graphfuse.rows.steps import Pick, Reduce
from support import graphs
from support.emulation import Planned
from support.graphs import BF16, FLOAT

STRANGE = (0.0, -0.0, -1.0, 1.5, float("nan"), float("inf"), -float("inf"))
"""Numbers, of which two are a column's."""


class Written:
    """Rows and a number for each, by nodes. turned: the number compared with the column's instead."""

    def __init__(self, rows: int, columns: int, turned: bool = False, dtype=BF16):
        self.columns, self.rows, self.dtype = columns, rows, dtype
        self.g = graphs.new(device="emulator")
        self.x = self.g.tensor([rows, columns], data_type=dtype, name="x")
        self.n = self.g.tensor([rows, 1], data_type=FLOAT, name="n")
        number = self.g.gen_index(self.x, axis=1)
        self.mask = self.g.cmp_eq(self.n, number) if turned else self.g.cmp_eq(number, self.n)

    def total(self, value, otherwise=0.0):
        chosen = self.g.binary_select(value, otherwise, self.mask)
        return self.g.reduction(chosen, mode=reduction_mode.ADD).set_dim([self.rows, 1])

    def inputs(self) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(self.columns)
        x = torch.randn(self.rows, self.columns, generator=generator).to(
            torch.bfloat16 if self.dtype is BF16 else torch.float32
        )
        n = torch.randint(self.columns, (self.rows,), generator=generator).float()
        few = [*STRANGE, float(self.columns), float(self.columns - 1)][: self.rows]
        n[: len(few)] = torch.tensor(few)
        return {"x": x, "n": n[:, None]}

    def exact(self, pack: dict[str, torch.Tensor]) -> torch.Tensor:
        """One by one."""
        rows = zip(pack["x"].double().tolist(), pack["n"].flatten().tolist(), strict=True)
        return torch.tensor([[row[int(n)] if n in range(self.columns) else 0.0] for row, n in rows]).double()


def planned(problem: Written, output, knobs=None) -> Planned:
    output.set_output().set_name("out")
    problem.g.validate()
    out = torch.full(output.get_dim(), float("nan"))
    return Planned(problem.g, problem.inputs() | {"out": out}, knobs)


def steps(run: Planned, kind: type) -> int:
    return sum(isinstance(step, kind) for step in run.part.facts.program.steps)


KNOBS = {
    "heuristic": None,
    "part of a warp": ByRowKnobs(8, 64),
    "two CTAs": ByRowKnobs(128, 64),
    "copied ahead": PersistentKnobs(8, 64, 3, 1, 1),
}


@pytest.mark.some(1)
@pytest.mark.emulate
@pytest.mark.parametrize("turned", [False, True], ids=["", "turned"])
@pytest.mark.parametrize("knobs", KNOBS.values(), ids=KNOBS)
def test_an_element_by_its_number(knobs, turned):
    problem = Written(16, 21, turned)
    largest = problem.g.reduction(problem.x, mode=reduction_mode.MAX).set_dim([16, 1])
    run = planned(problem, problem.g.sub(problem.total(problem.x), largest).set_data_type(FLOAT), knobs)
    assert (steps(run, Pick), steps(run, Reduce)) == (1, 1)
    run.run()
    wanted = problem.exact(run.pack) - run.pack["x"].double().amax(1, keepdim=True)
    assert torch.equal(run.pack["out"], wanted.float())
    for build in (Build.ADDRESS, Build.RACE):
        assert run.check(build) == run.contents()


@pytest.mark.emulate
def test_nothing_else_of_a_row():
    """Without a reduction there is one phase."""
    problem = Written(16, 21)
    run = planned(problem, problem.total(problem.x).set_data_type(FLOAT))
    assert (steps(run, Pick), steps(run, Reduce)) == (1, 0)
    run.run()
    assert torch.equal(run.pack["out"].double(), problem.exact(run.pack))


@pytest.mark.emulate
def test_an_element_that_is_worked_out():
    """Of what is read, and of what is known of the row; zeros would not make a zero."""
    problem = Written(16, 21)
    g, largest = problem.g, problem.g.reduction(problem.x, mode=reduction_mode.MAX).set_dim([16, 1])
    value = g.add(g.mul(problem.x, largest), 1.0)
    run = planned(problem, problem.total(g.mul(value, value)).set_data_type(FLOAT))
    assert (steps(run, Pick), steps(run, Reduce)) == (1, 1)
    run.run()
    x = run.pack["x"].float()
    value = x * x.amax(1, keepdim=True) + 1.0
    assert torch.equal(run.pack["out"], problem.exact(run.pack | {"x": value * value}).float())
    assert run.check(Build.ADDRESS) == run.contents()


@pytest.mark.parametrize(
    "draw",
    [
        lambda p: p.total(p.g.mul(p.x, p.g.gen_index(p.x, axis=1))),
        lambda p: p.total(p.x, 1.0),
        lambda p: p.g.reduction(p.g.binary_select(p.x, 0.0, p.mask), mode=reduction_mode.MAX).set_dim([p.rows, 1]),
        lambda p: p.g.reduction(p.g.binary_select(p.n, 0.0, p.mask), mode=reduction_mode.ADD).set_dim([p.rows, 1]),
    ],
    ids=["made of numbers", "another number", "the largest", "one a row"],
)
def test_other_sums_stay_sums(draw):
    problem = Written(8, 24)
    run = planned(problem, draw(problem).set_data_type(FLOAT))
    assert (steps(run, Pick), steps(run, Reduce)) == (0, 1)


def test_what_is_rounded_before_stays_a_sum():
    problem = Written(8, 24, dtype=FLOAT)
    g = problem.g = graphs.new(device="emulator", intermediate_rounding="declared")
    x, n = g.tensor([8, 24], data_type=FLOAT, name="x"), g.tensor([8, 1], data_type=FLOAT, name="n")
    chosen = g.binary_select(x, 0.0, g.cmp_eq(g.gen_index(x, axis=1), n)).set_data_type(data_type.BFLOAT16)
    run = planned(problem, g.reduction(chosen, mode=reduction_mode.ADD).set_dim([8, 1]).set_data_type(FLOAT))
    assert steps(run, Pick) == 0


@pytest.mark.emulate
@pytest.mark.parametrize("columns, early", itertools.product([96, 40000], [False, True]))
def test_rows_are_written_over_once_all_threads_have_read_the_element(columns, early):
    """early: the output needs no reduction, so that one thread may have written what another is yet to read."""
    problem = Written(5, columns, dtype=FLOAT)
    g = problem.g
    y = g.sub(problem.x, problem.total(problem.x))
    if not early:
        y = g.sub(y, g.reduction(problem.x, mode=reduction_mode.MAX).set_dim([5, 1]))
    output = y.set_data_type(FLOAT)
    run = planned(problem, output)
    assert steps(run, Pick) == 1
    ids = {t.name: t.id for t in run.part.region.subgraph.graph.tensors}
    pairs = run.part.engine.in_place(run.part.facts, run.part.knobs)
    assert ((ids["x"], ids["out"]) in pairs) is not early
    if not early:
        wanted = problem.inputs()["x"].double()
        wanted = wanted - problem.exact(run.pack) - wanted.amax(1, keepdim=True)
        run.pack["out"] = run.pack["x"]
        run.run()
        torch.testing.assert_close(run.pack["out"].double(), wanted, rtol=1e-5, atol=1e-6)


def test_ctas_stay_for_rows_that_are_reduced_alone():
    problem = Written(16, 32)
    problem.total(problem.x).set_output().set_data_type(FLOAT)
    problem.g.validate()
    problem.g.build_operation_graph()
    problem.g.create_execution_plans([heur_mode.B])
    plans = range(problem.g.get_execution_plan_count())
    assert not any("stages" in problem.g.get_plan_name_at_index(index) for index in plans)
    with pytest.raises(GraphNotSupportedError, match="rows that are not reduced; accepted: rows that are reduced"):
        problem.g.create_execution_plan("rows", knobs_to_dict(PersistentKnobs(8, 64, 3, 1, 1)))


def test_an_element_of_many_steps():
    """More than Python calls itself."""
    problem = Written(4, 9)
    value = problem.x
    for _ in range(600):
        value = problem.g.add(value, 1e-3)
    assert steps(planned(problem, problem.total(value).set_data_type(FLOAT)), Pick) == 1
