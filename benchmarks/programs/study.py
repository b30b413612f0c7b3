"""A measurement that leaves a record: its command line, the tables and targets of its record, its files."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphfuse.benchmarks import record, tables
from graphfuse.benchmarks.target import Target

WIDTH = 200


@dataclass(frozen=True)
class Study:
    """name: of its record, NAME-DEVICE.json. about: what --help begins with.

    tables, targets: of what `read` makes of a record.
    distributions: whose versions the record has.
    rounds: samples of each unless --rounds says otherwise; 0 without this option.
    quick: what --quick measures, which leaves no record; "" without this option.
    """

    name: str
    about: str | None = None
    tables: Callable[[Any], Sequence[tables.Table]] = lambda content: ()
    targets: Sequence[Target] = ()
    distributions: tuple[str, ...] = ()
    read: Callable[[dict], Any] = lambda content: content
    rounds: int = 0
    quick: str = ""

    def parser(self, called: str | None = None) -> argparse.ArgumentParser:
        """The options that it has, and --record. called: how it is called, where that is not the file's name."""
        style = argparse.RawDescriptionHelpFormatter
        made = argparse.ArgumentParser(prog=called, description=self.about, formatter_class=style)
        made.add_argument("--record", type=Path, metavar="FOLDER", help=f"write {self.name}-DEVICE.json into FOLDER")
        if self.rounds:
            told = f"samples of each, {self.rounds} unless told"
            made.add_argument("--rounds", type=int, default=self.rounds, help=told)
        if self.quick:
            made.add_argument("--quick", action="store_true", help=f"{self.quick}, and no record")
        return made

    def refuse(self, parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
        """Ends the process for options that mean nothing, or not together."""
        if self.quick and given.quick and given.record:
            parser.error("--quick leaves no record; accepted: one of --quick and --record")
        if getattr(given, "resume", False) and not given.record:
            parser.error("there is no record to go on with; give --record FOLDER, too")
        if self.rounds and given.rounds < 2:
            parser.error(f"--rounds {given.rounds}: quartiles take two rounds or more")

    def need_gpu(self, parser: argparse.ArgumentParser, code: int = 2) -> None:
        """Ends the process with this exit code where there is no GPU."""
        if reason := record.gpu_needed(self.name.replace("-", "_")):
            parser.exit(code, f"{reason}\n")

    def asked(self, arguments: Sequence[str] | None = None) -> argparse.Namespace:
        """The options of a command line that has no others, where there is a GPU."""
        parser = self.parser()
        given = parser.parse_args(arguments)
        self.refuse(parser, given)
        self.need_gpu(parser)
        return given

    def versions(self) -> dict[str, str | None]:
        return {name: record.version(name) for name in self.distributions}

    def write(self, folder: Path, content: dict) -> Path:
        return record.write(folder, self.name, record.environment(record.CHECKOUT), content)

    def shown(self, content: dict) -> list[tables.Table]:
        """What there is to show of a record: the tables, then what is to be reached."""
        read = self.read(content)
        return [*self.tables(read), tables.judged(self.targets, read)]

    def report(self, content: dict, folder: Path | None = None) -> None:
        """Prints what there is to show, and writes the record into a folder, if there is one."""
        from rich.console import Console

        console = Console(highlight=False, width=WIDTH)
        for table in self.shown(content):
            console.print(tables.terminal(table))
        if folder:
            print(self.write(folder, content))
