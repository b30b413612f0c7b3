"""A norm, a residual sum and a norm of that: one kernel, its values, what it holds, when it is two after all."""

import io
from dataclasses import dataclass

import pytest
import torch

from graphfuse import heur_mode, norm_forward_phase, reduction_mode
from graphfuse.base.device import for_arch
from graphfuse.contract.engine import No
from graphfuse.emulator.compiler import Build
from graphfuse.engines.rows import RowEngine
from graphfuse.engines.rows.by_row import ByRowKnobs
from graphfuse.engines.rows.by_row.split import ByRowSplit
from graphfuse.op_graph.freeze import freeze
from graphfuse.op_graph.lower import lower
from graphfuse.planning import plan
from graphfuse.planning import registry as plugins
from graphfuse.rows.steps import Chain, Join, Load
from graphfuse.runtime import nvrtc
from support import cubin, graphs, oracle
from support.emulation import Planned
from support.graphs import BF16, E4M3, FLOAT, TORCH

EPS = 1e-5
PHASE = norm_forward_phase.INFERENCE
H200 = for_arch("sm_90a")


@dataclass(frozen=True)
class Sandwich:
    """output: the type of what comes last. total: of the sum, None where it is no output. between: of the first norm,
    where the graph declares that to be rounded."""

    output: object = BF16
    total: object = BF16
    between: object = None

    def graph(self, rows: int, columns: int, device: str = "emulator"):
        types = {"intermediate_rounding": "declared", "intermediate_data_type": FLOAT}
        g = graphs.new(device=device, **types)
        x, residual = (g.tensor([rows, columns], data_type=BF16, name=name) for name in ("x", "residual"))
        before, after = (g.tensor([1, columns], data_type=BF16, name=name) for name in ("before", "after"))
        first = g.rmsnorm(x, before, EPS, norm_forward_phase=PHASE)[0]
        if self.between is not None:
            first.set_data_type(self.between)
        total = g.add(first, residual)
        if self.total is not None:
            total.set_output().set_name("sum").set_data_type(self.total)
        y = g.rmsnorm(total, after, EPS, norm_forward_phase=PHASE)[0]
        y.set_output().set_name("y").set_data_type(self.output)
        g.validate()
        return g

    def pack(self, rows: int, columns: int) -> dict[str, torch.Tensor]:
        source = graphs.generator("cpu", columns)
        shapes = {"x": rows, "residual": rows, "before": 1, "after": 1}
        pack = {name: torch.randn(r, columns, generator=source).bfloat16() for name, r in shapes.items()}
        outputs = {"y": self.output} | ({"sum": self.total} if self.total is not None else {})
        return pack | {name: torch.zeros(rows, columns).to(TORCH[dtype]) for name, dtype in outputs.items()}

    def hold(self, pack: dict[str, torch.Tensor]) -> None:
        """Results against float64, each from what was stored before it."""
        first = oracle.rmsnorm(pack["x"], pack["before"], EPS)[0]
        if self.between is not None:
            first = oracle.rounded(first, TORCH[self.between]).double()
        total = first + pack["residual"].double()
        if self.total is not None:
            assert near(pack["sum"], total, 2**-7 * first.abs() if self.between is not None else 0)
            total = pack["sum"].double()
        exact = oracle.rmsnorm(total, pack["after"], EPS)[0]
        # A value between that was rounded the other way is nowhere to be seen where the sum is no output.
        assert near(pack["y"], exact, 2**-6 if self.between is not None and self.total is None else 0)


def near(found: torch.Tensor, exact: torch.Tensor, more) -> bool:
    """One rounding of the exact value, but for float32 sums. more: beside that."""
    step = {torch.float32: 2**-20, torch.bfloat16: 2**-8, torch.float8_e4m3fn: 2**-4}[found.dtype]
    subnormal = 2**-10 if found.dtype is torch.float8_e4m3fn else 0
    error = (found.double() - exact).abs()
    return bool((error <= step * (1 + 2**-6) * exact.abs() + subnormal + 2**-17 + more).all())


KINDS = {
    "stored sum": Sandwich(),
    "sum between": Sandwich(total=None),
    "float sum": Sandwich(FLOAT, FLOAT),
    "to fp8": Sandwich(E4M3),
    "rounded between": Sandwich(FLOAT, FLOAT, BF16),
    "all rounded": Sandwich(BF16, BF16, BF16),
    "rounded between alone": Sandwich(BF16, None, BF16),
}


@pytest.mark.emulate
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows, columns", [(1, 64), (7, 1000), (4, 33)])
def test_values(kind, rows, columns):
    case = KINDS[kind]
    graph, pack = case.graph(rows, columns), case.pack(rows, columns)
    planned = Planned(graph, pack)
    assert planned.part.facts.program.last == 2
    planned.run()
    case.hold(pack)


