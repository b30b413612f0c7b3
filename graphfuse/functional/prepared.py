"""Calls of functions on parts of some tensors, prepared: launched again for tensors like these, by addresses alone.

One comparison of the tensors replaces those of each function, and no view is made.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from graphfuse.functional.call import AcceptedCall
from graphfuse.runtime import torch_private
from graphfuse.runtime.fastcall import ALIGNMENT, DECLINED, At, LaunchedPlan, NewTensor, comparable, sequence
from graphfuse.runtime.storage import Storage

_GUARDS_KEPT = 8
"""Forms of tensors that a call accepts: parameters and others, in inference mode and outside."""
_grad_enabled = torch.is_grad_enabled

Call = tuple[Callable[..., object], tuple[object, ...]]
"""A function that ``graphfuse.functional.function`` made, and its arguments by position."""


class PreparedCall:
    """Runs kernels on tensors like accepted ones, without gradients. Tensors are alike if they differ only in memory.

    run: function of the tensors, as ``runtime.fastcall.sequence`` makes it; None if it is for no tensors. given: the
    tensors that it was made for. Others are accepted only with the same layouts, types and device."""

    def __init__(self, run: Callable[..., object] | None, given: Sequence[torch.Tensor]) -> None:
        self._run = run
        self._kind = given[0].device.type
        self._layouts = [_layout(t) for t in given]
        self._guards: list[tuple[torch_private.Check, bool]] = []  # with whether a tensor requires gradients

    def __call__(self, *tensors: object) -> object:
        """The result; DECLINED with gradients or autocast, for other values, and for addresses that are not
        aligned."""
        if not torch.is_autocast_enabled(self._kind) and self._are_accepted(tensors):
            return self._run(*tensors)  # type: ignore[misc]
        return DECLINED

    def _are_accepted(self, tensors: Sequence[object]) -> bool:
        try:
            for t in tensors:
                if t.is_nested:  # type: ignore[attr-defined] # comparing one ends the process
                    return False
            for alike, requires_grad in self._guards:
                if alike(*tensors):
                    return not (requires_grad and _grad_enabled())
        except (AttributeError, RuntimeError, TypeError):  # of no tensor
            pass
        return False

    def accept(self, *tensors: torch.Tensor) -> None:
        """Makes calls with tensors like these run the kernels, if these are for them. A few forms are accepted."""
        if self._run is None or len(self._guards) == _GUARDS_KEPT or len(set(map(id, tensors))) < len(tensors):
            return
        if not all(comparable(t) and torch_private.is_plain(t) for t in tensors):
            return
        if [_layout(t) for t in tensors] == self._layouts and not any(alike(*tensors) for alike, _ in self._guards):
            alike = torch_private.guard(tensors, [t.shape for t in tensors], [t.stride() for t in tensors])
            self._guards.append((alike, any(t.requires_grad for t in tensors)))


def are_aligned(tensors: Iterable[torch.Tensor]) -> bool:
    """True if calls can be prepared for tensors at these addresses."""
    return not any(t.data_ptr() % ALIGNMENT for t in tensors)


def prepare(given: Mapping[str, torch.Tensor], new: Mapping[str, torch.Tensor], calls: Sequence[Call]) -> PreparedCall:
    """The calls for tensors like `given`, which are aligned. They accept none if the reference engine runs one in place
    of a kernel, if two of the tensors overlap, or if an argument is a copy.

    new: tensors that each call allocates; it returns the first. The arguments of `calls` that are tensors are parts of
    these and of `given`. The calls were run before.
    """
    accepted, whole = [_accepted(*call) for call in calls], [*given.values()]
    plans = _plans(accepted, {**given, **new})
    if plans is None or not are_aligned(whole):
        return PreparedCall(None, whole)
    layouts = {name: NewTensor(tuple(t.shape), t.stride(), t.dtype) for name, t in new.items()}
    return PreparedCall(sequence([*given], layouts, plans, accepted[0].stream, accepted[0].empty), whole)


def _accepted(function: Callable[..., object], arguments: Sequence[object]) -> AcceptedCall:
    f = function.declaration  # type: ignore[attr-defined]
    return AcceptedCall.of(f, {**f.defaults, **dict(zip(f.parameters, arguments, strict=False))})


def _plans(calls: Sequence[AcceptedCall], tensors: Mapping[str, torch.Tensor]) -> list[LaunchedPlan] | None:
    spans = sorted((*_span(t), name) for name, t in tensors.items())
    if any(end > start for (_, end, _), (start, *_) in zip(spans, spans[1:], strict=False)):
        return None
    if any(call.planned.problem.fallback is not None for call in calls):
        return None
    places = {t.data_ptr(): _place(t.data_ptr(), spans) for call in calls for t in call.tensors.values()}
    if None in places.values():
        return None

    def plan(call: AcceptedCall) -> LaunchedPlan:
        problem = call.planned.problem
        values = [
            call.numbers[name] if name in call.numbers else places[call.tensors[name].data_ptr()]
            for name in problem.values
        ]
        return LaunchedPlan(call.planned.start, call.split.count, tuple(values), problem.workspace_bytes)

    return [plan(call) for call in calls]


def _place(address: int, spans: Sequence[tuple[int, int, str]]) -> At | None:
    """An address as a place in one of the tensors with these spans; None if it is in none."""
    return next((At(name, address - start) for start, end, name in spans if start <= address < end), None)


def _span(t: torch.Tensor) -> tuple[int, int]:
    """Addresses of a tensor's first byte, and behind its last one."""
    start = t.data_ptr()
    return start, start + Storage(tuple(t.shape), t.stride(), t.element_size()).nbytes


def _layout(t: torch.Tensor) -> tuple[object, ...]:
    return t.shape, t.stride(), t.dtype, t.device
