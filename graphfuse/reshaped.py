"""A built plan for other row counts. It is planned once per class of counts, and compiles only new kernel texts.

A class (``row_counts.row_class``) is planned on the first call with one of its counts: with the engines of the
built plan for the same nodes, and with knobs for the largest count of the class. Kernels do not contain row counts, so
knobs that were compiled before compile nothing. If every part of such a plan can be started for fewer rows, one plan
serves the class. A part for one number of rows, such as one of the reference engine, needs a plan per count, with the
knobs of its class.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from graphfuse import ir, plan
from graphfuse.engine import NoKnobs
from graphfuse.enums import heur_mode
from graphfuse.errors import GraphNotSupportedError, VariantPackError
from graphfuse.ir import TensorId
from graphfuse.lower import lower
from graphfuse.overrides import Overrides, Shape, overridden, shapes
from graphfuse.plan import Plan
from graphfuse.planner import Planner
from graphfuse.recorded import Recorded
from graphfuse.row_counts import joined, row_class
from graphfuse.runtime.executable import Executable
from graphfuse.runtime.variant_pack import Binder

SHAPES_KEPT = 256
"""Of which checks and fast paths are kept, the last used."""

CLASSES_KEPT = 128
"""Of which plans are kept, the last used. 1 to 4096 rows are 80 classes."""


@dataclass(frozen=True)
class Counted:
    """Shapes whose leading axes, joined to one, have `count` positions. most: the largest count of its class. largest:
    the same shapes with that count."""

    count: int
    most: int
    largest: Overrides


class Reshaped:
    """One built plan of a graph for other extents of leading axes. Any number of threads may ask at once.

    recorded: the graph as its user made it, and `built` as it was frozen when the planner was made of it. index: of the
    plan. It is built.
    """

    def __init__(self, recorded: Recorded, built: ir.Graph, planner: Planner, index: int):
        self._recorded, self._built, self._planner = recorded, built, planner
        self._plan, self._executable = planner.at(index), planner.executable(index)
        self.executable = functools.lru_cache(maxsize=SHAPES_KEPT)(self._made)
        """What runs the plan with these overrides. VariantPackError for shapes and strides that are not accepted,
        GraphNotSupportedError where none of the engines takes them, else errors as of ``Planner.build``."""
        self._class = functools.lru_cache(maxsize=CLASSES_KEPT)(self._planned_class)
        self._built_class = functools.lru_cache(maxsize=CLASSES_KEPT)(self._executable_of_class)

    def _made(self, overrides: Overrides) -> Executable:
        frozen = self._graph(overrides)
        graph = lower(frozen)
        uids = set(overrides.uids)
        roomy = frozenset(t.id for t in graph.bound if t.uid in uids)
        if frozen.tensors == self._built.tensors:
            return self._executable.on(self._binder(graph, self._plan, roomy))
        # A count of rows does not say what a virtual reshape makes.
        counted = self._counted(frozen) if uids <= {t.uid for t in graph.bound} else None
        fixed = any(t.workspace is not None for t in graph.tensors)  # at an offset that may follow the count
        if counted is not None and not fixed and self._executable.serves_fewer:
            largest, chosen = self._built_class(counted.largest)
            binder = self._binder(graph, chosen, roomy)
            if made := largest.of_fewer(counted.count, counted.most, graph, binder):
                return made
        planner = self._planner.like(frozen)
        tuned = any(part.knobs != NoKnobs() for part in self._plan.parts)
        model = self._class(counted.largest)[1] if tuned and counted is not None else self._plan
        chosen = planner.adopt(_alike(planner, model) or _like(planner, model, self._modes))
        return planner.executable().on(self._binder(planner.graph, chosen, roomy))

    def _graph(self, overrides: Overrides) -> ir.Graph:
        return overridden(self._recorded, self._built, shapes(self._built, overrides))

    def _binder(self, graph: ir.Graph, chosen: Plan, roomy: frozenset[TensorId]) -> Callable[[], Binder]:
        device = self._planner.device
        return lambda: Binder(graph, device, chosen.workspace_bytes, chosen.in_place, chosen.placed, roomy)

    @property
    def _modes(self) -> list[heur_mode]:
        return [proposal.mode for proposal in self._planner.proposals]

    def _planned_class(self, largest: Overrides) -> tuple[Planner, Plan]:
        planner = self._planner.like(self._graph(largest))
        return planner, _like(planner, self._plan, self._modes)

    def _executable_of_class(self, largest: Overrides) -> tuple[Executable, Plan]:
        planner, chosen = self._class(largest)
        chosen = planner.adopt(chosen)
        return planner.executable(), chosen

    def _counted(self, graph: ir.Graph) -> Counted | None:
        """The leading axes that are counted, as many as possible, of the tensors whose extents are not those of the
        built graph; None where there are no rows."""
        changed = [t for t in graph.bound if t.dim != self._built.tensors[t.id].dim]
        for leading in range(min((len(t.dim) for t in changed), default=1) - 1, 0, -1):
            counts = {math.prod(t.dim[:leading]) for t in changed}
            rows = {t.id: row for t in changed if (row := _row(t, leading)) is not None}
            if len(counts) > 1 or len(rows) < len(changed):
                continue
            (count,) = counts
            if not count:
                return None
            other = 1 + max(extent for t in graph.tensors for extent in t.dim)  # that joins with no extent by chance
            if all(self._fits(graph, _at(changed, leading, rows, n)) for n in (other, row_class(count))):
                return Counted(count, row_class(count), _at(changed, leading, rows, row_class(count)))
        return None

    def _fits(self, graph: ir.Graph, overrides: Overrides) -> bool:
        """Whether the graph can have these shapes, and no others are changed by them."""
        try:
            made = self._graph(overrides)
        except VariantPackError:
            return False
        uids = set(overrides.uids)
        return all(t.dim == made.tensors[t.id].dim for t in graph.bound if t.uid not in uids)


def _row(t: ir.Tensor, leading: int) -> int | None:
    """Elements from one slice to the next, None if no single stride is that. Of one slice what its tensor declares, if
    slices do not overlap then."""
    found = joined(t.dim, t.stride, leading)
    if found is None or any(extent != 1 for extent in t.dim[:leading]):
        return found
    return max(found, t.stride[leading - 1])


def _at(changed: list[ir.Tensor], leading: int, rows: Mapping[TensorId, int], count: int) -> Overrides:
    """These tensors with so many slices, the counted axes joined to the last of them."""
    ones = leading - 1

    def placed() -> Iterator[tuple[int, Shape, Shape]]:
        for t in changed:
            row = rows[t.id]
            dim = (*(1,) * ones, count, *t.dim[leading:])
            yield t.uid, dim, (*(count * row,) * ones, row, *t.stride[leading:])

    return Overrides(*map(tuple, zip(*placed(), strict=True)))


def _recipe(p: Plan) -> list[tuple[str, tuple[int, ...]]]:
    return [(part.engine.name, part.region.subgraph.node_ids) for part in p.parts]


def _alike(planner: Planner, model: Plan) -> Plan | None:
    """The plan with the engines and knobs of another; None where they are not accepted for this graph."""
    engines, knobs = [part.engine for part in model.parts], [part.knobs for part in model.parts]
    try:
        found = plan.named(planner.graph, planner.regions, engines, planner.device, knobs)
    except GraphNotSupportedError:
        return None
    return found if _recipe(found) == _recipe(model) and not planner.barred(found) else None


def _like(planner: Planner, model: Plan, modes: list[heur_mode]) -> Plan:
    """The best plan with the engines of another for the same nodes; where there is none, that with its knobs, too, or
    the best of all. modes: that are asked; of a plan that was named without any, its knobs are kept."""
    if not modes:
        engines, knobs = [part.engine for part in model.parts], [part.knobs for part in model.parts]
        return plan.named(planner.graph, planner.regions, engines, planner.device, knobs)
    planner.create(modes)
    allowed = [p for p in planner.plans if not planner.barred(p)]
    same = [p for p in allowed if _recipe(p) == _recipe(model)]
    found = same[0] if same else _alike(planner, model) or next(iter(allowed), None)
    if found is None:
        planner.check_support()  # says why each is barred
    assert found is not None
    return found
