"""Which engine comes first: by the table, by family and device; registration order only breaks ties."""

from dataclasses import dataclass, replace

import pytest

from graphfuse import engines, heur_mode
from graphfuse.base.device import CPU, for_arch
from graphfuse.contract.engine import HostEngine
from graphfuse.engines.rows import RowEngine
from graphfuse.op_graph.freeze import freeze
from graphfuse.op_graph.ir import Subgraph
from graphfuse.op_graph.lower import lower
from graphfuse.ops import OPS
from graphfuse.planning import plan
from graphfuse.planning import registry as plugins
from graphfuse.tuned_tables.entry import Source
from graphfuse.tuned_tables.ranking import ANY, OTHERS, RANKING, Rank
from support import graphs, toys
from support.graphs import Norm

H200 = for_arch("sm_90a")
HERE = Source("measured", "NVIDIA H200", "sm_90", "2026-11-21")
A, B = toys.HostSolo("a"), toys.HostSolo("b")


class Library(HostEngine):
    """Takes any nodes, as a library would. Never run."""

    name = "library"
    facts = Subgraph
    modes = frozenset({heur_mode.A, heur_mode.B})

    def why_not(self, facts, device):
        return None

    def run(self, facts, knobs, device, buffers, stream):
        raise AssertionError


def order(g, registered, ranking=RANKING, device=CPU, patterns=(), mode=heur_mode.A) -> list[str]:
    """Names of the plans of a graph that is one region."""
    g.validate()
    graph = lower(freeze(g))
    regions, _ = plan.matches(graph, plugins.Registry(tuple(patterns), tuple(registered)))
    plans = plan.propose(graph, regions, registered, device, mode, ranking=ranking).plans
    return [p.parts[0].engine.name for p in plans]


def relu():
    g = graphs.new()
    g.relu(g.tensor([8])).set_output()
    return g


def orders(ranking, registered=(A, B), device=CPU) -> list[str]:
    return order(relu(), registered, ranking, device, toys.solo("relu"))


def test_without_an_entry_engines_come_as_registered():
    assert orders(()) == orders((), (A, B)) == ["a", "b"] and orders((), (B, A)) == ["b", "a"]


@pytest.mark.parametrize("family", [ANY, "relu", "solo_relu"])
def test_an_entry_of_the_family_comes_before_registration(family):
    assert orders([Rank(family, ("b", OTHERS))]) == ["b", "a"]
    assert orders([Rank(family, (OTHERS, "a"))]) == ["b", "a"]


def test_entries_of_other_families_say_nothing():
    assert orders([Rank("tanh", ("b", OTHERS)), Rank("solo_tanh", ("b", OTHERS))]) == ["a", "b"]


def test_the_first_entry_that_applies_decides():
    table = [Rank("tanh", ("b", OTHERS)), Rank("relu", ("b", OTHERS)), Rank(ANY, ("a", OTHERS))]
    assert orders(table) == ["b", "a"] and orders(table[::-1]) == ["a", "b"]


def test_what_was_measured_counts_on_that_architecture():
    table = [Rank("relu", ("b", "a", OTHERS), HERE, {"b": 1.0, "a": 2.0})]
    assert orders(table, device=H200) == ["b", "a"]
    assert orders(table, device=for_arch("sm_100a")) == ["a", "b"]


def test_what_was_measured_says_nothing_of_other_engines():
    """Those that are registered before all that were measured, as the caller's are, stay first."""
    table = [Rank("relu", ("b", "a", OTHERS), HERE, {"b": 1.0, "a": 2.0})]
    mine = toys.HostSolo("mine")
    assert orders(table, (mine, A, B), H200) == ["mine", "b", "a"]
    assert orders(table, (A, mine, B), H200) == ["b", "a", "mine"]


class Mine(RowEngine):
    name = "mine"


@pytest.mark.parametrize("chip", ["sm_80", "sm_90a"])
def test_the_callers_engine_comes_first_on_every_device(chip):
    graph = lower(freeze(Norm(512, 4096).graph()))
    known = plugins.registry((), (Mine(), "rows"))
    regions, _ = plan.matches(graph, known)
    made = plan.propose(graph, regions, known.engines, for_arch(chip), heur_mode.A)
    assert made.plans[0].parts[0].engine.name == "mine"


def test_nobody_else_is_asked_once_the_first_of_the_table_takes_the_nodes():
    (first,) = toys.solo("relu")
    second = replace(first, name="other_relu", facts=lambda match: Other(match.subgraph))
    table = [Rank("relu", ("a", "other", OTHERS), HERE, {"a": 1.0, "other": 2.0})]
    assert order(relu(), (InB("a"), OfOther("other", (1, 2))), table, H200, (first, second)) == ["a"]


