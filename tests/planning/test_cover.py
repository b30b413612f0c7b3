"""Which matches are fused: held against every possible choice on small graphs, and bounded on large ones."""

import itertools
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphfuse import heur_mode, norm_forward_phase
from graphfuse.base.device import CPU, for_arch
from graphfuse.contract.match import Pattern
from graphfuse.engines.reference import ReferenceEngine
from graphfuse.op_graph.ir import Subgraph
from graphfuse.op_graph.lower import lower
from graphfuse.planning import cover, plan
from graphfuse.planning import registry as plugins
from support import graphs, toys

H200 = for_arch("sm_90a")


def ir(g):
    g.validate()
    return lower(g._ir)


def moved(graph, node_ids) -> int:
    """Bytes that a kernel for these nodes reads and writes: what they share with the rest of the graph or its user."""

    def size(t):
        return torch.empty(graph.tensors[t].dim).nbytes  # of float32, as all tensors here

    inside = [graph.nodes[i] for i in node_ids]
    outside = [node for i, node in enumerate(graph.nodes) if i not in node_ids]
    made = {t for node in inside for _, t in node.outputs}
    read = {t for node in inside for _, t in node.inputs} - made
    wanted = {t for node in outside for _, t in node.inputs}
    written = {t for t in made if t in wanted or not graph.tensors[t].virtual}
    return sum(size(t) for t in read | written)


def saved(graph, node_ids) -> int:
    return sum(moved(graph, {i}) for i in node_ids) - moved(graph, node_ids)


def runs(graph, chosen) -> bool:
    """Whether some order of the regions and the other nodes has each after what it needs, no node twice."""
    if sum(map(len, chosen)) != len(set().union(*chosen)):
        return False
    left = [*map(set, chosen), *({i} for i in range(len(graph.nodes)) if not any(i in c for c in chosen))]
    made_by = {t: i for i, node in enumerate(graph.nodes) for _, t in node.outputs}
    while left:
        open_ = set().union(*left)
        free = [b for b in left if all(made_by.get(t) not in open_ - b for i in b for _, t in graph.nodes[i].inputs)]
        if not free:
            return False
        left = [b for b in left if b not in free]
    return True


def every_choice(graph, matches):
    """All that run, those that save most first, then those that have the first match, and so on."""
    found = []
    for flags in itertools.product((1, 0), repeat=len(matches)):
        chosen = [m for m, flag in zip(matches, flags, strict=True) if flag]
        if runs(graph, chosen):
            found.append((sum(saved(graph, m) for m in chosen), flags))
    found.sort(reverse=True)
    return [(total, tuple(n for n, flag in enumerate(flags) if flag)) for total, flags in found]


@st.composite
def problems(draw):
    graph = ir(draw(graphs.drawn(max_ops=7)).build())
    nodes = st.frozensets(st.integers(0, len(graph.nodes) - 1), min_size=1, max_size=4)
    return graph, [set(m) for m in draw(st.lists(nodes, max_size=6))]


def subgraphs(graph, matches):
    return [Subgraph(graph, tuple(sorted(m))) for m in matches]


@given(problems(), st.data())
def test_the_choice_is_the_best_of_those_that_engines_take(problem, data):
    graph, matches = problem
    declined = data.draw(st.sets(st.integers(0, max(len(matches) - 1, 0))))
    best = next((total, chosen) for total, chosen in every_choice(graph, matches) if not declined.intersection(chosen))
    asked = []
    made = cover.choose(graph, subgraphs(graph, matches), lambda m: asked.append(m) or m not in declined)
    assert (made.saved, made.chosen) == best and made.exact
    assert len(asked) <= len(matches) * (len(matches) + 1)
    for m in range(len(matches)):
        alone = not any(matches[m] & matches[c] for c in made.chosen)
        if m not in made.chosen and m not in declined:
            together = [matches[c] for c in made.chosen]
            assert (m in made.waiting) == (alone and not runs(graph, [*together, matches[m]]))


@given(problems())
def test_all_choices_come_once_and_the_best_first(problem):
    graph, matches = problem
    assert list(cover.ranked(graph, subgraphs(graph, matches))) == [c for _, c in every_choice(graph, matches)]


@given(problems())
def test_nodes_count_first_where_nothing_else_runs_the_rest(problem):
    graph, matches = problem
    made = cover.choose(graph, subgraphs(graph, matches), lambda m: True, most_nodes=True)
    wanted = max(
        (sum(len(matches[m]) for m in chosen), total, [-m for m in chosen])
        for total, chosen in every_choice(graph, matches)
    )
    assert (sum(len(matches[m]) for m in made.chosen), made.saved) == wanted[:2]


@given(problems())
def test_beyond_the_limit_the_choice_still_runs(problem):
    graph, matches = problem
    made = cover.choose(graph, subgraphs(graph, matches), lambda m: True, most_steps=-1)
    assert runs(graph, [matches[m] for m in made.chosen]) and not made.exact
    for m in set(range(len(matches))) - {*made.chosen}:  # nothing fits beside it
        assert not runs(graph, [*(matches[c] for c in made.chosen), matches[m]])


