"""`graphfuse bench`: what is measured, progress, the record, the tables at the end."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from graphfuse import record
from graphfuse.benchmarks import session, tables
from graphfuse.benchmarks.bench import Bench, Case
from graphfuse.benchmarks.peer import Peer
from graphfuse.benchmarks.results import Results

WIDTH = 140


@dataclasses.dataclass(frozen=True)
class Choice:
    """What is measured of a bench. Empty: everything."""

    outputs: tuple[str, ...] = ()
    rows: tuple[int, ...] = ()
    columns: tuple[int, ...] = ()
    peers: tuple[str, ...] = ()
    quick: bool = False

    def cases(self, bench: Bench) -> tuple[Case, ...]:
        return tuple(
            case
            for case in (bench.quick if self.quick else bench.cases)
            if all(
                not chosen or getattr(case, field) in chosen
                for field, chosen in (("output", self.outputs), ("rows", self.rows), ("columns", self.columns))
            )
        )

    def chosen_peers(self, bench: Bench) -> tuple[Peer, ...]:
        """Those asked for, and always the two that all are compared with."""
        always = (bench.ours, bench.stream)
        return tuple(peer for peer in bench.peers if not self.peers or peer.name in (*self.peers, *always))

    def unknown(self, bench: Bench) -> str | None:
        """What is asked for that the bench does not have, and what it has; None if all is there."""
        have = {
            "peer": (self.peers, [peer.name for peer in bench.peers]),
            "output": (self.outputs, list(dict.fromkeys(case.output for case in bench.cases))),
            "rows": (self.rows, sorted({case.rows for case in bench.cases})),
            "columns": (self.columns, sorted({case.columns for case in bench.cases})),
        }
        for what, (asked, accepted) in have.items():
            for one in asked:
                if one not in accepted:
                    return f"{what} {one}: {bench.name} has {', '.join(map(str, accepted))}"
        return None if self.cases(bench) else "no case of the quick subset is left; accepted: fewer filters"


def listing(bench: Bench, choice: Choice) -> str:
    """Cases and peers, one a line, with what is missing here."""
    lines = [f"{bench.name}: {bench.title}"]
    for peer in choice.chosen_peers(bench):
        missing = [name for name, version in peer.versions().items() if version is None]
        absent = f" (absent: {', '.join(missing)} is not installed)" if missing else ""
        lines.append(f"  peer {peer.name}: {peer.title}{absent}")
    lines += [f"  case {case}, {case.moved / 1e6:.1f} MB" for case in choice.cases(bench)]
    return "\n".join(lines)


def run(bench: Bench, choice: Choice, folder: Path | None, resume: bool) -> Results:
    """Measure, print, and after each case write the record into `folder`, if there is one.

    resume: keep the cases of a record there that was made by the same commit, on the same
    device, with the same versions.
    """
    import torch
    from rich.console import Console

    from graphfuse.runtime import timing

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    peers, cases = choice.chosen_peers(bench), choice.cases(bench)
    major, minor = torch.cuda.get_device_capability()
    arch = 10 * major + minor
    about = record.environment(record.CHECKOUT)
    content = {
        "bench": bench.name,
        "ours": bench.ours,
        "stream": bench.stream,
        "peers": {p.name: {"title": p.title, "versions": p.versions(), "own": p.own} for p in peers},
        "cases": _kept(folder, bench.name, about, peers) if folder and resume else [],
    }
    done = {_key(entry) for entry in content["cases"]}
    left = [case for case in cases if _key(vars(case)) not in done]
    console.print(f"{bench.title}: {len(left)} of {len(cases)} cases to measure on {about['device']}")
    with _progress(console) as progress:
        _compile(bench, left, peers, arch, progress)
        for entry in _measure(bench, left, peers, arch, "cuda", timing, progress):
            content["cases"] = _in_order(bench, [*content["cases"], entry])
            if folder:
                record.write(folder, bench.name, about, content)
    results = Results({"environment": about, **content})
    _report(bench, results, console)
    if folder:
        console.print(str(record.path(folder, bench.name, about)), markup=False)
    return results


def _compile(bench: Bench, cases: Sequence[Case], peers: Sequence[Peer], arch: int, progress) -> None:
    task, start, done = progress.add_task("compiling", total=None), time.monotonic(), 0
    for done, total in session.build_ahead(bench.name, cases, peers, arch):
        progress.update(task, completed=done, total=total)
    progress.remove_task(task)
    progress.console.print(f"{done} kernels compiled ahead in {time.monotonic() - start:.0f} s")


def _measure(
    bench: Bench, cases: Sequence[Case], peers: Sequence[Peer], arch: int, device: str, clock: session.Clock, progress
) -> Iterator[dict]:
    """The record's entry of each case; a line on each, with the time left where no bar shows it."""
    task, start = progress.add_task("measuring", total=len(cases)), time.monotonic()
    for number, case in enumerate(cases, 1):
        entry = session.measure(bench, case, peers, arch, device, clock)
        session.release(device)
        yield entry
        minutes = (time.monotonic() - start) / number * (len(cases) - number) / 60
        line = tables.line(Results({"ours": bench.ours, "stream": bench.stream, "peers": entry["peers"]}), entry)
        text = f"[{number}/{len(cases)}, {minutes:.1f} min left] {line}"
        progress.console.print(text, markup=False, soft_wrap=True)
        progress.update(task, advance=1)


def _report(bench: Bench, results: Results, console) -> None:
    summary = (tables.sizes(results), tables.speedups(results), tables.targets(bench, results))
    for table in (tables.cases(results), *summary):
        console.print(tables.terminal(table))
    for text in tables.absences(results):
        console.print(text, markup=False)


def _in_order(bench: Bench, entries: list[dict]) -> list[dict]:
    order = {_key(vars(case)): number for number, case in enumerate(bench.cases)}
    return sorted(entries, key=lambda entry: order[_key(entry)])


def _kept(folder: Path, kind: str, about: dict, peers: Sequence[Peer]) -> list[dict]:
    """The cases of a record that this run would make alike."""
    found = Results.read(record.path(folder, kind, about))
    if found is None or list(found.record["peers"]) != [peer.name for peer in peers]:
        return []
    old, new = ({k: v for k, v in e.items() if k != "date"} for e in (found.record["environment"], about))
    return found.record["cases"] if old == new and not str(about["commit"]).endswith("-dirty") else []


def _key(entry: dict) -> tuple:
    return tuple((k, v) for k, v in entry.items() if k not in ("bytes", "peers"))


def _progress(console):
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True)