def test_a_library_may_be_measured_ahead_of_a_patterns_engine():
    library = Library()
    assert orders((), (library, A)) == ["a", "library"]  # who knows the pattern comes first
    table = [Rank("relu", ("library", "a", OTHERS), HERE, {"library": 1.0, "a": 2.0})]
    assert orders(table, (A, library), H200) == ["library", "a"]
    assert orders(table, (A, library), for_arch("sm_80")) == ["a", "library"]


@dataclass(frozen=True)
class Other:
    """Another pattern's facts of the same nodes."""

    subgraph: Subgraph


class InB(toys.HostSolo):
    modes = frozenset({heur_mode.A, heur_mode.B})


class OfOther(InB):
    facts = Other


def test_engines_of_two_patterns_of_the_same_nodes_are_ranked_together():
    (first,) = toys.solo("relu")
    second = replace(first, name="other_relu", facts=lambda match: Other(match.subgraph))
    A, other = InB("a"), OfOther("other", (1, 2))  # noqa: N806
    for patterns, registered, want in (
        ((first, second), (A, other), ["a", "other", "other"]),
        ((first, second), (other, A), ["a", "other", "other"]),
        ((second, first), (A, other), ["other", "other", "a"]),
    ):
        assert order(relu(), registered, (), patterns=patterns, mode=heur_mode.B) == want
        # In mode A those of the first pattern will do.
        assert order(relu(), registered, (), patterns=patterns) == [name for name in want if name == want[0]]
    table = [Rank("relu", ("other", "a", OTHERS), HERE, {"other": 1.0, "a": 2.0})]
    assert order(relu(), (A, other), table, H200, (first, second)) == ["other", "other", "a"]
    assert order(relu(), (toys.HostSolo("a", reason="no"), other), (), patterns=(first, second)) == ["other", "other"]


def test_the_reference_engine_comes_after_all_others():
    reference = engines.ALL[-1]
    assert order(relu(), [reference, Library()]) == ["library", "reference"]
    assert (
        order(Norm().graph(), plugins.installed().engines, device=H200, patterns=plugins.installed().patterns)[-1]
        == "reference"
    )
    registered = [reference, Library(), A]
    assert order(relu(), registered, patterns=toys.solo("relu")) == ["a", "library", "reference"]


def test_alternatives_keep_the_knobs_of_an_engine_together():
    two = toys.HostSolo("two", (1, 2))
    assert orders([Rank(ANY, ("b", OTHERS))], (two, B)) == ["b", "two", "two"]


def test_the_table_names_what_exists():
    families = {ANY, *OPS, *(p.name for p in plugins.registry().patterns)}
    known = {e.name for e in engines.ALL} | {OTHERS}
    assert all(entry.family in families and set(entry.engines) <= known for entry in RANKING)
    assert RANKING[-1].family == ANY and RANKING[-1].source is None
    assert all(e.source is None or (e.source.origin, bool(e.source.date)) == ("measured", True) for e in RANKING)


WRONG = {
    "no place for others": lambda: Rank("relu", ("a", "b")),
    "two places for others": lambda: Rank("relu", (OTHERS, "a", OTHERS)),
    "a name twice": lambda: Rank("relu", ("a", "a", OTHERS)),
    "a default with times": lambda: Rank("relu", ("a", OTHERS), None, {"a": 1.0}),
    "another order than measured": lambda: Rank("relu", ("a", "b", OTHERS), HERE, {"a": 2.0, "b": 1.0}),
    "a time that is missing": lambda: Rank("relu", ("a", "b", OTHERS), HERE, {"a": 2.0}),
    "a time of another engine": lambda: Rank("relu", ("a", OTHERS), HERE, {"a": 2.0, "b": 3.0}),
}


@pytest.mark.parametrize("what", WRONG)
def test_an_entry_that_contradicts_itself_is_refused(what):
    with pytest.raises(ValueError, match="family 'relu'.*accepted|family 'relu': a default has no times"):
        WRONG[what]()


def test_explain_says_order_and_origin():
    g = graphs.new()
    g.relu(g.tensor([8])).set_output()
    g.build([heur_mode.A])
    assert "then engine: others as registered, reference (default); then tuned knobs" in g.explain()
    measured = Rank("relu", ("library", OTHERS), HERE, {"library": 1.0})
    assert str(measured) == "library, others as registered (measured on NVIDIA H200, 2026-11-21)"
