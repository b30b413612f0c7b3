"""A prepared plan: checks variant packs, runs them, and keeps fast paths for similar packs."""

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
    """The fast path of an executable that has accepted no pack yet."""
    return False


class NotBuilt:
    """Stands where no plan is built: no pack is like one that it ran."""

    like_last: Execute = staticmethod(declines)


class Executable:
    """A built plan that can be executed. Any number of threads may use one at once: what it knows is only ever added to
    or replaced.

    parts: the frozen parts of the plan, given whether work may begin before the work before it ends. binder: made on
    first use. undependable: why it may not begin early; None if it may. count: that it is started for, of a plan that
    was made for a larger one; 0 for the number of rows that it was made for. start: what starts such a plan, given
    whether work may begin early. like_last: the fast path of the last pack that was accepted.
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
        """Checks variant packs."""
        return self._new_binder()

    @property
    def bound(self) -> tuple[FrozenTensor, ...]:
        """The tensors that a call gives, in the order in which it is started with them."""
        return self._graph.bound

    @functools.cached_property
    def starts(self) -> Mapping[bool, Start]:
        """Functions that start the plan with its count, by whether work may begin early."""
        ways = (False,) if self.undependable else (False, True)
        return MappingProxyType({dependent: self._start_of(dependent) for dependent in ways})

    @property
    def serves_fewer(self) -> bool:
        """True if every part can be started for fewer rows than it was made for."""
        return all(part.frozen.rows is not None for part in self._parts(False))

    @property
    def calls(self) -> tuple[int, ...]:
        """The parts that are no kernels."""
        return tuple(n for n, part in enumerate(self._parts(False)) if not isinstance(part.frozen, FrozenKernel))

    def on(self, binder: Callable[[], Binder]) -> "Executable":
        """The same plan, with other checks of packs."""
        return Executable(self._graph, self._parts, binder, self.undependable)

    def of_fewer(self, count: int, most: int, graph: FrozenGraph, binder: Callable[[], Binder]) -> "Executable | None":
        """The same plan, which was made for a count of `most`, for `count`, which is no more; None where it cannot be.
        graph, binder: of tensors with `count` in the place of `most`."""
        if self.counted(most, False) is None:
            return None
        return Executable(graph, self._parts, binder, self.undependable, count, lambda d: self.counted(most, d))

    def _counted(self, count: int, dependent: bool) -> Start | None:
        """Function that starts the plan for any count up to this one; None where a part is for one number of rows.

        count: what the plan was made for. The number of rows of each part is a multiple of it, and so is the extent of
        their outermost axis: a call with another count starts the part with the same multiple of that.
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
        """Run a pack that is like one of those last accepted; False, with nothing done, for any other."""
        forms = self._forms  # others may replace it meanwhile
        for place, form in enumerate(forms):
            if form(pack, workspace, stream, dependent):
                if place:
                    self._keep((form, *forms[:place], *forms[place + 1 :]))
                return True
        return False

    def accept(self, pack: Mapping, workspace: object, stream: int, dependent: bool) -> None:
        """Check a pack in full, run it, and keep its fast path. Errors as of ``Binder.bind``; GraphNotSupportedError
        where kernels may not begin early and `dependent` asks for it."""
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
        if form is not None and not binder.reaching:  # else each call's offsets are held against its memory
            self._keep((form, *self._forms[: _FORMS_KEPT - 1]))

    def bind(self, pack: Mapping, workspace: object, dependent: bool) -> Callable[[int], None]:
        """Function that starts the plan on these buffers, given a stream. Errors as of `accept`."""
        if dependent and self.undependable:
            raise GraphNotSupportedError(self.undependable)
        found = self.binder.bind(pack, workspace)
        return self.at(found, dependent)

    def at(self, bindings: Bindings, dependent: bool = False) -> Callable[[int], None]:
        """Function that starts the plan at these addresses, given a stream."""
        run, space = self.starts[dependent], bindings.workspace
        values = tuple(bindings.scalars[t.id] if t.by_value else bindings.addresses[t.id] for t in self.bound)
        return lambda stream: run(stream, space, self._count, *values)

    def _keep(self, forms: tuple[Execute, ...]) -> None:
        self._forms, self.like_last = forms, forms[0]
