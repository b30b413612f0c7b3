"""graph.autotune where nothing can be timed, said before anything happens; and what it does with what was timed."""

import dataclasses
import functools

import pytest

from graphfuse import GraphNotSupportedError, GraphStateError, GraphTypeError, VariantPackError, heur_mode
from graphfuse.base import settings
from graphfuse.contract.engine import ProblemClass
from graphfuse.op_graph.freeze import freeze
from graphfuse.planning import plan
from graphfuse.planning.planner import Planner
from graphfuse.planning.workspace import ALIGNMENT
from graphfuse.runtime.timing import Time
from graphfuse.tuned_tables.entry import Source
from graphfuse.tuning import autotune
from graphfuse.tuning.report import BEST, TIMED, Trial
from support import graphs, toys
from support.graphs import Norm


def planned(device: str = "cpu", modes=(heur_mode.A,)):
    g = Norm().graph(device)
    g.validate()
    g.build_operation_graph()
    g.create_execution_plans(list(modes))
    return g, Norm().inputs() | Norm().outputs()


@pytest.mark.parametrize("device", ["cpu", "emulator"])
def test_without_a_gpu_it_is_refused_and_nothing_is_kept(device):
    g, pack = planned(device)
    before = pack["out"].clone()
    with pytest.raises(GraphNotSupportedError, match=f"planned for {device}.*accepted by autotune: a CUDA device"):
        g.autotune(pack)
    assert (before == pack["out"]).all() and not [*settings.tuning_dir().glob("*")]


@pytest.mark.parametrize("budget", [0, -1.0, "long", None, True, float("nan")])
def test_a_wrong_budget(budget):
    g, pack = planned()
    with pytest.raises(GraphTypeError, match="time_budget must be a number of seconds above 0"):
        g.autotune(pack, time_budget=budget)


def test_before_there_are_plans():
    g = Norm().graph()
    with pytest.raises(GraphStateError, match=r"create_execution_plans\(\) first"):
        g.autotune({})
    g.validate()
    g.build_operation_graph()
    with pytest.raises(GraphStateError, match=r"create_execution_plans\(\) first"):
        g.autotune({})


def test_keys_of_another_graph_are_refused():
    g, pack = planned()
    other = graphs.new().tensor([1])
    with pytest.raises(VariantPackError, match="is not of graph"):
        g.autotune({**pack, other: 1})


def test_a_tunable_engine_needs_a_problem_class():
    """What third-party kernels are until they say more."""
    assert toys.ScratchSolo(0).problem(object()) is None


class Scratched(toys.ScratchSolo):
    """`size` blocks of scratch memory; all of its parts are one problem class."""

    knobs = toys.Knobs
    propose = toys.HostSolo.propose
    illegal = toys.HostSolo.illegal
    sizes = (1,)

    def launch(self, facts, knobs):
        return dataclasses.replace(super().launch(facts, knobs), scratch_bytes=knobs.size * ALIGNMENT)

    def problem(self, facts):
        return ProblemClass({}, 1)


def test_what_fits_into_the_workspace_at_one_place_is_not_used_where_it_does_not():
    g = graphs.new()
    x = g.tensor([64, ALIGNMENT // 4], name="x")  # between two parts: 64 blocks of float32
    for _ in range(3):
        x = g.relu(x)
    x.set_output()
    planner = Planner(freeze(g), None, toys.solo("relu"), [Scratched(0)])
    planner.create([heur_mode.A])
    base = planner.plans[0]
    assert len(base.parts) == 3 and base.workspace_bytes == (64 + 64 + 1) * ALIGNMENT
    limit = base.workspace_bytes + ALIGNMENT

    def trial(size: int, us: float, status: str) -> Trial:
        return Trial({"size": size}, status, Time(us, us, us), 3, scratch=size * ALIGNMENT)

    trials = (trial(60, 1.0, BEST), trial(2, 2.0, TIMED), trial(3, 3.0, TIMED), Trial({"size": 4}))
    made, parts, needs = Source("user", "this", "sm_90"), list(base.parts), [ALIGNMENT] * 3
    found = autotune._Tuned(parts[0], trials)
    assert all(found.fits(part) for part in parts)
    for place, part in enumerate(parts):
        allowed = functools.partial(autotune._allowed, planner, tuple(parts), tuple(needs), place, limit)
        parts[place], needs[place] = found.applied(part, made, allowed)
        assert plan.assemble(planner.graph, parts, planner.device).workspace_bytes <= limit
    # Beside one tensor there is room for the fastest, beside two there is not.
    assert [part.knobs.size for part in parts] == [60, 2, 60]
    assert [part.why for part in parts] == [
        "tuned on this this, None",
        "the fastest of those timed that the workspace has room for",
        "tuned on this this, None",
    ]
    # With no room for any, a part is as it was.
    assert found.applied(base.parts[1], made, lambda knobs, scratch: False) == (base.parts[1], ALIGNMENT)


def test_what_a_part_turns_out_to_need_counts_not_what_was_known_before():
    """As with a library's plans, whose workspace is known once they are built."""
    g = graphs.new()
    g.relu(g.tensor([64, 64])).set_output()
    planner = Planner(freeze(g), None, toys.solo("relu"), [Scratched(0)])
    planner.create([heur_mode.A])
    (part,) = planner.plans[0].parts

    def trial(size: int, us: float, scratch: int) -> Trial:
        return Trial({"size": size}, TIMED, Time(us, us, us), 3, scratch=scratch)

    found = autotune._Tuned(part, (trial(1, 1.0, 1 << 20), trial(2, 2.0, 512)))
    allowed = functools.partial(autotune._allowed, planner, (part,), (0,), 0, 1024)
    chosen, scratch = found.applied(part, Source("user", "this", "sm_90"), allowed)
    assert (chosen.knobs.size, scratch) == (2, 512)