@pytest.mark.emulate
@pytest.mark.parametrize("kind", ["stored sum", "float sum"])
def test_rows_that_are_read_again(kind):
    case, rows, columns = KINDS[kind], 2, 65536
    graph, pack = case.graph(rows, columns), case.pack(rows, columns)
    planned = Planned(graph, pack, ByRowKnobs(1024, 1024))
    assert not ByRowSplit.of(planned.part.facts).resident(planned.part.knobs)
    planned.run()
    case.hold(pack)


@pytest.mark.emulate
@pytest.mark.parametrize("knobs", [None, ByRowKnobs(1024, 1024)], ids=["held", "read again"])
@pytest.mark.parametrize("onto", [{"sum": "residual", "y": "x"}, {"sum": "x", "y": "residual"}], ids=str)
def test_outputs_take_the_place_of_inputs(onto, knobs):
    case, size = Sandwich(), (2, 65536 if knobs else 200)
    wanted, pack = case.pack(*size), case.pack(*size)
    Planned(case.graph(*size), wanted, knobs).run()
    pack |= {out: pack[given] for out, given in onto.items()}
    Planned(case.graph(*size), pack, knobs).run()
    assert all(torch.equal(pack[out], wanted[out]) for out in onto)


SPREAD = {
    "part of a warp": ByRowKnobs(8, 64),
    "a warp, two chunks": ByRowKnobs(32, 64, 2),
    "warps": ByRowKnobs(128, 128),
    "all read before": ByRowKnobs(128, 128, 1, 0, 1),
    "two CTAs": ByRowKnobs(128, 64),
    "four CTAs": ByRowKnobs(256, 64),
}


class OneNorm(RowEngine):
    """Takes kernels of one sum over a row."""

    name = "one-norm"

    def why_not(self, facts, device):
        several = len(facts.program.reductions(Join.SUM)) > 1
        return No("several sums over a row") if several else super().why_not(facts, device)


@pytest.mark.some(1)
@pytest.mark.emulate
@pytest.mark.parametrize("kind", ["stored sum", "sum between"])
def test_two_kernels_where_no_engine_takes_one_and_knobs_do_not_decide_a_bit(kind):
    case = KINDS[kind]
    pack, found = case.pack(3, 208), set()
    for knobs in SPREAD.values():
        Planned(case.graph(3, 208), pack, knobs).run()
        found.add(contents(pack))
    graph, pack = case.graph(3, 208), case.pack(3, 208)
    graph.build([heur_mode.OPENSOURCE], engines=[OneNorm(), "reference"])
    parts = graph._plan(0).parts
    # The sum is the first one's: what the second reads of it is in memory in any case.
    assert [[n.op_name for n in part.region.subgraph.nodes] for part in parts] == [["rmsnorm", "add"], ["rmsnorm"]]
    graph.execute(pack, graphs.workspace(graph.get_workspace_size()))
    assert found == {contents(pack)}


def contents(pack: dict[str, torch.Tensor]) -> bytes:
    outputs = (pack[name] for name in ("sum", "y") if name in pack)
    return b"".join(t.view(torch.uint8).numpy().tobytes() for t in outputs)


@pytest.mark.emulate
@pytest.mark.parametrize("build", [Build.ADDRESS, Build.RACE], ids=lambda build: build.name)
@pytest.mark.parametrize("knobs", ["part of a warp", "all read before", "two CTAs"])
def test_under_sanitizers_in_all_schedules(knobs, build):
    case = Sandwich()
    pack = case.pack(5, 208)
    planned = Planned(case.graph(5, 208), pack, SPREAD[knobs])
    found = planned.check(build)
    planned.run()
    assert found["y"] == planned.contents()["y"] and found["sum"] == planned.contents()["sum"]


def proposed(case: Sandwich, rows: int, columns: int):
    """The parts of the best plans for an H200."""
    lowered, known = lower(freeze(case.graph(rows, columns))), plugins.installed()
    plans = plan.propose(lowered, plan.matches(lowered, known)[0], known.engines, H200, heur_mode.OPENSOURCE).plans
    return [part for made in plans for part in made.parts]


def test_what_is_held_of_a_row_is_what_was_read_and_then_the_sum_as_it_is_rounded():
    (part, *_) = proposed(Sandwich(), 4096, 5376)
    made, program = ByRowSplit.of(part.facts).plan(part.knobs), part.facts.program
    (total,) = (Chain(k) for k, step in enumerate(program.steps) if step.op_name == "add")
    assert [view.name for view in program.inputs] == ["x", "before", "residual", "after"]
    assert made.kept == ((), (Load(0),), (total,)) and made.held_bytes == 2
    assert [made.reads(phase, rows=True) for phase in made.phases] == [(0,), (2,), ()]
    assert [[s.view.name for _, s in program.stored_in(p)] for p in made.phases] == [[], ["sum"], ["y"]]
    (part, *_) = proposed(KINDS["sum between"], 4096, 5376)
    assert ByRowSplit.of(part.facts).plan(part.knobs).held_bytes == 4  # the sum, unrounded


