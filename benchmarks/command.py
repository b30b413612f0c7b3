"""`graphfuse bench`: what is measured, progress, the record, the tables at the end."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from graphfuse.base.errors import GraphfuseError
from graphfuse.base.wording import counted
from graphfuse.benchmarks import record, session, tables
from graphfuse.benchmarks.bench import Bench, Case
from graphfuse.benchmarks.peer import Peer
from graphfuse.benchmarks.results import Results
from graphfuse.benchmarks.untuned import untuned

if TYPE_CHECKING:
    from rich.console import Console

WIDTH = 140
PROGRAMS = {
    name: f"graphfuse.benchmarks.programs.{name.replace('-', '_')}" for name in ("models", "followers", "wan-vae")
}
"""Modules with main(arguments, program, no_gpu): a command line, how it is called, the exit code without a GPU. Clones
have them, installed packages do not."""
PART = "-part"
"""Of the name of a record that does not have all cases of all peers."""


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
                not chosen or getattr(case, field, None) in chosen
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
            "columns": (self.columns, sorted({case.columns for case in bench.cases if hasattr(case, "columns")})),
        }
        for what, (asked, accepted) in have.items():
            for one in asked:
                if one not in accepted:
                    return f"{what} {one}: {bench.name} has {', '.join(map(str, accepted)) or f'no {what}'}"
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


def benches_listed(benches: Iterable[Bench], programs: Iterable[str]) -> str:
    """Benches and programs, one a line."""
    about = {bench.name: f"{bench.title}; {counted(len(bench.cases), 'case')}" for bench in benches}
    about |= {name: f"options of its own: graphfuse bench {name} --help" for name in programs}
    width = max(map(len, about))
    lines = [f"{name:{width}}  {what}" for name, what in about.items()]
    return "\n".join([*lines, "", "Peers and cases of one: graphfuse bench BENCH --list"])


def described_benches(benches: Iterable[Bench]) -> dict:
    """What `benches_listed` says of benches, as JSON values."""
    return {bench.name: {"title": bench.title, "cases": len(bench.cases)} for bench in benches}


class ResumeError(GraphfuseError):
    """There is a record to go on with, but this run would not go on alike."""


def described_choice(bench: Bench, choice: Choice) -> dict:
    """What `listing` says, as JSON values."""
    return {
        "bench": bench.name,
        "title": bench.title,
        "peers": {peer.name: described(peer) for peer in choice.chosen_peers(bench)},
        "cases": [{"name": str(case), **vars(case), "bytes": case.moved} for case in choice.cases(bench)],
    }


def run(bench: Bench, choice: Choice, folder: Path | None, resume: bool, progress_on_stderr: bool = False) -> Results:
    """Measure, print, and after each case write the record into `folder`, if there is one.

    Until all cases of all peers are measured, and so for good where only some were chosen, the
    record is that of a part, a file of its own beside the whole one. resume: keep the cases of
    such a file, or of the whole one; ResumeError if another commit, driver or set of peers made it.
    What the user tuned on this machine does not count.
    """
    import torch
    from rich.console import Console

    from graphfuse.runtime import timing

    console = Console(highlight=False, stderr=progress_on_stderr)
    if not console.is_terminal:
        console.width = WIDTH
    peers, cases = choice.chosen_peers(bench), choice.cases(bench)
    major, minor = torch.cuda.get_device_capability()
    arch = 10 * major + minor
    made = Making(bench, peers, folder, resume)
    left = made.left(cases)
    console.print(f"{bench.title}: {len(left)} of {len(cases)} cases to measure on {made.about['device']}")
    with _progress(console) as progress, untuned():
        _compile(bench, left, peers, arch, progress)
        for entry in _measure(bench, left, peers, arch, "cuda", timing, progress):
            made.add(entry)
    _report(bench, made.results, console)
    made.say_where(console)
    return made.results


class Making:
    """A record in the making, which is written into a folder, if there is one, after each case.

    more: what it has beside the bench, its peers and cases. ResumeError as of `run`.
    """

    def __init__(self, bench: Bench, peers: Sequence[Peer], folder: Path | None, resume: bool, **more: object) -> None:
        self.about = record.environment(record.CHECKOUT)
        self._bench, self._folder, self._file = bench, folder, None
        self._content = {
            "bench": bench.name,
            "ours": bench.ours,
            "stream": bench.stream,
            **more,
            "peers": {p.name: described(p) for p in peers},
            "cases": kept(folder, bench, self.about, peers) if folder and resume else [],
        }

    @property
    def results(self) -> Results:
        return Results({"environment": self.about, **self._content})

    def left(self, cases: Iterable[Case]) -> list[Case]:
        """Cases that it does not have."""
        done = {_key(entry) for entry in self._content["cases"]}
        return [case for case in cases if _key(vars(case)) not in done]

    def add(self, entry: dict) -> None:
        self._content["cases"] = in_order(self._bench, [*self._content["cases"], entry])
        if self._folder:
            self._file = keep(self._folder, self._bench, self.about, self._content)

    def say_where(self, console: Console) -> None:
        if self._file:
            console.print(str(self._file), markup=False, soft_wrap=True)


def told(console: Console, results: Results, shown: Iterable[tables.Table]) -> None:
    """Prints tables, and who was not measured."""
    for table in shown:
        console.print(tables.terminal(table))
    for text in tables.absences(results):
        console.print(text, markup=False)


def described(peer: Peer) -> dict:
    return {"title": peer.title, "versions": peer.versions(), "own": peer.own, "way": peer.way}


def keep(folder: Path, bench: Bench, about: dict, content: dict) -> Path:
    """Write what is measured so far; the whole record takes the place of the part's."""
    whole = {_key(vars(case)) for case in bench.cases} == {_key(entry) for entry in content["cases"]}
    whole &= list(content["peers"]) == [peer.name for peer in bench.peers]
    file = record.write(folder, bench.name if whole else bench.name + PART, about, content)
    if whole:
        record.path(folder, bench.name + PART, about).unlink(missing_ok=True)
    return file


