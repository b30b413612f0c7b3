"""The order of tuned knobs and an engine's own proposals. Pure functions; `store` has the files."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from graphfuse.base.device import Device
from graphfuse.base.enums import heur_mode
from graphfuse.base.wording import counted
from graphfuse.contract.engine import Engine, ProblemClass, knobs_from_dict
from graphfuse.tuned_tables.entry import TunedEntry

HEURISTIC = "heuristic"
"""Origin, as text, of knobs that the engine itself proposed."""


@dataclass(frozen=True)
class Choice:
    """Knobs, and their origin as text."""

    knobs: object
    why: str


@dataclass(frozen=True)
class Tunings:
    """Tuned entries for one device. own: from the user's file. first_party: from the engines' tables."""

    own: tuple[TunedEntry, ...] = ()
    first_party: tuple[TunedEntry, ...] = ()

    def ranked(
        self, engine: Engine, facts: object, device: Device, mode: heur_mode, proposed: Sequence[object] = ()
    ) -> tuple[Choice, ...]:
        """Legal tuned knobs for the problem, best first, then the knobs that the engine proposed.

        The user's knobs for the problem come first, then the first-party table's, then those for the nearest number of
        rows. In mode B, all knobs that were timed for the problem follow its best ones, fastest first.
        """
        problem = engine.problem(facts)
        if problem is None:
            return tuple(Choice(knobs, "") for knobs in proposed)
        found: dict[object, Choice] = {}
        for values, why in self._known(engine, problem, device, mode):
            knobs = _fitting(engine, facts, values, device)
            if knobs is not None:
                found.setdefault(knobs, Choice(knobs, why))
        for knobs in proposed:
            found.setdefault(knobs, Choice(knobs, HEURISTIC))
        return tuple(found.values())

    def _known(
        self, engine: Engine, problem: ProblemClass, device: Device, mode: heur_mode
    ) -> Iterator[tuple[dict, str]]:
        name, chip, key = engine.name, arch(device), problem.key
        every = (*self.own, *self.first_party)
        known = [e for e in every if e.engine == name and e.source.arch == chip and e.key == key]
        for entry in (e for e in known if e.rows == problem.rows):
            yield entry.knobs, origin_text(entry)
            for other in entry.others if mode is heur_mode.B else ():
                yield other.knobs, origin_text(entry)
        near = [e for e in known if 0 < _apart(e, problem) <= math.log(problem.within)]
        for entry in sorted(near, key=lambda e: _apart(e, problem))[:1]:
            yield entry.knobs, f"{origin_text(entry)}, for {counted(entry.rows, 'row')}"


def arch(device: Device) -> str:
    """Name of the device's architecture in tables."""
    return f"sm_{device.sm}"


def origin_text(entry: TunedEntry) -> str:
    """Origin of an entry as text."""
    source = entry.source
    return {
        "measured": f"tuned on {source.device}, measured {source.date}",
        "published": f"published for {source.device}, not measured here",
        "user": f"tuned on this {source.device}, {source.date}",
    }[source.origin]


def _apart(entry: TunedEntry, problem: ProblemClass) -> float:
    return abs(math.log(entry.rows / max(problem.rows, 1)))


def _fitting(engine: Engine, facts: object, values: dict[str, object], device: Device) -> object | None:
    """The engine's knobs with these values; None if it has other knobs by now, or they are illegal here."""
    try:
        knobs = knobs_from_dict(engine, values)
    except ValueError:
        return None
    return knobs if engine.illegal(facts, knobs, device) is None else None
