"""Which outputs may lie where an input does: whatever the knobs, and with the bytes of outputs kept apart."""

import re
from dataclasses import dataclass

import pytest
import torch

from graphfuse import norm_forward_phase, pygraph
from graphfuse.base.device import EMULATOR, for_arch
from graphfuse.base.enums import heur_mode
from graphfuse.emulator.compiler import Build
from graphfuse.engines.rows.by_row import ByRow, ByRowKnobs
from graphfuse.engines.rows.persistent import Persistent, PersistentKnobs
from graphfuse.planning.plan import Part
from support import graphs
from support.emulation import Planned
from support.gradients import Gradient
from support.graphs import BF16
from support.rows import Case


@dataclass(frozen=True)
class Calls:
    """A graph and the (input, output) pairs by name that may be one memory."""

    case: Case | Gradient
    pairs: frozenset[tuple[str, str]]

    def __str__(self) -> str:
        return f"{type(self.case).__name__} {self.case}"


def calls(case: Case | Gradient, *pairs: str) -> Calls:
    return Calls(case, frozenset(tuple(pair.split(" = ")) for pair in pairs))


def added(end: str, extras: str = "some", columns: int = 49152, activation: str = "none") -> Case:
    return Case(True, "plain", activation, end, extras, rows=2, columns=columns)


class Unrounded(Case):
    """The norm of the sum as it is before it is stored, as `functional.fused_add_rmsnorm` has it."""

    def graph(self, device: str) -> pygraph:
        g, shape = graphs.new(device=device), [self.rows, self.columns]
        x, residual = (g.tensor(shape, data_type=BF16, name=name) for name in ("x", "residual"))
        total, weight = g.add(x, residual), g.tensor([1, self.columns], data_type=BF16, name="weight")
        g.identity(total).set_output().set_name("sum").set_data_type(BF16)
        y = g.rmsnorm(total, weight, 1e-5, norm_forward_phase=norm_forward_phase.INFERENCE)[0]
        y.set_output().set_name("out").set_data_type(BF16)
        return g


OVER_SUM = ("x = sum", "residual = sum")
OVER_OUT = ("x = out", "residual = out")
LONG = (
    calls(added("bf16"), *OVER_SUM, *OVER_OUT),
    calls(added("bf16", columns=49160), *OVER_SUM, *OVER_OUT),
    calls(added("fp8"), *OVER_SUM),
    calls(added("fp8 per row"), *OVER_SUM),
    calls(added("nvfp4"), *OVER_SUM),
    calls(added("bf16", "all"), *OVER_SUM, *OVER_OUT, "x = normal", "residual = normal"),
    # What the sum may not overwrite: a gate that is read behind the norm.
    calls(added("bf16", activation="gate"), *OVER_SUM, *OVER_OUT, "gate = out"),
    calls(Unrounded(True, "plain", "none", "bf16", "some", rows=2, columns=24576), *OVER_SUM, *OVER_OUT),
)
LONG_BACKWARD = (
    calls(Gradient(2, 24576, activation="silu", residual=True), "x = dx", "grad = dx", "residual = dx"),
    calls(Gradient(2, 24576, activation="gate"), "x = dx", "grad = dx", "gate = dx", "grad = dgate", "gate = dgate"),
)
READ_AGAIN = ByRowKnobs(1024, 1024)
READ_AGAIN_BACKWARD = PersistentKnobs(512, 512, 1, 1, 2)


def planned(case: Case | Gradient, knobs: object) -> Planned:
    return Planned(case.graph("emulator"), case.inputs() | case.outputs(), knobs)


def part_of(case: Case | Gradient) -> Part:
    graph = case.graph("emulator")
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([heur_mode.OPENSOURCE])
    (part,) = graph._planner.plans[0].parts
    return part


def phases(source: str, what: str) -> dict[int, set[int]]:
    """By the number of a tensor, the phases whose text holds it. what: how it is written, a number in parentheses."""
    found: dict[int, set[int]] = {}
    for number, text in re.findall(r"struct Phase<(\d)> \{(.*?)\n\};", source, re.DOTALL):
        for tensor in re.findall(what, text):
            found.setdefault(int(tensor), set()).add(int(number))
    return found


