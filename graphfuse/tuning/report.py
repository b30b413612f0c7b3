"""The result of tuning, as data and as text."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from graphfuse.base.wording import counted, in_columns
from graphfuse.runtime.timing import Time

NOT_TRIED, BROKEN, WRONG, TIMED, BEST = "not tried", "does not run", "wrong", "timed", "best"


@dataclass(frozen=True)
class Trial:
    """One candidate. status: one of the above. time: microseconds of a launch, from its longest measurement, of round
    `rounds`; None if it was not timed. why: description of a fault. scratch: bytes of its own workspace, None if it was
    not prepared."""

    knobs: Mapping[str, object]
    status: str = NOT_TRIED
    time: Time | None = None
    rounds: int = 0
    why: str = ""
    scratch: int | None = None


@dataclass(frozen=True)
class PartReport:
    """One part of the plan. nodes: names of its nodes. trials: fastest first, then those not timed. best: the selected
    knobs; the previous ones if the time did not suffice for any other."""

    nodes: tuple[str, ...]
    engine: str
    rows: int
    trials: tuple[Trial, ...]
    best: Mapping[str, object]


@dataclass(frozen=True)
class TuningReport:
    """Report of ``autotune``. stored: the file with the winners, None if nothing was stored. seconds: duration. Prints
    as a table."""

    device: str
    parts: tuple[PartReport, ...]
    seconds: float
    stored: Path | None

    def __str__(self) -> str:
        lines = [f"tuned on {self.device} in {self.seconds:.1f} s, " + self._kept()]
        for part in self.parts:
            lines.append(f"{part.engine}: {', '.join(part.nodes)}, {counted(part.rows, 'row')}")
            lines += [f"  {line}" for line in in_columns([_HEAD, *map(_row, part.trials)])]
        return "\n".join(lines)

    def __rich__(self) -> object:
        from rich.console import Group
        from rich.table import Table

        tables = []
        for part in self.parts:
            table = Table(*_HEAD, title=f"{part.engine}: {', '.join(part.nodes)}, {counted(part.rows, 'row')}")
            for trial in part.trials:
                table.add_row(*_row(trial), style="bold" if trial.status == BEST else None)
            tables.append(table)
        return Group(*tables, f"tuned on {self.device} in {self.seconds:.1f} s, {self._kept()}")

    def _kept(self) -> str:
        return f"kept in {self.stored}" if self.stored else "nothing kept"


_HEAD = ("knobs", "us", "low", "high", "status")


def _row(trial: Trial) -> tuple[str, ...]:
    time = trial.time
    numbers = ("", "", "") if time is None else tuple(f"{us:.2f}" for us in (time.median, time.low, time.high))
    return (words(trial.knobs), *numbers, f"{trial.status}: {trial.why}" if trial.why else trial.status)


def words(knobs: Mapping[str, object]) -> str:
    """Knobs in one line."""
    return ", ".join(f"{name}={value}" for name, value in sorted(knobs.items()))
