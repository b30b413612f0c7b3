"""A plan with its kernels loaded: from variant packs to calls that start them."""

import functools
from collections.abc import Callable, Mapping, Sequence

from graphfuse.engine import Buffers
from graphfuse.errors import GraphNotSupportedError
from graphfuse.ir import TensorId
from graphfuse.runtime.form import Form, form
from graphfuse.runtime.variant_pack import Binder, Bindings

Calls = tuple[Callable[[], None], ...]
"""Frozen launches: one for each part of a plan, in the order they run."""

Freeze = Callable[[Buffers, int, int, bool], Callable[[], None]]
"""Freezes the launch of one part, given buffers, scratch address, stream and dependent (``launch.Launcher.freeze``)."""

_FORMS_KEPT = 8
_CALLS_KEPT = 1024


class Known(dict):
    """Calls by what they were frozen with. Forgets everything when it is full."""

    def keep(self, key: object, calls: Calls) -> Calls:
        if len(self) >= _CALLS_KEPT:
            self.clear()
        self[key] = calls
        return calls


def no_calls(pack: object) -> None:
    """Recalls nothing."""


class Executable:
    """Any number of threads may use one at once: what it knows is only ever added to or replaced.

    freezes, scratch: of each part of the plan; scratch is where in the workspace its own memory begins.
    binder: made on first use. undependable: why its kernels may not begin before the kernel before them
    ends; None if they may.
    """

    def __init__(
        self,
        binder: Callable[[], Binder],
        freezes: Sequence[Freeze],
        scratch: Sequence[int],
        undependable: str | None,
    ):
        self._new_binder = binder
        self._parts = tuple(zip(freezes, scratch, strict=True))
        self.undependable = undependable
        self._forms: tuple[tuple[Form, Known], ...] = ()

    @functools.cached_property
    def _binder(self) -> Binder:
        return self._new_binder()

    def recall(self, pack: object, workspace: object, stream: int, dependent: bool) -> Calls | None:
        """The calls for a pack like one that was prepared; None for any other. Errors as of ``prepare``."""
        forms = self._forms  # others may replace it meanwhile
        for place, (known, calls) in enumerate(forms):
            key = known.key(pack, workspace, stream, dependent)
            if key is not None:
                if place:
                    self._forms = (forms[place], *forms[:place], *forms[place + 1 :])
                return calls.get(key) or calls.keep(key, self.at(*known.given(pack, key), stream, dependent))
        return None

    @property
    def latest(self) -> Form | None:
        """The form of the last pack that was recalled or prepared."""
        return self._forms[0][0] if self._forms else None

    def quick(self, stream: Callable[[], int]) -> Callable[[object], Calls | None]:
        """`recall` for packs of the latest form, without a workspace and not dependent, on what `stream` says at the
        time of a call."""
        return (self._forms and self._forms[0][0].quick(stream, self._forms[0][1])) or no_calls

    def prepare(self, pack: Mapping, workspace: object, stream: int, dependent: bool) -> Calls:
        """The calls for a pack: errors as of ``Binder.bind``, GraphNotSupportedError where `dependent` may not be."""
        calls = self.freeze(self.bind(pack, workspace), stream, dependent)
        found = form(pack, workspace, lambda key: self._binder.find(key, []))
        if found is not None:
            self._forms = ((found, Known()), *self._forms[: _FORMS_KEPT - 1])
        return calls

    def bind(self, pack: Mapping, workspace: object) -> Bindings:
        return self._binder.bind(pack, workspace)

    def at(self, given: Mapping[TensorId, object], workspace: int, stream: int, dependent: bool) -> Calls:
        """The calls for addresses and numbers by tensor, of which all else is known to be right."""
        return self.freeze(self._binder.place(given, workspace), stream, dependent)

    def freeze(self, bindings: Bindings, stream: int, dependent: bool) -> Calls:
        if dependent and self.undependable:
            raise GraphNotSupportedError(self.undependable)
        return tuple(freeze(bindings, bindings.workspace + at, stream, dependent) for freeze, at in self._parts)
