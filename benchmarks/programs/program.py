"""A bench whose cases run in several ways, in a clone alone: its command line, its run, its record.

Options: [--record FOLDER] [--resume] [--only NAME ...] [--ways NAME ...] [--rounds N] [--quick] [--list] [--json].
The record is written after each case; until it has all of them it is BENCH-part-DEVICE.json.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from graphfuse.benchmarks import command, session, tables
from graphfuse.benchmarks.bench import Bench
from graphfuse.benchmarks.programs.model_ways import Way
from graphfuse.benchmarks.programs.study import WIDTH, Study
from graphfuse.benchmarks.results import Results
from graphfuse.benchmarks.untuned import untuned


@dataclass(frozen=True)
class Program:
    """What differs between such benches.

    bench: not one of `benches`, as its protocol is its own. about: what --help begins with.
    measure: the record's entry of one case, of (case, ways, device, rounds).
    group: the part of a case's name that --only takes, too. name: of a case, by its entry.
    titled: a case in the words of --list. why_not: why a case cannot be made here, or None.
    line: an entry in one line. tables: what is printed of a record, before the targets.
    longest: seconds that a case takes at most in some ways. distributions: whose versions the record has.
    """

    bench: Bench
    about: str
    measure: Callable[[object, Sequence[Way], str, int], dict]
    group: Callable[[object], str]
    name: Callable[[dict], str]
    titled: Callable[[object], str]
    line: Callable[[dict], str]
    tables: Sequence[Callable[[Results], tables.Table]]
    longest: Callable[[Sequence[Way]], float]
    rounds: int
    quick_rounds: int
    quick_cases: str
    distributions: tuple[str, ...]
    why_not: Callable[[object], str | None] = lambda case: None

    @functools.cached_property
    def study(self) -> Study:
        return Study(
            self.bench.name,
            self.about,
            lambda r: [make(r) for make in self.tables],
            self.bench.targets,
            self.distributions,
            Results,
            self.rounds,
            f"{self.quick_cases}, {self.quick_rounds} rounds",
        )

    def chosen(self, only: Sequence[str], quick: bool) -> tuple:
        """Cases by their names or groups; ValueError for a name that none has."""
        have = self.bench.quick if quick else self.bench.cases
        names = [*dict.fromkeys(map(self.group, have)), *map(str, have)]
        for one in only:
            if one not in names:
                raise ValueError(f"{one}: there are {', '.join(names)}")
        return tuple(case for case in have if not only or self.group(case) in only or str(case) in only)

    def chosen_ways(self, names: Sequence[str]) -> tuple[Way, ...]:
        """ValueError for a name that none has."""
        have = [way.name for way in self.bench.peers]
        for one in names:
            if one not in have:
                raise ValueError(f"{one}: there are {', '.join(have)}")
        return tuple(way for way in self.bench.peers if not names or way.name in names)

    def listing(self, cases: Sequence[object], ways: Sequence[Way]) -> str:
        """Cases and ways, one a line, with what is missing here, and how long all of it takes at most."""
        lines = [f"{self.bench.name}: {self.bench.title}"]
        for way in ways:
            told = _absent(way.why_absent(None, 0))
            lines.append(f"  way {way.name}: {way.title}, {way.seconds:.0f} s a case at most until it runs{told}")
        for case in cases:
            lines.append(f"  case {case}: {self.titled(case)}{_absent(self.why_not(case))}")
        return "\n".join([*lines, f"  {self._at_most(cases, ways)}"])

    def described(self, cases: Sequence[object], ways: Sequence[Way]) -> dict:
        """What `listing` says, as JSON values."""
        return {
            "bench": self.bench.name,
            "title": self.bench.title,
            "peers": {way.name: command.described(way) | {"absent": way.why_absent(None, 0)} for way in ways},
            "cases": [{"name": str(case), **vars(case), "absent": self.why_not(case)} for case in cases],
        }

    def _at_most(self, cases: Sequence[object], ways: Sequence[Way]) -> str:
        seconds = self.longest([way for way in ways if not way.why_absent(None, 0)])
        here = [case for case in cases if not self.why_not(case)]
        return f"at most {len(here) * seconds / 60:.0f} min: {len(here)} cases of {seconds / 60:.1f} min at most"

    def main(self, arguments: Sequence[str] | None = None, called: str | None = None, no_gpu: int = 2) -> None:
        """arguments, called: the command line and how it is called. no_gpu: the exit code where there is no GPU. A case
        that is wrong or fails makes it 1."""
        parser = self._parser(called)
        given = parser.parse_args(arguments)
        try:
            cases, ways = self.chosen(given.only, given.quick), self.chosen_ways(given.ways)
        except ValueError as error:
            parser.error(str(error))
        if given.record and given.record.exists() and not given.record.is_dir():
            parser.error(f"--record {given.record} is no folder")
        if given.rounds is None:
            given.rounds = self.quick_rounds if given.quick else self.rounds
        self.study.refuse(parser, given)
        if given.list:
            told = self.described(cases, ways)
            print(json.dumps(told, indent=2) if given.json else self.listing(cases, ways))
            return
        self.study.need_gpu(parser, no_gpu)
        try:
            results = self.run(
                cases, ways, given.record, given.resume, given.rounds, "cuda", progress_on_stderr=given.json
            )
        except command.ResumeError as error:
            parser.exit(2, f"{error}\n")
        if given.json:
            print(json.dumps(results.record, indent=2))
        sys.exit(1 if self.failures(results, cases) else 0)

    def _parser(self, called: str | None) -> argparse.ArgumentParser:
        parser = self.study.parser(called)
        parser.set_defaults(rounds=None)  # of --quick there are others
        parser.add_argument("--resume", action="store_true", help="keep what the record there already has")
        parser.add_argument(
            "--only", nargs="+", default=[], metavar="NAME", help="only these cases, as --list has them"
        )
        parser.add_argument("--ways", nargs="+", default=[], metavar="NAME", help="only these ways")
        parser.add_argument("--list", action="store_true", help="print ways and cases, measure nothing")
        parser.add_argument("--json", action="store_true", help="print one JSON value instead of text: the record")
        return parser

    def failures(self, results: Results, cases: Sequence[object]) -> list[str]:
        """The names of those of the cases that failed in some way."""
        failed = [e for e in results.record["cases"] if any("error" in one for one in e["peers"].values())]
        return [name for entry in failed if (name := self.name(entry)) in map(str, cases)]

    def run(
        self,
        cases: Sequence[object],
        ways: Sequence[Way],
        folder: Path | None,
        resume: bool,
        rounds: int,
        device: str,
        progress_on_stderr: bool = False,
    ) -> Results:
        """Measure, print, and after each case write the record into `folder`, if there is one.

        resume: keep the cases of a record that is there; ResumeError if another commit, driver or set of ways made it.
        """
        from rich.console import Console

        bench, console = self.bench, Console(highlight=False, width=WIDTH, stderr=progress_on_stderr)
        made = command.Making(bench, ways, folder, resume, versions=self.study.versions())
        left = made.left(cases)
        console.print(f"{bench.title}: {len(left)} of {len(cases)} cases to measure, {self._at_most(left, ways)}")
        with untuned():
            for case in left:
                entry = self.measure(case, ways, device, rounds)
                session.release(device)
                console.print(self.line(entry), markup=False, soft_wrap=True)
                made.add(entry)
        command.told(console, made.results, self.study.shown(made.results.record))
        made.say_where(console)
        return made.results


def _absent(reason: str | None) -> str:
    return f" (absent: {reason})" if reason else ""
