"""Models with our operators in them, beside the same models without: measured in models.

    python -m graphfuse.benchmarks.programs.models [--record FOLDER] [--resume] [--only NAME ...] [--ways NAME ...]
                                          [--rounds 30] [--quick] [--list] [--json]

A few layers of published models' sizes, random weights, bfloat16 (`model_cases`): prefill of 1 x 4096 tokens, a
decoding step of 64 sequences as a CUDA graph, a training step with AdamW. Each runs as it is, compiled by
torch.compile, and both with us (`model_ways`), all in turns. Every way is compared with float32 before it is timed: one
that is farther from it than the unmodified model ends the case (`model_check`). `graphfuse bench models` is this
program.

The record is written after each case; until it has all of them it is models-part-DEVICE.json. Each stage of a case has
a limit of seconds, torch.compile among them: --list adds them up. In sessions that are shorter: one model at a time by
--only, with --resume.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from graphfuse.benchmarks import command, record, session, tables
from graphfuse.benchmarks.bench import Bench
from graphfuse.benchmarks.programs import model_record, model_session
from graphfuse.benchmarks.programs.model_cases import CASES, MODELS, QUICK, Model, ModelCase
from graphfuse.benchmarks.programs.model_ways import EAGER, OURS, WAYS, Way
from graphfuse.benchmarks.results import Results
from graphfuse.benchmarks.untuned import untuned

BENCH = Bench(
    name="models",
    title="Measured in models",
    cases=CASES,
    quick=QUICK,
    peers=WAYS,
    targets=model_record.TARGETS,
    ours=OURS,
    stream=EAGER,
)
"""Not one of `benches`: its protocol is its own. What is compared with is the unmodified model."""
DISTRIBUTIONS = ("transformers", "triton")
ROUNDS, QUICK_ROUNDS = 30, 10
WIDTH = 200


def chosen(only: Sequence[str], quick: bool) -> tuple[ModelCase, ...]:
    """Cases by name, MODEL or MODEL/WORK; ValueError for a name that none has."""
    have = QUICK if quick else CASES
    names = [*dict.fromkeys(case.model for case in have), *map(str, have)]
    for one in only:
        if one not in names:
            raise ValueError(f"{one}: there are {', '.join(names)}")
    return tuple(case for case in have if not only or case.model in only or str(case) in only)


def chosen_ways(names: Sequence[str]) -> tuple[Way, ...]:
    """ValueError for a name that none has."""
    have = [way.name for way in WAYS]
    for one in names:
        if one not in have:
            raise ValueError(f"{one}: there are {', '.join(have)}")
    return tuple(way for way in WAYS if not names or way.name in names)


def listing(cases: Sequence[ModelCase], ways: Sequence[Way]) -> str:
    """Cases and ways, one a line, with what is missing here, and how long all of it takes at most."""
    lines = [f"{BENCH.name}: {BENCH.title}"]
    for way in ways:
        absent = way.why_absent(None, 0)
        told = f" (absent: {absent})" if absent else ""
        lines.append(f"  way {way.name}: {way.title}, {way.seconds:.0f} s a case at most until it runs{told}")
    for case in cases:
        reason = MODELS[case.model].why_not()
        told = f" (absent: {reason})" if reason else ""
        lines.append(f"  case {case}: {MODELS[case.model].title}, {case.layers} layers, {case.size}{told}")
    return "\n".join([*lines, f"  {_at_most(cases, ways)}"])


def described(cases: Sequence[ModelCase], ways: Sequence[Way]) -> dict:
    """What `listing` says, as JSON values."""
    return {
        "bench": BENCH.name,
        "title": BENCH.title,
        "peers": {way.name: command.described(way) | {"absent": way.why_absent(None, 0)} for way in ways},
        "cases": [{"name": str(case), **vars(case), "absent": MODELS[case.model].why_not()} for case in cases],
    }


def _at_most(cases: Sequence[ModelCase], ways: Sequence[Way]) -> str:
    seconds = model_session.longest([way for way in ways if not way.why_absent(None, 0)])
    here = [case for case in cases if not MODELS[case.model].why_not()]
    return f"at most {len(here) * seconds / 60:.0f} min: {len(here)} cases of {seconds / 60:.1f} min at most"


def main(arguments: Sequence[str] | None = None, program: str | None = None, no_gpu: int = 2) -> None:
    """arguments, program: the command line and how it is called. no_gpu: the exit code where there is no GPU. A case
    that is wrong or fails makes it 1."""
    parser = argparse.ArgumentParser(
        prog=program, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="write models-DEVICE.json into FOLDER")
    parser.add_argument("--resume", action="store_true", help="keep what the record there already has")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="only this model, or MODEL/WORK")
    parser.add_argument("--ways", nargs="+", default=[], metavar="NAME", help="only these ways")
    parser.add_argument("--rounds", type=int, help=f"samples of each way, {ROUNDS} unless told")
    parser.add_argument("--quick", action="store_true", help=f"two of the models, {QUICK_ROUNDS} rounds, and no record")
    parser.add_argument("--list", action="store_true", help="print ways and cases, measure nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON value instead of text: the record")
    given = parser.parse_args(arguments)
    try:
        cases, ways = chosen(given.only, given.quick), chosen_ways(given.ways)
    except ValueError as error:
        parser.error(str(error))
    if given.quick and given.record:
        parser.error("--quick leaves no record; accepted: one of --quick and --record")
    if given.resume and not given.record:
        parser.error("there is no record to go on with; give --record FOLDER, too")
    if given.record and given.record.exists() and not given.record.is_dir():
        parser.error(f"--record {given.record} is no folder")
    rounds = given.rounds if given.rounds is not None else QUICK_ROUNDS if given.quick else ROUNDS
    if rounds < 2:
        parser.error(f"--rounds {rounds}: quartiles take two rounds or more")
    if given.list:
        print(json.dumps(described(cases, ways), indent=2) if given.json else listing(cases, ways))
        return
    if reason := record.gpu_needed("models"):
        parser.exit(no_gpu, f"{reason}\n")
    try:
        results = run(cases, ways, given.record, given.resume, rounds, "cuda", progress_on_stderr=given.json)
    except command.ResumeError as error:
        parser.exit(2, f"{error}\n")
    if given.json:
        print(json.dumps(results.record, indent=2))
    sys.exit(1 if failures(results, cases) else 0)


def failures(results: Results, cases: Sequence[ModelCase]) -> list[str]:
    """The names of those of the cases that failed in some way."""
    failed = [e for e in results.record["cases"] if any("error" in one for one in e["peers"].values())]
    return [name for entry in failed if (name := model_record.name(entry)) in map(str, cases)]


def run(
    cases: Sequence[ModelCase],
    ways: Sequence[Way],
    folder: Path | None,
    resume: bool,
    rounds: int,
    device: str,
    models: Mapping[str, Model] = MODELS,
    progress_on_stderr: bool = False,
) -> Results:
    """Measure, print, and after each case write the record into `folder`, if there is one.

    resume: keep the cases of a record that is there; ResumeError if another commit, driver or set of ways made it.
    """
    from rich.console import Console

    console = Console(highlight=False, width=WIDTH, stderr=progress_on_stderr)
    about = record.environment(record.CHECKOUT)
    content = {
        "bench": BENCH.name,
        "ours": BENCH.ours,
        "stream": BENCH.stream,
        "versions": {name: record.version(name) for name in DISTRIBUTIONS},
        "peers": {way.name: command.described(way) for way in ways},
        "cases": command.kept(folder, BENCH, about, ways) if folder and resume else [],
    }
    done = {model_record.name(entry) for entry in content["cases"]}
    left = [case for case in cases if str(case) not in done]
    console.print(f"{BENCH.title}: {len(left)} of {len(cases)} cases to measure, {_at_most(left, ways)}")
    file = None
    with untuned():
        for case in left:
            entry = model_session.measure(case, models[case.model], ways, device, rounds)
            session.release(device)
            content["cases"] = command.in_order(BENCH, [*content["cases"], entry])
            console.print(model_record.line(entry), markup=False, soft_wrap=True)
            if folder:
                file = command.keep(folder, BENCH, about, content)
    results = Results({"environment": about, **content})
    tables_of_all = (model_record.times(results), model_record.spent(results), model_record.costs(results))
    for table in (*tables_of_all, tables.targets(BENCH, results)):
        console.print(tables.terminal(table))
    for text in tables.absences(results):
        console.print(text, markup=False)
    if file:
        console.print(str(file), markup=False, soft_wrap=True)
    return results


if __name__ == "__main__":
    main()
