"""The knobs that planning ranks: exactly the legal ones, worked out once for a program and a device."""

import itertools
import sys
from dataclasses import replace

import pytest

from graphfuse import heur_mode
from graphfuse.base.device import for_arch
from graphfuse.benchmarks.benches import BENCHES
from graphfuse.engines.rows import RowEngine, across, by_row, persistent
from graphfuse.op_graph.freeze import freeze
from graphfuse.op_graph.lower import lower
from graphfuse.planning import plan
from graphfuse.planning import registry as plugins

ENGINE = RowEngine()
SCHEDULES = {"rmsnorm-silu": by_row.ByRow, "rmsnorm-backward": persistent.Persistent, "rmsnorm-channels": across.Across}


def facts_of(bench: str):
    """What the engine looks at in the first problem of a bench."""
    regions, _ = plan.matches(lower(freeze(BENCHES[bench].cases[0].graph())), plugins.installed())
    return regions[0].facts


def by_row_knobs(split, device):
    for chunks, doubled, threads in itertools.product((1, 2, 4), range(15), (64, 128, 256, 512, 1024)):
        yield by_row.ByRowKnobs(1 << doubled, threads, chunks)


def persistent_knobs(split, device):
    most, stages = min(15, 1 + (split.pieces - 1).bit_length()), (1, 2, 3, 4, 5, 6, 8)
    given = itertools.product((128, 256, 512, 1024), range(most), (1, 2, 3, 4), stages, (0, 1))
    for threads, doubled, ctas_per_sm, stages, delay in given:
        ctas = device.sm_count * ctas_per_sm
        ctas -= ctas % max(1, (1 << doubled) // threads)
        yield persistent.PersistentKnobs(1 << doubled, threads, stages, ctas_per_sm, ctas, delay)


def across_knobs(split, device):
    given = itertools.product((4, 8, 16, 32, 64, 128, 256), range(1, 65), (1, 2, 3, 4, 5, 6, 8, 12, 16))
    for threads_across, groups, ctas_per_sm in given:
        yield across.AcrossKnobs(threads_across, groups, ctas_per_sm)


CHOICES = {by_row.ByRow: by_row_knobs, persistent.Persistent: persistent_knobs, across.Across: across_knobs}


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("bench", [*SCHEDULES, "layernorm", "add-rmsnorm-backward", "qk-norm-rope-training"])
def test_the_legal_knobs_are_all_that_no_fault_is_found_with(bench, arch):
    """Planning does not ask about those of which it knows already that they are illegal."""
    device, facts = for_arch(arch), facts_of(bench)
    for schedule in (kind() for kind in CHOICES if kind().refusal(facts, device) is None):
        every = CHOICES[type(schedule)](schedule.split(facts), device)
        found = schedule.legal(facts, device)
        assert found == tuple(k for k in every if ENGINE.illegal(facts, k, device) is None) and found


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
    module = sys.modules[schedule.unfit.__module__]

    def unfit(split, knobs, device, answer=schedule.unfit):
        asked.append(knobs)
        return answer(split, knobs, device)

    monkeypatch.setattr(module, "unfit", unfit)
    monkeypatch.setattr(schedule, "unfit", staticmethod(unfit))
    facts, device = facts_of(bench), replace(for_arch("sm_90a"), sm_count=131)  # for which no other test asked
    assert ENGINE.why_not(facts, device) is None and ENGINE.propose(facts, device, heur_mode.A)
    assert asked and len(set(asked)) == len(asked)
