"""A built plan for other row counts. It is planned once per class of counts, and compiles only new kernel texts.

A class (``row_counts.row_class``) is planned on the first call with one of its counts: with the engines of the
built plan for the same nodes, and with knobs for the largest count of the class. Kernels do not contain row counts, so
knobs that were compiled before compile nothing. If every part of such a plan can be started for fewer rows, one plan
serves the class. A part for one number of rows, such as one of the reference engine, needs a plan per count, with the
knobs of its class.
"""

import functools
import math
from collections.abc import Callable

from graphfuse.base.errors import GraphNotSupportedError, VariantPackError
from graphfuse.contract.engine import NoKnobs
from graphfuse.contract.row_counts import joined, row_class
from graphfuse.op_graph import ir
from graphfuse.op_graph.lower import lower
from graphfuse.op_graph.recorded import Recorded
from graphfuse.planning import plan
from graphfuse.planning.overrides import Overrides, overridden, shapes
from graphfuse.planning.plan import Plan
from graphfuse.planning.planner import Planner
from graphfuse.runtime.executable import Executable
from graphfuse.runtime.variant_pack import Binder

SHAPES_KEPT = 256
"""Of which checks and fast paths are kept, the last used."""

CLASSES_KEPT = 128
"""Of which plans are kept, the last used. 1 to 4096 rows are 80 classes."""


class Reshaped:
    """One built plan of a graph for other extents of leading axes. Any number of threads may ask at once.

    recorded: the graph as its user made it, and `built` as it was frozen when the planner was made of it. index: of the
    plan. It is built.
    """

    def __init__(self, recorded: Recorded, built: ir.FrozenGraph, planner: Planner, index: int):
        self._recorded, self._built, self._planner = recorded, built, planner
        self._plan, self._executable = planner.at(index), planner.executable(index)
        self.executable = functools.lru_cache(maxsize=SHAPES_KEPT)(self._made)
        """What runs the plan with these overrides. VariantPackError for shapes and strides that are not accepted,
        GraphNotSupportedError where none of the engines takes them, else errors as of ``Planner.build``."""
        self._class = functools.lru_cache(maxsize=CLASSES_KEPT)(self._planned_class)
        self._built_class = functools.lru_cache(maxsize=CLASSES_KEPT)(self._executable_of_class)

    def _made(self, overrides: Overrides) -> Executable:
        frozen, uids = self._graph(overrides), {uid for uid, *_ in overrides}
        graph = lower(frozen)
        roomy, device = frozenset(t.id for t in graph.bound if t.uid in uids), self._planner.device

        def binder(p: Plan) -> Callable[[], Binder]:
            return lambda: Binder(graph, device, p.workspace_bytes, p.in_place, p.placed, roomy)

        if frozen.tensors == self._built.tensors:
            return self._executable.on(binder(self._plan))
        # A count of rows does not say what a virtual reshape makes.
        count, largest = self._counted(frozen) if uids <= {t.uid for t in graph.bound} else (0, None)
        fixed = any(t.workspace is not None for t in graph.tensors)  # at an offset that may follow the count
        if largest is not None and not fixed and self._executable.serves_fewer:
            executable, chosen = self._built_class(largest)
            if made := executable.of_fewer(count, row_class(count), graph, binder(chosen)):
                return made
        planner = self._planner.like(frozen)
        tuned = any(part.knobs != NoKnobs() for part in self._plan.parts)
        model = self._class(largest)[1] if tuned and largest is not None else self._plan
        chosen = planner.adopt(_alike(planner, model) or self._like(planner, model))
        return planner.executable().on(binder(chosen))

    def _graph(self, overrides: Overrides) -> ir.FrozenGraph:
        return overridden(self._recorded, self._built, shapes(self._built, overrides))

    def _planned_class(self, largest: Overrides) -> tuple[Planner, Plan]:
        planner = self._planner.like(self._graph(largest))
        return planner, self._like(planner, self._plan)

    def _executable_of_class(self, largest: Overrides) -> tuple[Executable, Plan]:
        planner, chosen = self._class(largest)
        chosen = planner.adopt(chosen)
        return planner.executable(), chosen

    def _counted(self, graph: ir.FrozenGraph) -> tuple[int, Overrides | None]:
        """Number of positions that the leading axes have together that are counted, as many axes as possible, of the
        tensors whose extents are not those of the built graph; and these tensors with the largest count of the class.
        None where there are no rows, and where no axes can be counted."""
        changed = [t for t in graph.bound if t.dim != self._built.tensors[t.id].dim]
        other = 1 + max(extent for t in graph.tensors for extent in t.dim)  # that joins with no extent by chance
        for leading in range(min((len(t.dim) for t in changed), default=1) - 1, 0, -1):
            counts, rows = {math.prod(t.dim[:leading]) for t in changed}, [_row(t, leading) for t in changed]
            if len(counts) > 1 or None in rows:
                continue
            (count,) = counts
            if not count:
                break
            tried = [_at(changed, leading, rows, n) for n in (other, row_class(count))]
            if all(map(self._fits, tried)):
                return count, tried[1]
        return 0, None

    def _fits(self, overrides: Overrides) -> bool:
        """True if the graph can have these shapes, and no others are changed by them."""
        try:
            made = self._graph(overrides)
        except VariantPackError:
            return False
        uids = {uid for uid, *_ in overrides}
        return all(t.dim == self._built.tensors[t.id].dim for t in made.bound if t.uid not in uids)

    def _like(self, planner: Planner, model: Plan) -> Plan:
        """The best plan with the engines of another for the same nodes; where there is none, that with its knobs, too,
        or the best of all. Of a plan that was named without any mode, its knobs are kept."""
        modes = [proposal.mode for proposal in self._planner.proposals]
        if not modes:
            return _named(planner, model)
        planner.create(modes)
        allowed = [p for p in planner.plans if not planner.barred(p)]
        same = [p for p in allowed if _recipe(p) == _recipe(model)]
        found = same[0] if same else _alike(planner, model) or next(iter(allowed), None)
        if found is None:
            planner.check_support()  # says why each is barred
        assert found is not None
        return found