def kept(folder: Path, bench: Bench, about: dict, peers: Sequence[Peer]) -> list[dict]:
    """The cases of the record to go on with, none if there is no record."""
    files = (record.path(folder, name, about) for name in (bench.name + PART, bench.name))
    file = next((f for f in files if f.exists()), None)
    if file is None:
        return []
    found = _read(file)
    differ = _differences(found, about, [peer.name for peer in peers])
    if differ:
        raise ResumeError(f"{file} is not gone on with: {differ}; accepted: another folder, or no --resume")
    return found["cases"]


def _read(file: Path) -> dict:
    """A record to go on with; ResumeError for a file that is none."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # bytes that are no text, text that is no JSON
        raise ResumeError(f"{file} cannot be read ({error}); accepted: another folder, or no --resume") from error
    kinds = {"environment": dict, "peers": dict, "cases": list}
    if not isinstance(found, dict) or not all(isinstance(found.get(name), kind) for name, kind in kinds.items()):
        raise ResumeError(f"{file} is no record of a bench; accepted: another folder, or no --resume")
    return found


def _differences(found: dict, about: dict, peers: list[str]) -> str:
    old, dirty = found["environment"], str(about["commit"]).endswith("-dirty")
    said = [
        f"its {field} is {old.get(field)}, here it is {about.get(field)}"
        for field in dict.fromkeys((*old, *about))
        if field != "date" and old.get(field) != about.get(field)
    ]
    if list(found["peers"]) != peers:
        said.append(f"its peers are {', '.join(found['peers'])}, here they are {', '.join(peers)}")
    return "; ".join(said) or (f"sources of {about['commit']} may have changed since" if dirty else "")


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
    results = Results({"ours": bench.ours, "stream": bench.stream, "peers": {p.name: described(p) for p in peers}})
    for number, case in enumerate(cases, 1):
        entry = session.measure(bench, case, peers, arch, device, clock)
        session.release(device)
        yield entry
        minutes = (time.monotonic() - start) / number * (len(cases) - number) / 60
        line = tables.line(results, entry)
        text = f"[{number}/{len(cases)}, {minutes:.1f} min left] {line}"
        progress.console.print(text, markup=False, soft_wrap=True)
        progress.update(task, advance=1)


def _report(bench: Bench, results: Results, console: Console) -> None:
    summary = (tables.sizes(results), tables.speedups(results), tables.targets(bench, results))
    told(console, results, (tables.cases(results), *summary))
    for text in tables.dependent(results):
        console.print(f"dependent launch, {text}", markup=False)


def in_order(bench: Bench, entries: list[dict]) -> list[dict]:
    order = {_key(vars(case)): number for number, case in enumerate(bench.cases)}
    return sorted(entries, key=lambda entry: order[_key(entry)])


def _key(entry: dict) -> tuple:
    return tuple((k, v) for k, v in entry.items() if k not in ("bytes", "peers"))


def _progress(console):
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True)