@pytest.mark.some(1)
@pytest.mark.compile
@pytest.mark.parametrize("kind", ["stored sum", "sum between", "to fp8"])
@pytest.mark.parametrize("columns", [2560, 5376])
def test_all_it_needs_is_in_registers(kind, columns):
    sources = {}
    for rows in (16, 4096, 16384):
        parts = proposed(KINDS[kind], rows, columns)
        assert all(len(part.region.subgraph.nodes) == 3 for part in parts)
        sources |= {part.engine.source(part.facts, part.knobs): part.knobs for part in parts}
    for source, knobs in sources.items():
        log = io.StringIO()
        used = cubin.usage(nvrtc.compile(source, "sm_90a", "by_row.cu", log))
        assert used["STACK"] == used["LOCAL"] == 0 and not log.getvalue().strip("\0 \n"), (knobs, used)


@pytest.mark.emulate
def test_two_norms_of_one_sum_are_one_kernel():
    """It is read once, and normalized with two weights."""
    g = graphs.new(device="emulator")
    x, residual = (g.tensor([5, 96], data_type=BF16, name=name) for name in ("x", "residual"))
    total, pack = g.add(x, residual), {}
    for name in "ab":
        weight = g.tensor([1, 96], data_type=BF16, name=f"{name}_weight")
        g.rmsnorm(total, weight, EPS, norm_forward_phase=PHASE)[0].set_output().set_name(name)
        pack |= {name: torch.empty(5, 96), weight.get_name(): torch.randn(1, 96).bfloat16()}
    pack |= {name: torch.randn(5, 96).bfloat16() for name in ("x", "residual")}
    Planned(g, pack).run()
    for name in "ab":
        exact = oracle.rmsnorm(pack["x"].double() + pack["residual"].double(), pack[f"{name}_weight"], EPS)[0]
        torch.testing.assert_close(pack[name].double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.emulate
def test_a_norm_that_is_one_node_and_one_that_is_many_are_one_kernel():
    g = graphs.new(device="emulator")
    y = g.layernorm(g.tensor([5, 96], data_type=BF16, name="x"), None, None, EPS, norm_forward_phase=PHASE)[0]
    y = g.rmsnorm(g.exp(y), epsilon=EPS, norm_forward_phase=PHASE)[0]
    g.div(y, g.reduction(y, mode=reduction_mode.MAX).set_dim([5, 1])).set_output().set_name("y")
    pack = {"x": torch.randn(5, 96).bfloat16(), "y": torch.empty(5, 96)}
    planned = Planned(g, pack)
    assert planned.part.facts.program.last == 4
    planned.run()
    exact = torch.nn.functional.layer_norm(pack["x"].double(), (96,), None, None, EPS).exp()
    exact = oracle.rmsnorm(exact, None, EPS)[0]
    torch.testing.assert_close(pack["y"].double(), exact / exact.amax(1, keepdim=True), rtol=1e-5, atol=1e-6)


def test_what_stands_behind_a_product_belongs_to_the_norm_after_it():
    """The first norm does not come there; without a product in between it takes all but the last two nodes."""
    for product in (True, False):
        g = graphs.new()
        x, w, bias = g.tensor([4, 64]), g.tensor([1, 64]), g.tensor([1, 64])
        y = g.swish(g.rmsnorm(x, w, EPS, norm_forward_phase=PHASE)[0])
        y = g.add(g.matmul(y, g.tensor([64, 64])) if product else y, bias)
        g.swish(g.rmsnorm(y, w, EPS, norm_forward_phase=PHASE)[0]).set_output()
        g.validate()
        lowered, known = lower(g._ir), plugins.installed()
        found = {tuple(n.name for n in r.subgraph.nodes) for r in plan.matches(lowered, known)[0]}
        assert (("add.0", "rmsnorm.1", "swish.1") in found) is product
        assert (("rmsnorm.0", "swish.0", "add.0") in found) is not product
        (best, *_) = plan.propose(lowered, plan.matches(lowered, known)[0], known.engines, H200, heur_mode.A).plans
        parts = [tuple(n.name for n in part.region.subgraph.nodes) for part in best.parts]
        cut = [("rmsnorm.0", "swish.0"), ("matmul.0",), ("add.0", "rmsnorm.1", "swish.1")]
        assert parts == (cut if product else [("rmsnorm.0", "swish.0", "add.0", "rmsnorm.1", "swish.1")])