def _row(t: ir.FrozenTensor, leading: int) -> int | None:
    """Elements from one slice to the next, None if no single stride is that. Of one slice what its tensor declares, if
    slices do not overlap then."""
    found = joined(t.dim, t.stride, leading)
    if found is None or any(extent != 1 for extent in t.dim[:leading]):
        return found
    return max(found, t.stride[leading - 1])


def _at(changed: list[ir.FrozenTensor], leading: int, rows: list[int | None], count: int) -> Overrides:
    """These tensors with so many slices, the counted axes joined to the last of them."""
    ones = leading - 1
    return tuple(
        (t.uid, (*(1,) * ones, count, *t.dim[leading:]), (*(count * row,) * ones, row, *t.stride[leading:]))
        for t, row in zip(changed, rows, strict=True)
    )


def _recipe(p: Plan) -> list[tuple[str, tuple[int, ...]]]:
    return [(part.engine.name, part.region.subgraph.node_ids) for part in p.parts]


def _alike(planner: Planner, model: Plan) -> Plan | None:
    """The plan with the engines and knobs of another; None where they are not accepted for this graph."""
    try:
        found = _named(planner, model)
    except GraphNotSupportedError:
        return None
    return found if _recipe(found) == _recipe(model) and not planner.barred(found) else None


def _named(planner: Planner, model: Plan) -> Plan:
    """Plan of the planner's graph with the engines and knobs of another."""
    engines = [part.engine for part in model.parts]
    knobs = [lambda region, own=part.knobs: own for part in model.parts]
    return plan.named(planner.graph, planner.regions, engines, planner.device, knobs)
