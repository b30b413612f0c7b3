"""The tables that come with the engines: complete, legal, and, where translated, translated so."""

import json
import runpy
from pathlib import Path

import pytest

from graphfuse import heur_mode, plan, plugins
from graphfuse.benchmarks import rmsnorm_silu, rmsnorm_training
from graphfuse.benchmarks.benches import BENCHES
from graphfuse.device import ARCHES, for_arch
from graphfuse.engine import knobs_to_dict
from graphfuse.engines.rmsnorm import RmsNormEngine
from graphfuse.freeze import freeze
from graphfuse.lower import lower
from graphfuse.tables import store
from graphfuse.tables.tunings import said
from graphfuse.tuning import sizes

ROOT = Path(__file__).resolve().parents[2]
TABLES = sorted((ROOT / "engines").rglob("*.json"))
DEVICES = {f"sm_{for_arch(arch).sm}": for_arch(arch) for arch in ARCHES}
ENGINES = {"rmsnorm": RmsNormEngine()}
APART = (rmsnorm_silu.BENCH, rmsnorm_training.BENCH)


@pytest.mark.parametrize("path", TABLES, ids=[p.name for p in TABLES])
def test_a_table_names_its_engine_and_chip_and_holds_all_sizes(path):
    name, chip, _ = path.name.split(".")
    device, entries = DEVICES[chip], store.first_party(ENGINES[name], DEVICES[chip])
    assert store.to_text(entries) == path.read_text()
    assert {e.source.arch for e in entries} == {chip} and {e.engine for e in entries} == {name}
    assert {e.source.origin for e in entries} <= {"measured", "published"}
    assert all((e.us is None) == (e.source.origin == "published") and not e.others for e in entries)
    assert all(e.source.date for e in entries if e.source.origin == "measured")
    tunings, known = store.Tunings(first_party=entries), {(said(e), *e.knobs.items()) for e in entries}
    problems = []
    planned = [part for problem in tuned_for(chip) for part in parts(problem.graph(), device)]
    for part in (part for part in planned if part.engine.name == name):
        (first, *_) = tunings.choices(part.engine, part.facts, device, heur_mode.A)
        assert (first.why, *knobs_to_dict(first.knobs).items()) in known  # for this very number of rows
        if part.engine.problem(part.facts) not in problems:
            problems.append(part.engine.problem(part.facts))
    assert len(entries) == len(problems)


def tuned_for(chip):
    """What is tuned where measured: the seeds' sizes and what is benched, but for the phases of training, which are
    compared with the same knobs. Published are the seeds' sizes alone."""
    benched = [case for bench in BENCHES.values() if bench not in APART for case in bench.cases]
    return (*sizes.seeds(), *(benched if chip == "sm_90" else ()))


def parts(graph, device):
    """Of the first plan."""
    lowered, known = lower(freeze(graph)), plugins.installed()
    regions, _ = plan.matches(lowered, known)
    return plan.propose(lowered, regions, known.engines, device, heur_mode.OPENSOURCE).plans[0].parts


def test_the_sm100_table_is_the_translation_of_what_is_published():
    script = runpy.run_path(str(ROOT / "benchmarks" / "published_sm100.py"))
    entries = store.parse(script["TABLE"].read_bytes())
    assert store.to_text([*script["translated"](entries)]) == script["TABLE"].read_text()
    assert {json.dumps(sorted(e.published)) for e in entries} == {
        json.dumps(["bytes_per_load", "ctas_per_sm", "split_columns", "variant", "warps_per_cta"])
    }


def test_planning_for_a_b200_uses_it_and_says_so():
    device = for_arch("sm_100a")
    graph, known = lower(freeze(sizes.Size(24960, 512, "nvfp4").graph())), plugins.installed()
    regions, _ = plan.matches(graph, known)
    tunings = store.tunings(known.engines, device)
    best = plan.propose(graph, regions, known.engines, device, heur_mode.A, tunings).plans[0]
    assert best.parts[0].why == "published for NVIDIA B200, not measured here"
