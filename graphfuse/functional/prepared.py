"""Calls of functions on parts of some tensors, prepared: launched again for tensors like these, by addresses alone.

One comparison of the tensors replaces those of each function, and no view is made.
"""

from collections.abc import Callable, Mapping, Sequence

import torch

from graphfuse.functional.call import AcceptedCall
from graphfuse.runtime import torch_private
from graphfuse.runtime.fastcall import DECLINED, At, LaunchedPlan, NewTensor, comparable, sequence

_GUARDS_KEPT = 8
_grad_enabled = torch.is_grad_enabled

Call = tuple[Callable[..., object], tuple[object, ...]]
"""A function that ``graphfuse.functional.function`` made, and its arguments by position."""


class PreparedCall:
    """Runs kernels on tensors like accepted ones, without gradients. Tensors are alike if they differ only in memory.

    run: function of the tensors, as ``runtime.fastcall.sequence`` makes it; None if no tensors are accepted. kind: of
    the device."""

    def __init__(self, run: Callable[..., object] | None, kind: str) -> None:
        self._run = run
        self._kind = kind
        self._guards: list[tuple[torch_private.Check, bool]] = []  # with whether a tensor requires gradients

    def __call__(self, *tensors: object) -> object:
        """The result; DECLINED with gradients or autocast, and for other values."""
        if torch.is_autocast_enabled(self._kind):
            return DECLINED
        if self._are_accepted(tensors):
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
        """Declares that the kernels may run on tensors like these."""
        if self._run is not None and all(map(comparable, tensors)) and len(self._guards) < _GUARDS_KEPT:
            extents = [t.shape for t in tensors], [t.stride() for t in tensors]
            alike = torch_private.guard(tensors, *extents)
            self._guards.append((alike, any(t.requires_grad for t in tensors)))


def prepare(given: Mapping[str, torch.Tensor], new: Mapping[str, torch.Tensor], calls: Sequence[Call]) -> PreparedCall:
    """The calls for tensors like `given`. They accept none if the reference engine runs one in place of a kernel, if
    two of the tensors share memory, or if an argument is a copy.

    new: tensors that each call allocates; it returns the first. The arguments of `calls` that are tensors are parts of
    these and of `given`. The calls were run before.
    """
    kind, tensors, accepted = next(iter(given.values())).device.type, {**given, **new}, [_accepted(*c) for c in calls]
    steps = _steps(accepted, tensors)
    if steps is None:
        return PreparedCall(None, kind)
    layouts = {name: NewTensor(tuple(t.shape), t.stride(), t.dtype) for name, t in new.items()}
    return PreparedCall(sequence(tuple(given), layouts, steps, accepted[0].stream, accepted[0].empty), kind)


def _accepted(function: Callable[..., object], arguments: Sequence[object]) -> AcceptedCall:
    f = function.declaration  # type: ignore[attr-defined]
    return AcceptedCall.of(f, {**f.defaults, **dict(zip(f.parameters, arguments, strict=False))})


def _steps(calls: Sequence[AcceptedCall], tensors: Mapping[str, torch.Tensor]) -> list[LaunchedPlan] | None:
    memory = {_address(t): name for name, t in tensors.items()}
    if len(memory) < len(tensors) or any(call.planned.problem.fallback is not None for call in calls):
        return None
    if any(_address(t) not in memory for call in calls for t in call.tensors.values()):
        return None

    def value(call: AcceptedCall, name: str) -> At | float:
        if name in call.numbers:
            return call.numbers[name]
        part = call.tensors[name]
        whole = memory[_address(part)]
        return At(whole, part.data_ptr() - tensors[whole].data_ptr())

    def step(call: AcceptedCall) -> LaunchedPlan:
        problem = call.planned.problem
        values = tuple(value(call, name) for name in problem.values)
        return LaunchedPlan(call.planned.start, call.split.count, values, problem.workspace_bytes)

    return [step(call) for call in calls]


def _address(t: torch.Tensor) -> int:
    """Address of a tensor's storage."""
    return t.untyped_storage().data_ptr()