def narrow_and_wide():
    """Three nodes that are narrow but for what the third makes, and a wide one behind."""
    g = graphs.new()
    small = g.tanh(g.relu(g.tensor([1, 64])))
    wide = g.add(small, g.tensor([1000, 64]))
    g.sigmoid(wide).set_output()
    return g


def three(g):
    return {"out": g.add(g.tanh(g.relu(g.capture("a"))), g.capture("b"))}


def two(g):
    return {"out": g.sigmoid(g.add(g.capture("a"), g.capture("b")))}


def proposed(g, patterns, engines, mode=heur_mode.A):
    graph = ir(g)
    regions, _ = plan.matches(graph, plugins.Registry(tuple(patterns), tuple(engines)))
    return plan.propose(graph, regions, engines, CPU, mode)


def ran(made):
    return [(p.region.pattern, p.region.subgraph.node_ids) for p in made.plans[0].parts]


def test_bytes_decide_and_not_the_number_of_nodes():
    patterns = [Pattern("three", three, toys.facts), Pattern("two", two, toys.facts)]
    made = proposed(narrow_and_wide(), patterns, [toys.HostSolo(), ReferenceEngine()])
    assert ran(made) == [("", (0, 1)), ("two", (2, 3))]
    assert made.regions == (
        "1 of 2 matches are fused, which saves 512000 bytes; no other choice that engines take saves more"
    )


def test_where_nothing_runs_the_rest_every_node_is_covered_first():
    """The best two nodes leave two that no engine of the mode runs alone."""
    patterns = [Pattern("three", three, toys.facts), Pattern("two", two, toys.facts), *toys.solo("sigmoid")]
    made = proposed(narrow_and_wide(), patterns, [toys.HostSolo()], heur_mode.OPENSOURCE)
    assert ran(made) == [("three", (0, 1, 2)), ("solo_sigmoid", (3,))]
    assert "no other choice with as many nodes that engines take saves more" in made.regions


def test_explain_says_what_decided():
    g = narrow_and_wide()
    g.validate()
    patterns = [Pattern("three", three, toys.facts), Pattern("two", two, toys.facts)]
    g.build_operation_graph(patterns=patterns, engines=[toys.HostSolo("toy")])
    g.create_execution_plans([heur_mode.A])
    g.build_plans()
    told = g.explain()
    assert "  1 of 4 matches are fused, which saves 512000 bytes; no other choice that engines take saves more" in told
    assert "(fused, pattern two, saves 512000 bytes)" in told
    for known in ("tree", "html"):
        said = " ".join(g.explain(format=known).split())
        assert "1 of 4 matches are fused, which saves 512000 bytes" in said
    assert '"regions": "1 of 4 matches are fused' in g.explain(format="json")


def norms(count, between):
    g = graphs.new()
    first = y = g.tensor([4, 64])
    for _ in range(count):
        y = g.rmsnorm(y, g.tensor([1, 64]), 1e-5, norm_forward_phase=norm_forward_phase.INFERENCE)[0]
        y = between(g, g.swish(y), first)
    y.set_output()
    return ir(g)


LARGE = {
    "a chain": (100, lambda g, y, first: y),
    "residuals": (67, lambda g, y, first: g.add(y, first)),
    "products": (67, lambda g, y, first: g.matmul(y, g.tensor([64, 64]))),
}


@pytest.mark.parametrize("name", LARGE)
def test_graphs_of_200_nodes_take_few_steps(name):
    graph = norms(*LARGE[name])
    assert len(graph.nodes) >= 200
    regions, _ = plan.matches(graph, plugins.installed())
    every = [r.subgraph for r in regions]
    made = cover.choose(graph, every, lambda m: True)
    assert made.exact and made.steps < cover.MOST_STEPS / 10
    assert cover.choose(graph, every, lambda m: True) == made
    # Engines are asked of what would be chosen, which is less than all matches.
    asked = []
    cover.choose(graph, every, lambda m: asked.append(m) or True)
    assert asked == [*made.chosen] and len(asked) < len(every)


def test_a_tangle_is_given_up_in_time():
    """Any three of 200 nodes that read the same tensor may be one, and there are 400 such matches."""
    g, source = graphs.new(), random.Random(0)
    x = g.tensor([4, 64])
    for _ in range(200):
        g.relu(x).set_output()
    graph = ir(g)
    matches = [Subgraph(graph, tuple(sorted(source.sample(range(200), 3)))) for _ in range(400)]
    made = cover.choose(graph, matches, lambda m: True, most_steps=5000)
    assert not made.exact and made.steps <= 5000 + len(matches)
    assert cover.choose(graph, matches, lambda m: True, most_steps=5000) == made
    assert runs(graph, [matches[m].node_ids for m in made.chosen])
    assert made.saved == len(made.chosen) * 2 * 1024  # two of three times, x is not read
    assert len(made.chosen) > 30


def test_a_plan_says_that_it_is_greedy(monkeypatch):
    monkeypatch.setattr(cover.choose, "__defaults__", (False, -1))
    made = proposed(narrow_and_wide(), [Pattern("two", two, toys.facts)], [toys.HostSolo(), ReferenceEngine()])
    assert "chosen greedily, those that save most first: a better choice was not found in" in made.regions
