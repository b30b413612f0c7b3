"""``Executable``: a built plan, which checks and runs variant packs, and keeps fast paths for similar packs."""

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from graphfuse.base.errors import GraphNotSupportedError
from graphfuse.contract.engine import FrozenKernel
from graphfuse.op_graph.ir import FrozenGraph, FrozenTensor
from graphfuse.runtime import fastcall
from graphfuse.runtime.fastcall import Execute, FrozenPart, Space, Start
from graphfuse.runtime.variant_pack import WORKSPACE_ALIGNMENT, Binder, Bindings

_FORMS_KEPT = 8


def declines(pack: object, workspace: object, stream: int, dependent: bool) -> bool:
    """False: the fast path of an executable that has accepted no pack yet."""
    return False


class NotBuilt:
    """Placeholder of a plan that is not built. Its fast path declines every pack."""

    like_last: Execute = staticmethod(declines)


class Executable:
    """A built plan that can be executed. It is thread-safe, as its state is only added to or replaced.

    parts: returns the frozen parts of the plan; its argument is whether kernels may begin before the work before them
    ends (early). binder: makes the binder on first use. undependable: why kernels may not begin early; None if they
    may. count: the row count to run, if the plan was made for a larger one; 0 for the count that it was made for.
    start: returns the function that launches such a plan, given whether kernels may begin early. like_last: the fast
    path of the last pack that was accepted.
    """

    def __init__(
        self,
        graph: FrozenGraph,
        parts: Callable[[bool], Sequence[FrozenPart]],
        binder: Callable[[], Binder],
        undependable: str | None,
        count: int = 0,
        start: Callable[[bool], Start] | None = None,
    ):
        self.undependable = undependable
        self.like_last: Execute = declines
        self._graph = graph
        self._parts = parts
        self.counted = functools.cache(self._counted)
        self._new_binder = binder
        self._count, self._start_of = count, start or (lambda dependent: self._start(parts(dependent)))
        self._forms: tuple[Execute, ...] = ()

    @functools.cached_property
    def binder(self) -> Binder:
        """The object that checks variant packs."""
        return self._new_binder()

    @property
    def bound(self) -> tuple[FrozenTensor, ...]:
        """The tensors that a call gives, in the order of the arguments of ``starts``."""
        return self._graph.bound

    @functools.cached_property
    def starts(self) -> Mapping[bool, Start]:
        """Functions that launch the plan, by whether kernels may begin early."""
        ways = (False,) if self.undependable else (False, True)
        return MappingProxyType({dependent: self._start_of(dependent) for dependent in ways})

    @property
    def serves_fewer(self) -> bool:
        """True if every part can be launched for fewer rows than it was made for."""
        return all(part.frozen.rows is not None for part in self._parts(False))

    @property
    def calls(self) -> tuple[int, ...]:
        """Numbers of the parts that are no kernels."""
        return tuple(n for n, part in enumerate(self._parts(False)) if not isinstance(part.frozen, FrozenKernel))

    def on(self, binder: Callable[[], Binder]) -> "Executable":
        """Executable of the same plan with another binder, which checks packs."""
        return Executable(self._graph, self._parts, binder, self.undependable)

    def of_fewer(self, count: int, most: int, graph: FrozenGraph, binder: Callable[[], Binder]) -> "Executable | None":
        """Executable of the same plan for a smaller row count; None if a part does not allow it.

        count: the row count, at most `most`, for which the plan was made. graph, binder: with tensors of `count` rows.
        """
        if self.counted(most, False) is None:
            return None
        return Executable(graph, self._parts, binder, self.undependable, count, lambda d: self.counted(most, d))

    def _counted(self, count: int, dependent: bool) -> Start | None:
        """Function that launches the plan for any row count up to this one; None if a part is for one number of rows.

        count: the row count that the plan was made for. The number of rows of each part, and the extent of their
        outermost axis, are multiples of it. For another count, the part is launched with the same multiple of that.
        """
        found = []
        for part in self._parts(dependent):
            rows = part.frozen.rows
            if rows is None or part.frozen.outermost % count:
                return None
            found.append(FrozenPart(part.frozen, part.scratch, rows // count))
        return self._start(found)

    def _start(self, parts: Sequence[FrozenPart]) -> Start:
        binder = self.binder
        return fastcall.start(self.bound, dict(binder.in_workspace), binder.constants, parts)

    def run(self, pack: Mapping, workspace: object, stream: int, dependent: bool) -> bool:
        """Run a pack that is like one of the last accepted ones. Returns False, having done nothing, for any other."""
        forms = self._forms  # read once, as other threads may replace it
        for place, form in enumerate(forms):
            if form(pack, workspace, stream, dependent):
                if place:
                    self._keep((form, *forms[:place], *forms[place + 1 :]))
                return True
        return False

    def accept(self, pack: Mapping, workspace: object, stream: int, dependent: bool) -> None:
        """Check a pack in full, run it, and keep its fast path.

        Raises the errors of ``Binder.bind``, and GraphNotSupportedError if kernels may not begin early and `dependent`
        is True."""
        self.bind(pack, workspace, dependent)(stream)
        binder = self.binder
        used = ((binder.find(key, []), key) for key in pack if key is not None)
        keys = {tensor.id: key for tensor, key in used if tensor is not None}
        form = fastcall.execute(
            pack,
            workspace,
            {t.id: (keys[t.id], t) for t in self.bound},
            binder.conflicts,
            Space(binder.workspace_bytes, WORKSPACE_ALIGNMENT[binder.device.kind] if binder.workspace_bytes else 0),
            self.starts,
            self._count,
        )
        if form is not None and not binder.reaching:  # otherwise ragged offsets are checked at each call
            self._keep((form, *self._forms[: _FORMS_KEPT - 1]))

    def bind(self, pack: Mapping, workspace: object, dependent: bool) -> Callable[[int], None]:
        """Function that launches the plan on these buffers, given a stream. Errors as in `accept`."""
        if dependent and self.undependable:
            raise GraphNotSupportedError(self.undependable)
        found = self.binder.bind(pack, workspace)
        return self.at(found, dependent)

    def at(self, bindings: Bindings, dependent: bool = False) -> Callable[[int], None]:
        """Function that launches the plan at these addresses, given a stream."""
        run, space = self.starts[dependent], bindings.workspace
        values = tuple(bindings.scalars[t.id] if t.by_value else bindings.addresses[t.id] for t in self.bound)
        return lambda stream: run(stream, space, self._count, *values)

    def _keep(self, forms: tuple[Execute, ...]) -> None:
        self._forms, self.like_last = forms, forms[0]
