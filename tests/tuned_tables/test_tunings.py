"""Ranking of tuned knobs in planning: whose come first, how near is near, what is passed over, what is said."""

import dataclasses

import pytest

from graphfuse import heur_mode
from graphfuse.base.device import for_arch
from graphfuse.contract.engine import knobs_to_dict
from graphfuse.engines.rows import RowEngine
from graphfuse.op_graph.freeze import freeze
from graphfuse.op_graph.lower import lower
from graphfuse.planning import plan
from graphfuse.planning import registry as plugins
from graphfuse.tuned_tables.entry import Source, Timed, TunedEntry
from graphfuse.tuned_tables.tunings import Tunings
from support.graphs import FP4, HALF, Norm

H200 = for_arch("sm_90a")
ENGINE = RowEngine()
MINE = Source("user", "NVIDIA H200", "sm_90", "2030-01-02")
MEASURED = Source("measured", "NVIDIA H200", "sm_90", "2026-11-21")
PUBLISHED = Source("published", "NVIDIA B200", "sm_100")
PROBLEM = Norm(rows=4096, columns=512)


def proposed(problem: Norm, tunings=Tunings(), mode=heur_mode.OPENSOURCE, device=H200):
    """(knobs, why) of each plan of the problem, best first."""
    graph, known = lower(freeze(problem.graph())), plugins.installed()
    regions, _ = plan.matches(graph, known)
    plans = plan.propose(graph, regions, known.engines, device, mode, tunings).plans
    return [(p.parts[0].knobs, p.parts[0].why) for p in plans if p.parts[0].engine.name == "rows"]


def facts(problem: Norm):
    graph, known = lower(freeze(problem.graph())), plugins.installed()
    return plan.matches(graph, known)[0][0].facts


WIDE = [k for k, _ in proposed(PROBLEM, mode=heur_mode.B)]
FIRST, OTHER, THIRD = WIDE[0], WIDE[-1], WIDE[-2]


def entry(source=MEASURED, rows=4096, knobs=OTHER, problem=PROBLEM, **more) -> TunedEntry:
    key = ENGINE.problem(facts(problem)).key
    return TunedEntry(source, "rows", key, rows, knobs_to_dict(knobs), 10.0, **more)


def test_untuned_knobs_are_the_engines_own():
    assert {why for _, why in proposed(PROBLEM)} == {"heuristic"}
    assert proposed(PROBLEM, mode=heur_mode.A)[0] == (FIRST, "heuristic")


@pytest.mark.parametrize("mode", [heur_mode.OPENSOURCE, heur_mode.A, heur_mode.B])
def test_tuned_knobs_come_first_and_once(mode):
    found = proposed(PROBLEM, Tunings(first_party=(entry(),)), mode)
    assert found[0] == (OTHER, "tuned on NVIDIA H200, measured 2026-11-21")
    plain = [k for k, _ in proposed(PROBLEM, mode=mode)]
    assert [k for k, _ in found[1:]] == [k for k in plain if k != OTHER]


def test_the_users_come_before_the_tables():
    found = proposed(PROBLEM, Tunings((entry(MINE, knobs=THIRD),), (entry(),)))
    assert [why for _, why in found[:2]] == [
        "tuned on this NVIDIA H200, 2030-01-02",
        "tuned on NVIDIA H200, measured 2026-11-21",
    ]
    assert found[0][0] == THIRD


@pytest.mark.parametrize(("rows", "near"), [(2048, True), (8192, True), (2047, False), (8193, False), (1, False)])
def test_the_nearest_number_of_rows_counts_up_to_a_factor(rows, near):
    knobs, why = proposed(PROBLEM, Tunings(first_party=(entry(rows=rows),)))[0]
    assert (knobs == OTHER) == near
    assert why == (f"tuned on NVIDIA H200, measured 2026-11-21, for {rows} rows" if near else "heuristic")


def test_of_several_near_ones_the_nearest_counts():
    table = (entry(rows=2100, knobs=THIRD), entry(rows=5000), entry(rows=8000, knobs=THIRD))
    found = proposed(PROBLEM, Tunings(first_party=table))
    assert found[0][0] == OTHER and [why for _, why in found].count("heuristic") == len(found) - 1


def test_published_knobs_say_so():
    table = Tunings(first_party=(entry(PUBLISHED),))
    assert proposed(PROBLEM, table, device=for_arch("sm_100a"))[0][1] == "published for NVIDIA B200, not measured here"
    assert proposed(PROBLEM, table)[0][1] == "heuristic"  # another architecture's


@pytest.mark.parametrize(
    "other",
    [
        Norm(4096, 1024),
        Norm(4096, 512, output=HALF),
        Norm(4096, 512, training=True),
        Norm(4096, 512, beta=None),
        Norm(4096, 512, bias=HALF),
        Norm(4096, 512, alignment=8),
        Norm(4096, 512, output=FP4, blocks=True),
    ],
)
def test_other_problem_classes_do_not_count(other):
    assert proposed(PROBLEM, Tunings(first_party=(entry(problem=other),)))[0][1] == "heuristic"


def test_names_and_the_form_of_the_graph_are_no_part_of_a_class():
    implicit, explicit = (ENGINE.problem(facts(Norm(64, 64, output=FP4, blocks=b))) for b in (False, True))
    assert implicit == explicit
    assert ENGINE.problem(facts(Norm(12, 512))).key == ENGINE.problem(facts(PROBLEM)).key


@pytest.mark.parametrize(
    "knobs",
    [
        {"colour": 1},
        {},
        knobs_to_dict(OTHER) | {"more": 1},
        knobs_to_dict(OTHER) | {"threads": 17},
        knobs_to_dict(OTHER) | {"threads": "128"},
        knobs_to_dict(OTHER) | {"threads": 1 << 80},
    ],
)
def test_knobs_that_do_not_fit_are_passed_over(knobs):
    odd = dataclasses.replace(entry(), knobs=knobs)
    assert proposed(PROBLEM, Tunings((odd,), (odd,))) == proposed(PROBLEM)


def test_mode_b_goes_by_all_that_the_user_timed():
    others = (Timed(knobs_to_dict(THIRD), 11.0), Timed({"gone": 1}, 12.0), Timed(knobs_to_dict(FIRST), 13.0))
    mine = Tunings((entry(MINE, others=others),))
    assert [k for k, _ in proposed(PROBLEM, mine, heur_mode.B)][:3] == [OTHER, THIRD, FIRST]
    assert [k for k, _ in proposed(PROBLEM, mine, heur_mode.A)][:2] == [OTHER, FIRST]
