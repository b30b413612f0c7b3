"""Plans of a function for one split: one per class of row counts, or one per shape."""

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
    """A problem and the function that launches its plan. counted: whether that serves every count of the problem's
    class, not only the call's."""

    problem: Problem
    start: Callable[..., None]
    counted: bool = False


@dataclass(frozen=True, eq=False)
class Planning:
    """Everything that plans depend on. It holds no tensor, so that a fast path may keep it. name: the function's.
    device: device that plans are for. generation: of the tuned knobs. early: whether kernels may begin before the
    previous ones end, if they support it."""

    name: str
    variant: Variant
    split: CountSplit
    device: str
    generation: int
    early: bool

    def planned(self) -> PlannedProblem:
        """The plan for the split's count: that of its class, if it can serve the whole class; otherwise that of its
        shapes."""
        if found := self.by_class(self.split.count):
            return found
        problem = self.split.planned(self._problem)
        return PlannedProblem(problem, problem.executable.starts[self._dependent(problem)])

    def by_class(self, count: int) -> PlannedProblem | None:
        """The plan of a count's class, made for the largest count in it; None if it cannot serve others. That is so for
        devices that run no kernels, for no rows, or if a part of the plan is for one row count."""
        runs_kernels = self.device.startswith(("cuda", str(EMULATOR)))
        if not count or not runs_kernels:
            return None
        most = row_class(count)
        try:
            found = self._problem(self.split.at(most))
        except VariantPackError:
            return None  # raised again for the call's own layouts
        start = found.executable.counted(most, self._dependent(found))
        return None if start is None else PlannedProblem(found, start, counted=True)

    def _problem(self, layouts: tuple[tuple[str, Layout], ...]) -> Problem:
        return problems.plan(self.name, self.variant, layouts, self.device, self.generation)

    def _dependent(self, found: Problem) -> bool:
        return self.early and found.executable.undependable is None
