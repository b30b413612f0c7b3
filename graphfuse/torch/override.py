"""``override``: torch's own fused norms run by graphfuse, for models that are not to be edited.

It registers kernels for ``aten::_fused_rms_norm``, ``aten::native_layer_norm`` and their backward, which
``torch.nn.functional.rms_norm`` and ``layer_norm`` dispatch to. Autograd stays torch's own. A call that graphfuse
declines runs the previous kernel, and the report says why.
"""

import functools
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from graphfuse.base import settings
from graphfuse.base.device import EMULATOR
from graphfuse.base.errors import VariantPackError
from graphfuse.contract.row_counts import row_class
from graphfuse.explain import fallback
from graphfuse.functional.explanation import explain
from graphfuse.runtime import torch_private
from graphfuse.runtime.bounded_dict import make_room
from graphfuse.torch.operators.computation import TYPES
from graphfuse.torch.operators.definitions import LAYER_NORM, LAYER_NORM_BIAS, RMS_NORM, epsilon
from graphfuse.torch.operators.formula import Operator

DEVICES = {"cuda": "CUDA", "cpu": "CPU"}
"""Torch's dispatch keys by device type."""

Tensors = tuple[torch.Tensor | None, ...]


class _Declined(Exception):
    """The reason why torch's own kernel runs a call."""


@dataclass
class OverrideReport:
    """Counts of calls by where they ran while an override was active. Prints as a table. graphfuse: calls by operator.
    torch: calls by operator and reason."""

    graphfuse: Counter[str] = field(default_factory=Counter)
    torch: Counter[tuple[str, str]] = field(default_factory=Counter)

    def __str__(self) -> str:
        if not self.graphfuse and not self.torch:
            return "no call of an overridden operator"
        rows = [(name, "graphfuse", count, "") for name, count in sorted(self.graphfuse.items())]
        rows += [(name, "torch", count, why) for (name, why), count in sorted(self.torch.items())]
        width = max(len(name) for name, *_ in rows)
        lines = (f"{name:{width}}  {where:9}  {count:>9}  {why}".rstrip() for name, where, count, why in rows)
        return "\n".join((f"{'operator':{width}}  {'ran on':9}  {'calls':>9}  why", *lines))


class Override:
    """A context manager, which ``override`` returns."""

    def __init__(self, devices: tuple[str, ...]):
        self._devices = devices
        self.report = OverrideReport()

    def __enter__(self) -> OverrideReport:
        _installed.add(self)
        return self.report

    def __exit__(self, *error: object) -> None:
        _installed.remove(self)

    def keep(self) -> "Override":
        """Activate the override until ``undo`` is called. Returns itself; ``report`` goes on counting."""
        self.__enter__()
        return self

    def undo(self) -> None:
        """End what ``keep`` began."""
        self.__exit__()


def override(devices: Sequence[str] = ("cuda",)) -> Override:
    """Override of torch's RMSNorm and layer norm, forward and backward, by graphfuse's kernels.

    ``with override() as report:`` holds until the block is left, even by an error; ``override().keep()`` until its
    ``undo``, or for good. devices: types of devices whose tensors it is for. "cpu" is for tests: the reference engine
    runs there, or the emulator.

    It holds for all threads of the process, because torch has one table of kernels. So a backward that begins in the
    block and runs on threads of torch's is by graphfuse, too. Blocks may be nested and overlap; the last one to end
    restores what was there before the first, and each report counts what ran while its own block was open. A forward in
    the block and its backward after it are compatible, and the other way round. torch does not promise that its table
    can be changed while other threads call the operators: they should not run a norm when the override begins or ends.

    torch's own kernel runs, and the report says why, if tensors are of several types or of an unsupported one, have no
    elements, have a weight or bias that is not contiguous, or if graphfuse has no kernel but only the reference engine.
    Results have torch's types, shapes and layouts. It has no effect where torch does not dispatch to its fused
    operators: ``rms_norm`` on CPU tensors is several operators of torch, and inductor replaces both norms by its own
    code. Other backends of a compiled graph call them.

    Raises VariantPackError for a device that is not one of DEVICES.
    """
    found = tuple(dict.fromkeys(devices))
    unknown = [d for d in found if d not in DEVICES]
    if unknown or isinstance(devices, str) or not found:
        given = devices if isinstance(devices, str) else unknown or found
        raise VariantPackError(f"devices is {given!r}; accepted: a sequence of {', '.join(map(repr, DEVICES))}")
    return Override(found)


