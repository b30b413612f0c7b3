"""Stretches: what a layer computes between two of its other modules, in regions chosen for the shapes of a call.

Examples are adaptive norms with a scale and a shift per sample, gates, and the residual sums, casts and norms among
them. Which tensors have all rows, and which have one row per sample, is known only in a call. So a stretch is recorded
on fake tensors when it is first called with given shapes. Regions are found in the record as in a compiled graph.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import FunctionType

import torch
from torch.compiler import is_dynamo_compiling
from torch.fx import Graph, GraphModule

from graphfuse.runtime import torch_private
from graphfuse.torch.analysis.reads import hold, watched
from graphfuse.torch.analysis.set_forward import RUN_ON, is_plain
from graphfuse.torch.analysis.symbols import ForwardDeclined
from graphfuse.torch.analysis.trace import (
    CallSequence,
    Source,
    TracedTensors,
    record_calls,
    sources_of,
    tensors_of,
    without_copies,
)
from graphfuse.torch.convolutional.layout_mode import outside_mode
from graphfuse.torch.regions import selection

Modules = Sequence[torch.nn.Module]

_observed = torch_private.needs_dispatcher()
_KEPT = 64
"""Largest number of stretches, and of shapes of each, that are kept."""


@dataclass(frozen=True, eq=False)
class ShapedStretch:
    """A stretch for tensors of given shapes. watches: predicates of the modules, one each: True if everything that the
    module's forward read is unchanged. sources: of each argument of `run`. run: computes the stretch; None if it has no
    region. operations: what each region computes."""

    watches: tuple[Callable[[torch.nn.Module], bool], ...]
    sources: tuple[Source, ...] = ()
    run: Callable[..., Sequence[object]] | None = None
    operations: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Stretch:
    """Consecutive calls of norms and torch operations. classes: of the modules. shaped: records by properties of the
    tensors."""

    calls: CallSequence
    classes: tuple[type, ...]
    shaped: dict[object, list[ShapedStretch]] = field(default_factory=dict)

    @cached_property
    def function(self) -> FunctionType:
        """Function of modules followed by the arguments of their calls. It returns their results. It runs torch
        operations if gradients are required, or while torch traces."""
        calls, count = self.calls, len(self.classes)

        def run_stretch(*values: object) -> Sequence[object]:
            modules, given = values[:count], values[count:]
            made = None if is_dynamo_compiling() else self._run(modules, given)
            return calls.of_modules(modules, given) if made is None else made

        return run_stretch

    @outside_mode
    def _run(self, modules: Modules, given: Sequence[object]) -> Sequence[object] | None:
        found = self._found(modules, given)
        if found is None or found.run is None:
            return None
        return found.run(*(given[s] if isinstance(s, int) else getattr(modules[s[0]], s[1]) for s in found.sources))

    def _found(self, modules: Modules, given: Sequence[object]) -> ShapedStretch | None:
        tensors = [*given]
        for module in modules:
            if not is_plain(module):
                return None
            tensors += (*module._parameters.values(), *module._buffers.values())
        has_gradients, known = torch.is_grad_enabled(), []
        for t in tensors:
            if t is None and len(known) >= len(given):  # a parameter that a norm does not have
                known.append(None)
                continue
            if not isinstance(t, torch.Tensor) or not torch_private.is_plain(t) or t.device.type not in RUN_ON:
                return None
            if has_gradients and t.requires_grad:
                return None
            known.append((t.shape, t.stride(), t.dtype, t.device))
        if torch.is_autocast_enabled(given[0].device.type):
            return None
        records = self.shaped.setdefault(tuple(known), [])
        found = next((one for one in records if hold(one.watches, modules)), None)
        if found is None and not _observed():
            found = _shaped(self.calls, modules, given)
            records.append(found)
            if len(self.shaped) > _KEPT:
                del self.shaped[next(iter(self.shaped))]
        return found


_stretches: deque[Stretch] = deque(maxlen=_KEPT)
"""The most recent stretches. Layers of a model have equal ones, which share their records."""


def stretch(calls: CallSequence, modules: Modules) -> Stretch:
    classes = tuple(map(type, modules))
    for other in _stretches:
        if other.classes == classes and other.calls == calls:
            return other
    _stretches.append(made := Stretch(calls, classes))
    return made


def _shaped(calls: CallSequence, modules: Modules, given: Sequence[torch.Tensor]) -> ShapedStretch:
    domains = dict[int, TracedTensors]()
    try:
        graph = _record(calls, modules, given, domains)
    except ForwardDeclined:
        graph = None
    reads = (domains[n].reads.values() if n in domains else () for n in range(len(modules)))
    watches = tuple(map(watched, map(tuple, reads)))
    if graph is None:
        return ShapedStretch(watches)
    module = GraphModule(torch.nn.Module(), graph)
    verdicts, _ = selection.replace_in(module, declines=False)
    operations = tuple(region.program.operations for region, why in verdicts if not why)
    if not operations:
        return ShapedStretch(watches)
    for node in module.graph.nodes:
        node.meta.clear()
    return ShapedStretch(watches, sources_of(calls, modules), module.forward, operations)


def _record(
    calls: CallSequence, modules: Modules, given: Sequence[torch.Tensor], domains: dict[int, TracedTensors]
) -> Graph:
    """The graph of calls with tensors of these shapes. domains: see `recorded`."""
    mode = torch_private.fake_mode()
    if mode is None:
        raise ForwardDeclined("this torch has no tensors without data")
    fake, own = mode(), (t for module in modules for _, t in tensors_of(module))
    with torch_private.without_modes(), torch.no_grad():
        flat = [fake.from_tensor(t.detach()) for t in (*given, *own)]
        with fake:
            return without_copies(record_calls(calls, modules, flat, domains))
