"""``Schedule``: the interface of a way to spread the rows of a program over threads."""

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
"""Number of knobs that are proposed, except in mode B."""
_FEW_ROWS = MAX_CTAS // 16  # so many rows need no more CTAs than a grid can have, in clusters of any size


class Schedule(abc.ABC, Generic[KnobsT]):
    """A way to spread rows over threads. Its kernel is the .cu file of its package's name, in the package. Attributes:

    knobs: its frozen dataclass of knobs, which identifies the schedule in plans.
    qualifiers: of the kernel, in C++.
    split: makes the split of rows from facts for which `misfit` is None.
    legal_knobs: yields the legal knobs to choose from.
    malformed: yields why knobs cannot be used for any rows.
    unfit: yields why knobs that are not malformed cannot be used for some rows. Only the first fault is reported.
    cost: makes a function that estimates the nanoseconds of a launch from its knobs.
    """

    knobs: ClassVar[type]
    qualifiers: ClassVar[str] = "GF_RESIDENT_KERNEL(THREADS, CTAS_PER_SM)"
    split: ClassVar[Callable[[RowFacts], Split]]
    legal_knobs: ClassVar[Callable[[Split, Device], Iterator[KnobsT]]]
    malformed: ClassVar[Callable[[Split, KnobsT, Device], Iterator[str]]]
    unfit: ClassVar[Callable[[Split, KnobsT, Device], Iterator[str]]]
    cost: ClassVar[Callable[[Split, Device], Callable[[KnobsT], float]]]

    def prefers(self, facts: RowFacts) -> bool:
        """True if the schedule was made for such programs. It is cheap to compute."""
        return False

    def pays(self, facts: RowFacts, device: Device) -> bool:
        """True if the schedule accepts the program, and is estimated to be the fastest one for this number of rows."""
        return False

    @abc.abstractmethod
    def reasons(self, facts: RowFacts, device: Device) -> Iterator[str]:
        """Reasons against a program in addition to those of all schedules, each with the tensor and the limit.

        Only the first is reported, so a check may rely on the checks before it."""

    def propose(self, facts: RowFacts, device: Device, mode: heur_mode) -> Sequence[KnobsT]:
        """Knobs to try, best first."""
        return best_first(sorted(self.legal(facts, device), key=self.cost(self.split(facts), device)), mode)

    @abc.abstractmethod
    def constants(self, split: Split[KnobsT], knobs: KnobsT) -> Mapping[str, bool | int | Access]:
        """Constants of the schedule's kernel, values by C++ name. They are added to those of all kernels, or override
        these."""

    def problem(self, facts: RowFacts) -> ProblemClass:
        """The problem class of tuned knobs, for programs that prefer this schedule."""
        return problem(facts, self.split(facts).chunk)

    def misfit(self, facts: RowFacts) -> str | None:
        """Why none of the schedule's knobs can be used; None if some may."""
        return None

    def refusal(self, facts: RowFacts, device: Device) -> str | None:
        """Why the schedule declines a program; None if it accepts it."""
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
        """The legal knobs to choose from. They are cached for all numbers of rows."""
        found = _legal(self, self.of_any_rows(facts), device)
        return found if facts.rows <= _FEW_ROWS else tuple(k for k in found if _has_grid(self.split(facts), k))

    def of_any_rows(self, facts: RowFacts) -> RowFacts:
        """The facts without the number of rows, on which legality of knobs does not depend: more rows only need more
        CTAs."""
        return replace(facts, row_extents=(1,) * len(facts.row_extents))

    def notes(self, facts: RowFacts, knobs: KnobsT) -> Iterator[str]:
        """Notes on the numerics of a plan that depend on the schedule."""
        if not self.split(facts).resident(knobs):
            yield f"rows of {facts.columns} columns do not fit in registers: they are read again in each phase"

    def source(self, facts: RowFacts, knobs: KnobsT) -> str:
        """CUDA C++ source of the kernel, which is named ``row_program``."""
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
    """Knobs to propose, from ranked ones: the best for each ``spread``, as these differ most; in mode B then all."""
    best: dict[object, KnobsT] = {}
    for knobs in ranked:
        best.setdefault(knobs.spread, knobs)
    few = list(best.values())[:PROPOSED]
    return list(dict.fromkeys([*few, *ranked])) if mode is heur_mode.B else few