class _Installed:
    """The active overrides, and the registrations of their kernels, which exist while one is active."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._open: list[Override] = []
        self._registered: dict[str, ExitStack] = {}  # by device type
        self._inside = threading.local()

    def add(self, one: Override) -> None:
        with self._lock:
            for device in one._devices:
                if device not in self._registered:
                    self._registered[device] = self._register(device)
            self._open.append(one)

    def remove(self, one: Override) -> None:
        with self._lock:
            if one not in self._open:
                raise VariantPackError("this override does not hold; accepted: one that was entered or kept, once each")
            self._open.remove(one)
            for device in one._devices:
                if not any(device in other._devices for other in self._open):
                    self._registered.pop(device).close()

    def _register(self, device: str) -> ExitStack:
        key, kernels = DEVICES[device], ExitStack()
        before = {name: _kernel(name, key) for name in _OPERATORS}  # before ours are registered
        library = kernels.enter_context(torch_private.registrations("aten"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the warning that kernels are overridden
            for name, theirs in before.items():
                if theirs is not None:
                    kernel = functools.partial(self._run, device, name, _OPERATORS[name], theirs)
                    library.impl(name, kernel, key, with_keyset=True)
        return kernels

    def _run(
        self, device: str, name: str, run: Callable[..., Tensors], before: Any, keys: Any, *values: Any
    ) -> Tensors:
        if getattr(self._inside, "it", False):  # a kernel calls an overridden operator itself
            return before(keys, *values)
        self._inside.it = True
        try:
            made = run(*values)
        except (_Declined, VariantPackError) as error:
            self._note(device, name, str(error))
            return before(keys, *values)
        finally:
            self._inside.it = False
        self._note(device, name)
        return made

    def _note(self, device: str, name: str, why: str | None = None) -> None:
        with self._lock:
            for report in (one.report for one in dict.fromkeys(self._open) if device in one._devices):
                if why is None:
                    report.graphfuse[name] += 1
                else:
                    report.torch[name, why] += 1


def _kernel(name: str, key: str) -> Callable[..., Tensors] | None:
    """The kernel that torch would run; None if there is none, as for CUDA in a torch without it. For RMSNorm of CPU
    tensors, torch has a forward but no backward; the formula takes its place."""
    try:
        return torch.library.get_kernel(f"aten::{name}", key).call_boxed
    except RuntimeError:
        formula = name == "_fused_rms_norm_backward" and key == "CPU"
        return (lambda keys, *values: _backward_of_formula(*values)) if formula else None


def _backward_of_formula(grad, x, shape, rstd, weight, mask) -> Tensors:
    dims = tuple(range(-len(shape), 0))
    normal = x * rstd
    scaled = grad if weight is None else grad * weight
    dx = (scaled - normal * (scaled * normal).mean(dims, keepdim=True)) * rstd
    dweight = (grad * normal).flatten(0, x.dim() - len(shape) - 1).sum(0) if x.dim() > len(shape) else grad * normal
    has_dweight = mask[1] and weight is not None
    return dx.to(x.dtype) if mask[0] else None, dweight.to(weight.dtype) if has_dweight else None


def _rms_norm(x, shape, weight, eps) -> Tensors:
    return _forward(RMS_NORM, x, shape, epsilon(eps, x), weight=weight)


def _rms_norm_backward(grad, x, shape, rstd, weight, mask) -> Tensors:
    return _backward(RMS_NORM, grad, x, shape, (rstd,), mask, weight)


def _layer_norm(x, shape, weight, bias, eps) -> Tensors:
    if bias is None:
        y, *found = _forward(LAYER_NORM, x, shape, eps, weight=weight)
    else:
        y, *found = _forward(LAYER_NORM_BIAS, x, shape, eps, weight=weight, bias=bias)
    # On the CPU torch returns statistics in the type of x.
    return y, *(t.to(x.dtype) if x.device.type == "cpu" else t for t in found)


def _layer_norm_backward(grad, x, shape, mean, rstd, weight, bias, mask) -> Tensors:
    if bias is None:
        return *_backward(LAYER_NORM, grad, x, shape, (mean, rstd), mask[:2], weight), None
    return _backward(LAYER_NORM_BIAS, grad, x, shape, (mean, rstd), mask, weight, bias)


def _forward(operator: Operator, x, shape, eps, **scales) -> Tensors:
    y, *statistics = _made(operator.training, *_flat(shape, x, **scales), eps)
    return y.view(x.shape), *(t.view(*x.shape[: x.dim() - len(shape)], *(1 for _ in shape)) for t in statistics)


def _backward(operator: Operator, grad, x, shape, statistics, mask, weight, *bias) -> Tensors:
    """The gradients of x, weight and bias, in their shapes and types."""
    rows, flat_x, scale = _flat(shape, grad, x, weight=weight)
    # One number per row, in the type that graphfuse keeps them in.
    kept = (t.to(torch.promote_types(t.dtype, torch.float32)).reshape(*rows.shape[:-1], 1) for t in statistics)
    needed = mask[0], mask[1] and weight is not None, *mask[2:]
    made = _made(operator.gradients, rows, flat_x, scale, *kept, *needed)
    return tuple(
        None if t is None else t.view(a.shape).to(a.dtype) for t, a in zip(made, (x, weight, *bias), strict=True)
    )


_OPERATORS: dict[str, Callable[..., Tensors]] = {
    "_fused_rms_norm": _rms_norm,
    "_fused_rms_norm_backward": _rms_norm_backward,
    "native_layer_norm": _layer_norm,
    "native_layer_norm_backward": _layer_norm_backward,
}
"""Functions that run the overridden operators of aten, by name."""


def _flat(shape: Sequence[int], *tensors: torch.Tensor | None, **scales: torch.Tensor | None) -> list[Any]:
    """Tensors with all normalized dimensions flattened. Raises _Declined for a call that torch's own kernel runs."""
    given = [*tensors, *scales.values()]
    there = [t for t in given if t is not None]
    x, full = there[0], len(tensors)
    own = tuple(shape)
    ends = [t.shape[-len(own) :] if i < full else t.shape for i, t in enumerate(given) if t is not None]
    if not own or any(tuple(end) != own for end in ends) or any(t.shape != x.shape for t in tensors):
        raise _Declined("shapes that do not fit")  # torch's kernel raises the error
    if any(t.dtype != x.dtype for t in there):
        kinds = " and ".join(dict.fromkeys(str(t.dtype).removeprefix("torch.") for t in there))
        raise _Declined(f"tensors of {kinds}; accepted: one type")
    if x.dtype not in TYPES:
        raise _Declined(f"tensors of {str(x.dtype).removeprefix('torch.')}")
    if not all(t.numel() for t in there):
        raise _Declined("no elements")
    found = [t.flatten(-len(shape)) if t is not None and len(shape) > 1 else t for t in given]
    if any(t is not None and t.shape[-1] > 1 and t.stride(-1) != 1 for t in found[full:]):
        raise _Declined("a weight or bias that is not contiguous")
    # A gradient of sum() is one expanded element. torch makes such tensors contiguous, too.
    return [t.contiguous() if t is not None and t.stride(-1) != 1 else t for t in found]


def _made(function: Callable[..., object], *values: object) -> Tensors:
    if (why := _without_kernel(function, values)) is not None:
        raise _Declined(why)
    made = function(*values)
    return made if isinstance(made, tuple) else (made,)


def _cache_key(t: torch.Tensor) -> tuple:
    """Key of a tensor that determines the engine. It is the same for all row counts that share a plan."""
    of = row_class(t.numel() // t.shape[-1]) if t.is_contiguous() else (t.shape, t.stride())
    return of, t.dim(), t.shape[-1], t.dtype, t.device


_KEPT = 1024
_without: dict[tuple, str | None] = {}


def _without_kernel(function: Callable[..., object], values: Sequence[object]) -> str | None:
    """The reason why only the reference engine would run a call, if kernels are available; torch's own kernel is
    faster."""
    x = values[0]
    if x.device.type == "cpu" and settings.device() != str(EMULATOR):
        return None
    key = function, *(_cache_key(v) if isinstance(v, torch.Tensor) else v for v in values)
    if key not in _without:
        why = fallback(explain(function, *values))
        make_room(_without, _KEPT)
        _without[key] = None if why is None else f"only the reference engine would run: {why}"
    return _without[key]


_installed = _Installed()
