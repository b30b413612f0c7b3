"""A built plan for other row counts. It is planned once per class of counts, and only new kernel sources are compiled.

A class (``row_counts.row_class``) is planned at the first call with one of its counts, with the engines of the built
plan for the same nodes, and with knobs for the largest count of the class. Kernels do not contain row counts, so knobs
that were compiled before need no compilation. If every part of such a plan can be launched for fewer rows, one plan
serves the class. If a part is for one number of rows, such as one of the reference engine, there is a plan for each
count, with the knobs of its class.
"""

import functools
import math
from collections.abc import Callable

from graphfuse.base.errors import GraphNotSupportedError, VariantPackError
from graphfuse.contract.engine import NoKnobs
from graphfuse.contract.row_counts import joined, row_class
from graphfuse.op_graph import ir
from graphfuse.op_graph.graph_record import GraphRecord
from graphfuse.op_graph.lower import lower
from graphfuse.planning import plan
from graphfuse.planning.overrides import Overrides, overridden, shapes
from graphfuse.planning.plan import Plan
from graphfuse.planning.planner import Planner
from graphfuse.runtime.executable import Executable
from graphfuse.runtime.variant_pack import Binder

SHAPES_KEPT = 256
"""Number of shapes whose checks and fast paths are kept, the last used."""

CLASSES_KEPT = 128
"""Number of classes whose plans are kept, the last used. 1 to 4096 rows are 80 classes."""


class ReshapedPlan:
    """One built plan of a graph for other extents of leading axes. It is thread-safe.

    recorded: the graph as its user made it. built: the frozen graph that the planner was made of. index: of the plan,
    which is built.
    """

    def __init__(self, recorded: GraphRecord, built: ir.FrozenGraph, planner: Planner, index: int):
        self._recorded, self._built, self._planner = recorded, built, planner
        self._plan, self._executable = planner.at(index), planner.executable(index)
        self.executable = functools.lru_cache(maxsize=SHAPES_KEPT)(self._made)
        """Returns the executable of the plan with these overrides. Raises VariantPackError for shapes and strides that
        are not accepted, GraphNotSupportedError if no engine accepts them, and the errors of ``Planner.build``."""
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
        # If overrides set the output of a virtual reshape, its shape does not follow from a row count.
        count, largest = self._counted(frozen) if uids <= {t.uid for t in graph.bound} else (0, None)
        fixed = any(t.workspace is not None for t in graph.tensors)  # its offset may depend on the count
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
        """The row count, and overrides with the largest count of its class; (0, None) if rows cannot be counted.

        The row count is the product of the leading extents, of as many axes as possible, and is the same for all
        tensors whose extents differ from the built graph. The overrides have these tensors."""
        changed = [t for t in graph.bound if t.dim != self._built.tensors[t.id].dim]
        other = 1 + max(extent for t in graph.tensors for extent in t.dim)  # equals no extent by chance
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
        """True if the graph can have these shapes, and shapes of other bound tensors stay as they are."""
        try:
            made = self._graph(overrides)
        except VariantPackError:
            return False
        uids = {uid for uid, *_ in overrides}
        return all(t.dim == self._built.tensors[t.id].dim for t in made.bound if t.uid not in uids)

    def _like(self, planner: Planner, model: Plan) -> Plan:
        """The best plan with the engines of `model` for the same nodes, else the plan with its knobs as well, else the
        best plan. If `model` was named without any mode, its knobs are kept."""
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
    """Stride in elements between slices along the joined leading axes; None if there is no single stride.

    For a single slice, it is the declared stride, if slices would not overlap."""
    found = joined(t.dim, t.stride, leading)
    if found is None or any(extent != 1 for extent in t.dim[:leading]):
        return found
    return max(found, t.stride[leading - 1])


def _at(changed: list[ir.FrozenTensor], leading: int, rows: list[int | None], count: int) -> Overrides:
    """Overrides of these tensors with `count` slices, all along the last of the leading axes; others have extent 1."""
    ones = leading - 1
    return tuple(
        (t.uid, (*(1,) * ones, count, *t.dim[leading:]), (*(count * row,) * ones, row, *t.stride[leading:]))
        for t, row in zip(changed, rows, strict=True)
    )


def _recipe(p: Plan) -> list[tuple[str, tuple[int, ...]]]:
    return [(part.engine.name, part.region.subgraph.node_ids) for part in p.parts]


def _alike(planner: Planner, model: Plan) -> Plan | None:
    """The plan with the engines and knobs of `model` for the same nodes; None if this graph does not accept them."""
    try:
        found = _named(planner, model)
    except GraphNotSupportedError:
        return None
    return found if _recipe(found) == _recipe(model) and not planner.barred(found) else None


def _named(planner: Planner, model: Plan) -> Plan:
    """Plan of the planner's graph with the engines and knobs of `model`."""
    engines = [part.engine for part in model.parts]
    knobs = [lambda region, own=part.knobs: own for part in model.parts]
    return plan.named(planner.graph, planner.regions, engines, planner.device, knobs)
