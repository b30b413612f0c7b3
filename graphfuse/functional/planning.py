"""The plans of a function for one split: one per class of row counts, or one per shape."""

from collections.abc import Callable
from dataclasses import dataclass

from graphfuse.base.device import EMULATOR
from graphfuse.base.errors import VariantPackError
from graphfuse.contract.row_counts import row_class
from graphfuse.functional import problem as problems
from graphfuse.functional.declaration import Variant
from graphfuse.functional.layout import Layout
from graphfuse.functional.problem import Problem
from graphfuse.functional.split import CountSplit


@dataclass(frozen=True, eq=False)
class PlannedProblem:
    """A problem and what starts its plan. counted: whether that serves every count of the problem's class, not only the
    count of the call."""

    problem: Problem
    start: Callable[..., None]
    counted: bool = False


@dataclass(frozen=True, eq=False)
class Planning:
    """All that plans depend on. It holds no tensor, so that a fast path may keep it.

    name: the function's. device: that plans are for. generation: of the tuned knobs. early: whether kernels may begin
    before those before them end, where they can.
    """

    name: str
    variant: Variant
    split: CountSplit
    device: str
    generation: int
    early: bool

    def planned(self) -> PlannedProblem:
        """The plan of the split's count: of its class, where a plan can serve all of the class; else of its shapes."""
        if found := self.by_class(self.split.count):
            return found
        problem = self.split.planned(self._problem)
        return PlannedProblem(problem, problem.executable.starts[self._dependent(problem)])

    def by_class(self, count: int) -> PlannedProblem | None:
        """The plan of the class of a count, made for the largest of the class; None where it could not serve others:
        on devices that run no kernels, for no rows, or where a part of the plan is for one number of rows."""
        runs_kernels = self.device.startswith(("cuda", str(EMULATOR)))
        if not count or not runs_kernels:
            return None
        most = row_class(count)
        try:
            found = self._problem(self.split.at(most))
        except VariantPackError:
            return None  # raised for the call's own layouts
        start = found.executable.counted(most, self._dependent(found))
        return None if start is None else PlannedProblem(found, start, counted=True)

    def _problem(self, layouts: tuple[tuple[str, Layout], ...]) -> Problem:
        return problems.plan(self.name, self.variant, layouts, self.device, self.generation)

    def _dependent(self, found: Problem) -> bool:
        return self.early and found.executable.undependable is None
