"""The interface of a schedule: one way to spread the rows of a program over threads."""

import abc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from typing import ClassVar, Generic, TypeVar

from graphfuse.base.device import Device
from graphfuse.base.enums import heur_mode
from graphfuse.codegen.parameters import arguments
from graphfuse.codegen.render import render, template
from graphfuse.contract.engine import Launch, ProblemClass
from graphfuse.engines.rows.kernel import Access, prelude
from graphfuse.engines.rows.limits import MAX_CTAS
from graphfuse.engines.rows.problem import problem
from graphfuse.engines.rows.split import Split
from graphfuse.engines.rows.support import program_reasons
from graphfuse.patterns.rows import RowFacts

KnobsT = TypeVar("KnobsT")

PROPOSED = 3
"""Knobs, of an engine that is not asked for more."""
_FEW_ROWS = MAX_CTAS // 16  # take no more CTAs than a grid can have, in clusters of any size


class Schedule(abc.ABC, Generic[KnobsT]):
    """The kernel is a file in the package of the schedule, and has its name. Class attributes:

    knobs: its frozen dataclass of knobs, by which plans tell schedules apart.
    qualifiers: of the kernel, in C++.
    split: how rows are cut, of facts for which `misfit` is None.
    legal_knobs: those to choose from.
    malformed: why knobs are none that any rows could have.
    unfit: why knobs that are not malformed cannot be used for some rows. Of faults the first is told.
    cost: estimated nanoseconds of a launch, by its knobs.
    """

    knobs: ClassVar[type]
    qualifiers: ClassVar[str] = "GF_RESIDENT_KERNEL(THREADS, CTAS_PER_SM)"
    split: ClassVar[Callable[[RowFacts], Split]]
    legal_knobs: ClassVar[Callable[[Split, Device], Iterator[KnobsT]]]
    malformed: ClassVar[Callable[[Split, KnobsT, Device], Iterator[str]]]
    unfit: ClassVar[Callable[[Split, KnobsT, Device], Iterator[str]]]
    cost: ClassVar[Callable[[Split, Device], Callable[[KnobsT], float]]]

    def prefers(self, facts: RowFacts) -> bool:
        """True if the program is one that the schedule is there for. Cheap."""
        return False

    def pays(self, facts: RowFacts, device: Device) -> bool:
        """True if the schedule takes the program, and is estimated to be the fastest of all for so many rows."""
        return False

    @abc.abstractmethod
    def reasons(self, facts: RowFacts, device: Device) -> Iterator[str]:
        """The reasons against beside those of every schedule, each naming the tensor and the limit. The first is told:
        each may rely on those before it."""

    def propose(self, facts: RowFacts, device: Device, mode: heur_mode) -> Sequence[KnobsT]:
        """Knobs to try, best first."""
        return best_first(sorted(self.legal(facts, device), key=self.cost(self.split(facts), device)), mode)

    @abc.abstractmethod
    def constants(self, split: Split[KnobsT], knobs: KnobsT) -> Mapping[str, bool | int | Access]:
        """Constants that the kernel asks of the problem beside what every kernel does: values by name in C++. A name
        that every kernel has gets this value."""

    def problem(self, facts: RowFacts) -> ProblemClass:
        """The class that tuned knobs are kept for, of programs that the schedule is preferred for."""
        return problem(facts, self.split(facts).chunk)

    def misfit(self, facts: RowFacts) -> str | None:
        """Why none of the schedule's knobs can be used."""
        return None

    def refusal(self, facts: RowFacts, device: Device) -> str | None:
        """Why the schedule does not take a program; None if it does."""
        return next(chain(program_reasons(facts, device), self.reasons(facts, device)), None)

    def illegal(self, facts: RowFacts, knobs: KnobsT, device: Device) -> str | None:
        """Why these knobs cannot be used; None if they can."""
        misfit = self.misfit(facts)
        if misfit:
            return misfit
        split = self.split(facts)
        return next(chain(self.malformed(split, knobs, device), self.unfit(split, knobs, device)), None) or (
            None if _has_grid(split, knobs) else f"{facts.rows} rows take more CTAs than a grid can have"
        )

    def legal(self, facts: RowFacts, device: Device) -> tuple[KnobsT, ...]:
        """The knobs to choose from. They are worked out once for all numbers of rows."""
        found = _legal(self, self.of_any_rows(facts), device)
        return found if facts.rows <= _FEW_ROWS else tuple(k for k in found if _has_grid(self.split(facts), k))

    def of_any_rows(self, facts: RowFacts) -> RowFacts:
        """The facts on which it depends whether knobs are legal: more rows take more CTAs of the same."""
        return replace(facts, row_extents=(1,) * len(facts.row_extents))

    def notes(self, facts: RowFacts, knobs: KnobsT) -> Iterator[str]:
        """Notes on what the schedule does to the numbers of a plan."""
        if not self.split(facts).resident(knobs):
            yield f"rows of {facts.columns} columns do not fit in registers: they are read again in each phase"

    def source(self, facts: RowFacts, knobs: KnobsT) -> str:
        """The translation unit, whose kernel is named ``row_program``."""
        split = self.split(facts)
        plan = split.plan(knobs)
        constants = {
            "CHUNK": split.chunk,
            "PIECE": plan.piece,
            "STEPS": split.steps(knobs),
            "PASSES": split.passes(knobs),
            "THREADS": knobs.threads,
            "COLUMN_READS": Access.READ_ONLY,
            "ROW_READS": Access.USUAL,
            "ROW_WRITES": Access.USUAL,
        }
        generated = prelude(plan, constants | self.constants(split, knobs), self.qualifiers)
        package = type(self).__module__.rpartition(".")[0]
        kernel = f"{package.rpartition('.')[2]}.cu"
        return render(template(package, kernel), generated, kernel)

    def launch(self, facts: RowFacts, knobs: KnobsT) -> Launch:
        """Grid, block and arguments."""
        split = self.split(facts)
        by_rows = split.by_rows(knobs)
        return Launch(
            grid=by_rows.grid(facts.rows),
            block=knobs.threads,
            arguments=arguments(split.plan(knobs)),
            cleared=tuple(store.view.tensor for store in facts.program.stores if store.amax),
            by_rows=by_rows,
        )


@lru_cache(maxsize=256)
def _legal(schedule: Schedule[KnobsT], facts: RowFacts, device: Device) -> tuple[KnobsT, ...]:
    return tuple(schedule.legal_knobs(schedule.split(facts), device))


def _has_grid(split: Split[KnobsT], knobs: KnobsT) -> bool:
    return split.by_rows(knobs).grid(split.facts.rows) <= MAX_CTAS


def best_first(ranked: Sequence[KnobsT], mode: heur_mode) -> list[KnobsT]:
    """Knobs to propose, of ranked ones: the best for each way to spread rows (``spread``) first, for these differ more
    than other knobs do; in mode B then all."""
    best: dict[object, KnobsT] = {}
    for knobs in ranked:
        best.setdefault(knobs.spread, knobs)
    few = list(best.values())[:PROPOSED]
    return list(dict.fromkeys([*few, *ranked])) if mode is heur_mode.B else few
