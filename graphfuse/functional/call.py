"""The first call of its kind: it is checked in full, planned and run, and creates a fast path for later calls."""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from graphfuse.base import settings
from graphfuse.base.device import EMULATOR
from graphfuse.base.dtypes import data_type
from graphfuse.base.errors import VariantPackError
from graphfuse.contract.row_counts import row_class
from graphfuse.functional import autograd_check
from graphfuse.functional.declaration import Function, Variant
from graphfuse.functional.layout import Layout, check, check_given, layout
from graphfuse.functional.planning import PlannedProblem, Planning
from graphfuse.functional.split import CountKind, CountSplit, split
from graphfuse.functional.tensor_parameter import Shape, complete
from graphfuse.runtime import buffers, fastcall, torch_private
from graphfuse.runtime import device as devices
from graphfuse.runtime.fastcall import CallForm, Given, New
from graphfuse.runtime.handle import stream_getter
from graphfuse.runtime.overlaps import Conflict
from graphfuse.runtime.storage import Storage
from graphfuse.tuned_tables import store

_Pair = tuple[str, str, Conflict]
_KEPT = 64  # cached answers for sizes and distances


@dataclass(frozen=True, eq=False)
class AcceptedCall:
    """A call whose arguments are accepted; only overlaps are not checked yet.

    given: the arguments by parameter.
    tensors: all tensors that the call uses, including those that it allocated.
    numbers: scalars passed by value, by parameter.
    layouts: of `tensors`.
    generation: of the tuned knobs (``tables.store``) when the call began.
    """

    function: Function
    variant: Variant
    given: Mapping[str, object]
    tensors: Mapping[str, torch.Tensor]
    numbers: Mapping[str, float]
    layouts: Mapping[str, Layout]
    generation: int

    @classmethod
    def of(cls, f: Function, given: Mapping[str, object]) -> "AcceptedCall":
        """The call with these arguments, by parameter; allocates what it returns. Raises VariantPackError, and
        VariantPackTypeError for wrong types, naming the argument."""
        generation = store.generation
        variant = f.variant(given)
        for a in variant.arguments:
            check_given(a, given.get(a.name))
        tensors = complete(variant.arguments, given)
        layouts = {a.name: layout(a, tensors[a.name]) for a in variant.arguments if a.name in tensors}
        first, device = next(iter(layouts)), next(iter(layouts.values())).device
        if device.type not in ("cpu", "cuda"):
            raise VariantPackError(f"{first} is on {device}; accepted: cpu, cuda")
        check(variant.arguments, layouts)
        numbers = {name: _number(name, given[name]) for name in f.numbers}
        autograd_check.check_written({a.name: given.get(a.name) for a in variant.arguments if a.written})
        return cls(f, variant, given, tensors, numbers, layouts, generation)

    @property
    def device(self) -> str:
        """The device that the call is planned for: its tensors' device, or for CPU tensors the emulator if
        GRAPHFUSE_DEVICE names it."""
        device = str(next(iter(self.layouts.values())).device)
        return str(EMULATOR) if device == "cpu" and settings.device() == str(EMULATOR) else device

    @functools.cached_property
    def split(self) -> CountSplit:
        return split(self.variant.arguments, self.layouts)

    @functools.cached_property
    def planning(self) -> Planning:
        early = self.given.get("enable_pdl", False) is not False
        return Planning(self.function.name, self.variant, self.split, self.device, self.generation, early)

    @functools.cached_property
    def planned(self) -> PlannedProblem:
        return self.planning.planned()

    @property
    def strided(self) -> tuple[str, ...]:
        """Parameters of tensors that the call only reads and that are not contiguous; none in sums over ranks, which
        read the same memory on other ranks."""
        if "rank" in self.function.parameters:
            return ()
        read = [a.name for a in self.variant.arguments if not a.written and self.given.get(a.name) is not None]
        return tuple(name for name in read if name in self.tensors and not self.tensors[name].is_contiguous())

    def packed(self) -> "AcceptedCall":
        """The call with contiguous tensors, without values, in place of those that are not."""
        new = {name: self.tensors[name].new_empty(self.tensors[name].shape) for name in self.strided}
        return AcceptedCall.of(self.function, {**self.given, **new})

    def run(self) -> None:
        """Launch the plan, and increment the versions of written tensors. Raises VariantPackError before any launch if
        a written tensor overlaps another."""
        planned, problem = self.planned, self.planned.problem
        for made, other, conflict in self._conflicts:
            found = _laid_out(conflict, made, other, self.layouts)
            if found.clash(self.tensors[made].data_ptr() - self.tensors[other].data_ptr()):
                raise found.refused(repr(made), repr(other))
        space = torch.empty(problem.workspace_bytes, dtype=torch.uint8, device=self._torch_device)
        places = {name: t.data_ptr() for name, t in self.tensors.items()} | dict(self.numbers)
        values = [places[name] for name in problem.values]
        planned.start(self.stream(), space.data_ptr(), self.split.count, *values)
        if self._written:
            torch_private.increment_version()(tuple(self.given[name] for name in self._written))

    def fast(self) -> Callable[..., object] | None:
        """The fast path for calls like this one; None if it could not recognize them, or if they are too rare for
        one."""
        given = [name for name in self.tensors if self.given.get(name) is not None]
        new = {a.name: a for a in self.split.arguments if a.name not in given}
        ignored = [a.name for a in self.variant.arguments if self.given.get(a.name) is not None and a.name not in given]
        is_comparable = all(fastcall.comparable(self.tensors[n]) for n in given)
        if ignored or not is_comparable or 0 in next(iter(self.layouts.values())).shape:
            return None
        # The call is accepted because gradients are off; a guard does not check that.
        if any(self.given[name].requires_grad for name in self._written):
            return None
        # A guard rejects a tensor that is given twice, as a call in place does.
        same = {name: next(n for n in given if self.tensors[n] is self.tensors[name]) for name in given}
        distinct = [name for name in given if same[name] == name]
        clashes = [c for c in self._conflicts if {*c[:2]} <= {*given} and same[c[0]] != same[c[1]]]
        f, split, planned = self.function, self.split, self.planned
        form = CallForm(
            f.name,
            f.parameters,
            f.numbers,
            f.options,
            tuple(a.name for a in f.arguments if a.name in f.parameters and self.given[a.name] is None),
            tuple(same.items()),
            tuple(self._given(name) for name in given),
            tuple(
                New(n, split.kinds[n] is CountKind.COUNTED, split.tail(n), split.kinds[n] is CountKind.SIZED, a.strides)
                for n, a in new.items()
            ),
            split.leading,
            len(split.tail(given[0])),
            tuple((made, other) for made, other, _ in clashes),
            planned.problem.values,
            self._written,
            tuple(n if n in self.tensors else None for n in f.results if n in self.tensors or n in f.asked),
        )
        starts = {row_class(split.count): (planned.start, planned.problem.workspace_bytes)}

        by_class = self.planning.by_class if planned.counted else lambda count: None

        def prepare(count: int) -> tuple[Callable[..., None], int] | None:
            found = by_class(count)  # `planning` holds no tensor
            if found is None:
                return None
            made = starts[row_class(count)] = (found.start, found.problem.workspace_bytes)
            return made

        sizes = self._guarded(distinct)
        names: dict[str, object] = {
            "store": store,
            "generation": self.generation,
            "alike": torch_private.guard([self.tensors[n] for n in distinct], *sizes),
            "stream": self.stream,
            "starts": starts,
            "prepare": prepare,
            "empty": self.empty,
        }
        names |= {f"{n}_kind": type(self.given[n]) for n in f.options}
        names |= {f"{n}_value": self.given[n] for n in f.options}
        names |= {f"{n}_type": self.tensors[n].dtype for n in new}
        for name in self.tensors:
            if split.kinds[name] is CountKind.SIZED:
                extents = functools.lru_cache(maxsize=_KEPT)(functools.partial(split.extents, name))
                names |= {f"{name}_extents": extents, f"{name}_nbytes": _nbytes(extents, self.layouts[name].dtype)}
        for n, pair in enumerate(clashes):
            names[f"clash{n}"] = functools.lru_cache(maxsize=_KEPT)(functools.partial(_clash, split, pair))
        return fastcall.function(form, names)

    @property
    def _torch_device(self) -> torch.device:
        return next(iter(self.layouts.values())).device

    @functools.cached_property
    def stream(self) -> Callable[[], int]:
        """Function that returns the address of the current stream."""
        return stream_getter(devices.get(self.device), None)

    @functools.cached_property
    def empty(self) -> Callable[..., torch.Tensor]:
        """Function that allocates, given shape, strides and data type."""
        device = self._torch_device
        if device.type == "cuda":
            return torch_private.empty_cuda(device)
        return lambda shape, stride, dtype: torch.empty_strided(shape, stride, dtype=dtype, device=device)

    @property
    def _written(self) -> tuple[str, ...]:
        """Parameters whose tensors the caller gave and the call writes. Each tensor appears once. Inference tensors are
        omitted, because they have no versions."""
        found: dict[int, str] = {}
        for a in self.variant.arguments:
            t = self.given.get(a.name)
            if a.written and a.name in self.tensors and t is not None and not t.is_inference():
                found.setdefault(id(t), a.name)
        return tuple(found.values())

    @functools.cached_property
    def _conflicts(self) -> tuple[_Pair, ...]:
        """The pairs of parameters, the first one written, that may not share memory, or only exactly."""
        named = self.planned.problem.parameters
        found = self.planned.problem.executable.binder.conflicts
        return tuple((named[made.name], named[other.name], conflict) for made, other, conflict in found)

    def _given(self, name: str) -> Given:
        split, t = self.split, self.layouts[name]
        kind, itemsize = split.kinds[name], t.dtype.itemsize
        tail, tail_strides = split.tail(name), t.stride[len(t.shape) - len(split.tail(name)) :]
        last = Storage(tail, tail_strides, itemsize).nbytes
        row = split.row_stride(name) * itemsize if kind is CountKind.COUNTED else 0
        packed = self._is_packed(name)
        return Given(name, kind is CountKind.COUNTED, tail, packed, row, last, t.alignment, kind is CountKind.SIZED)

    def _is_packed(self, name: str) -> bool:
        """True if a tensor is contiguous in all calls of a fast path, whose guard compares only this."""
        return (
            self.split.kinds[name] is not CountKind.FIXED
            and self.planned.counted
            and self.tensors[name].is_contiguous()
        )

    def _guarded(self, names: list[str]) -> tuple[list, list]:
        """Extents and strides, by tensor, that calls like this one have; None for those that depend on the count."""
        extents, strides = [], []
        for name in names:
            t, kind = self.layouts[name], self.split.kinds[name]
            leading = 0
            if self.planned.counted:
                leading = (
                    self.split.leading if kind is CountKind.COUNTED else len(t.shape) if kind is CountKind.SIZED else 0
                )
            free = leading if self._is_packed(name) else 0
            # For tensors that are not packed, all strides and all extents but the first are compared.
            open_ = free or int(leading > 0 and self.split.can_grow(name))
            extents.append([None] * open_ + list(t.shape[open_:]))
            strides.append([None] * free + list(t.stride[free:]))
        return extents, strides


def _laid_out(conflict: Conflict, made: str, other: str, layouts: Mapping[str, Layout]) -> Conflict:
    """The conflict of two parameters with these layouts."""
    one, two = (Storage(t.shape, t.stride, t.dtype.itemsize) for t in (layouts[made], layouts[other]))
    return Conflict(one, two, conflict.in_place, conflict.same_type)


def _clash(split: CountSplit, pair: _Pair, count: int, distance: int) -> bool:
    """True if two parameters overlap illegally for a count, if the first begins `distance` bytes after the second."""
    made, other, conflict = pair
    return _laid_out(conflict, made, other, dict(split.at(count))).clash(distance)


def _number(name: str, value: object) -> float:
    try:
        return buffers.number(value, data_type.FLOAT)
    except VariantPackError as error:
        raise type(error)(f"number {name!r}: {error}") from None


def _nbytes(extents: Callable[[int], tuple[Shape, Shape]], dtype: torch.dtype) -> Callable[[int], int]:
    return lambda count: math.prod(extents(count)[0]) * dtype.itemsize