@pytest.mark.parametrize("given", LONG + LONG_BACKWARD, ids=str)
def test_knobs_do_not_decide_what_may_be_one_memory(given):
    """The pairs are the same for all knobs, and no kernel reads an input in a later phase than it may overwrite it."""
    part, resident = part_of(given.case), set()
    facts, engine = part.facts, part.engine
    names = {t.id: t.name for t in part.region.subgraph.graph.tensors}
    schedule = ByRow() if isinstance(given.case, Case) else Persistent()
    for device in (EMULATOR, for_arch("sm_80"), for_arch("sm_120")):
        legal = schedule.legal(facts, device)
        texts: set[str] = set()
        for knobs in legal:
            pairs = engine.in_place(facts, knobs)
            assert {(names[i], names[o]) for i, o in pairs} == given.pairs, knobs
            texts.add(engine.source(facts, knobs))
        inputs = [view.tensor for view in facts.program.inputs]
        outputs = [store.view.tensor for store in facts.program.stores]
        for text in texts:
            reads, writes = phases(text, r"row\.i(\d)\b"), phases(text, r"gf::store_piece<[^(]*>\(row\.o(\d)")
            resident.add(int(re.search(r"int PASSES = (\d+)", text)[1]) == 1)
            for i, o in pairs:
                assert max(reads[inputs.index(i)]) <= min(writes[outputs.index(o)]), (names[i], names[o], text)
    assert resident == {True, False}  # both kinds of kernels were looked at


IN_PLACE = {
    f"{given} {over}": (given.case, over)
    for given, over in [
        *((given, {"sum": "residual", "out": "x"}) for given in LONG[:2]),
        *((given, {"sum": "residual"}) for given in LONG[2:5]),
        (LONG[6], {"sum": "x", "out": "residual"}),
        (LONG[6], {"sum": "residual", "out": "gate"}),
        (LONG[7], {"sum": "residual", "out": "x"}),
        (LONG_BACKWARD[0], {"dx": "x"}),
        (LONG_BACKWARD[1], {"dx": "x", "dgate": "gate"}),
        (LONG_BACKWARD[1], {"dx": "gate", "dgate": "grad"}),
    ]
}


def overwriting(case: Case | Gradient, knobs: object, over: dict[str, str]) -> Planned:
    problem = planned(case, knobs)
    problem.pack |= {output: problem.pack[name] for output, name in over.items()}
    return problem


@pytest.mark.some(5)
@pytest.mark.emulate
@pytest.mark.parametrize(("case", "over"), IN_PLACE.values(), ids=IN_PLACE)
def test_long_rows_in_place(case, over):
    """Rows that are read again in each phase leave the bytes that they leave in memory of its own."""
    knobs = READ_AGAIN if isinstance(case, Case) else READ_AGAIN_BACKWARD
    apart, same = planned(case, knobs), overwriting(case, knobs, over)
    assert not re.search(r"int PASSES = 1;", apart.source)
    apart.run()
    same.run()
    found, wanted = same.contents(), apart.contents()
    for name in case.outputs():
        assert found[name] == wanted[name], name
    if isinstance(case, Gradient):
        case.hold(apart.pack, {name: apart.pack[name] for name in case.outputs()})
    elif "sum" in over:
        assert torch.equal(apart.pack["sum"], (apart.pack["x"].float() + apart.pack["residual"].float()).bfloat16())


@pytest.mark.some(1)
@pytest.mark.emulate
@pytest.mark.parametrize("build", [Build.ADDRESS, Build.RACE])
def test_long_rows_in_place_in_every_order_of_threads(build):
    case, over = LONG[7].case, {"sum": "residual", "out": "x"}
    apart = planned(case, READ_AGAIN)
    apart.run()
    found, wanted = overwriting(case, READ_AGAIN, over).check(build), apart.contents()
    assert all(found[name] == wanted[name] for name in over)


@pytest.mark.emulate
def test_rows_too_long_for_registers_in_place():
    """One CTA reads them again in each phase."""
    case = Unrounded(True, "plain", "none", "bf16", "some", rows=1, columns=400_000)
    knobs = ByRowKnobs(1024, 1024)
    apart, same = planned(case, knobs), overwriting(case, knobs, {"sum": "residual", "out": "x"})
    assert any("read again" in note for note in apart.part.engine.notes(apart.part.facts, apart.part.knobs, EMULATOR))
    apart.run()
    same.run()
    assert all(same.contents()[name] == apart.contents()[name] for name in ("sum", "out"))
