"""The knobs that planning ranks: exactly the legal ones, worked out once for a program and a device."""

import itertools
from dataclasses import replace

import pytest

from graphfuse import heur_mode, plan, plugins
from graphfuse.benchmarks.benches import BENCHES
from graphfuse.device import for_arch
from graphfuse.engines.rows import RowEngine, across, by_row, persistent
from graphfuse.freeze import freeze
from graphfuse.lower import lower

ENGINE = RowEngine()
SCHEDULES = {"rmsnorm-silu": by_row.ByRow, "rmsnorm-backward": persistent.Persistent, "rmsnorm-channels": across.Across}


def facts_of(bench: str):
    """What the engine looks at in the first problem of a bench."""
    regions, _ = plan.matches(lower(freeze(BENCHES[bench].cases[0].graph())), plugins.installed())
    return regions[0].facts


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("bench", SCHEDULES)
def test_the_legal_knobs_are_those_that_no_fault_is_found_with(bench, arch):
    schedule, device, facts = SCHEDULES[bench](), for_arch(arch), facts_of(bench)
    split = schedule.split(facts)
    legal = schedule.legal(facts, device)
    assert legal == tuple(k for k in schedule.every_knob(split, device) if ENGINE.illegal(facts, k, device) is None)
    assert legal and len(set(legal)) == len(legal)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("bench", ["rmsnorm-backward", "add-rmsnorm-backward", "qk-norm-rope-training"])
def test_what_ctas_that_stay_are_not_asked_about_is_illegal(bench, arch):
    schedule, device, facts = persistent.Persistent(), for_arch(arch), facts_of(bench)
    split = schedule.split(facts)
    most = min(15, 1 + (split.pieces - 1).bit_length())
    given = itertools.product((128, 256, 512, 1024), range(most), (1, 2, 3, 4), (1, 2, 3, 4, 5, 6, 8), (0, 1))
    every = []
    for threads, doubled, ctas_per_sm, stages, delay in given:
        ctas = device.sm_count * ctas_per_sm
        ctas -= ctas % max(1, (1 << doubled) // threads)
        every.append(persistent.PersistentKnobs(1 << doubled, threads, stages, ctas_per_sm, ctas, delay))
    assert schedule.legal(facts, device) == tuple(k for k in every if ENGINE.illegal(facts, k, device) is None)


def test_legal_knobs_do_not_depend_on_rows_but_for_the_grid():
    device, facts = for_arch("sm_90a"), facts_of("rmsnorm-silu")
    schedule = by_row.ByRow()
    assert schedule.legal(replace(facts, row_extents=(7,)), device) is schedule.legal(facts, device)
    many = replace(facts, row_extents=(2**36,))
    fewer = schedule.legal(many, device)
    assert 0 < len(fewer) < len(schedule.legal(facts, device))
    assert all(ENGINE.illegal(many, k, device) is None for k in fewer)
    others = set(schedule.legal(facts, device)) - {*fewer}
    assert {str(ENGINE.illegal(many, k, device)) for k in others} == {
        f"{2**36} rows take more CTAs than a grid can have"
    }


@pytest.mark.parametrize("bench", SCHEDULES)
def test_a_first_plan_asks_about_no_knobs_twice(bench, monkeypatch):
    """Whether the engine takes the program, and what it proposes, are one question."""
    schedule, asked = SCHEDULES[bench], []
    unfit = schedule.unfit
    monkeypatch.setattr(schedule, "unfit", staticmethod(lambda *given: asked.append(given[1]) or unfit(*given)))
    facts, device = facts_of(bench), replace(for_arch("sm_90a"), sm_count=131)  # for which no other test asked
    assert ENGINE.why_not(facts, device) is None and ENGINE.propose(facts, device, heur_mode.A)
    assert asked and len(set(asked)) == len(asked)
