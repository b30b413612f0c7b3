"""One call: checked in full and run, and from what it came to the fast path for calls like it."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from graphfuse import settings
from graphfuse.device import EMULATOR
from graphfuse.dtypes import data_type
from graphfuse.errors import VariantPackError
from graphfuse.functional import watched
from graphfuse.functional.argument import complete
from graphfuse.functional.declaration import Function, Variant
from graphfuse.functional.layout import ALIGNMENT, Layout, check, check_given, layout
from graphfuse.functional.problem import Problem, plan
from graphfuse.functional.split import Kind, Split, split
from graphfuse.runtime import buffers, fastcall, torch_private
from graphfuse.runtime import device as devices
from graphfuse.runtime.fastcall import Form, Given, New
from graphfuse.runtime.handle import stream_getter
from graphfuse.runtime.overlaps import Conflict
from graphfuse.runtime.storage import Storage
from graphfuse.tables import store

_KEPT = 64


@dataclass(frozen=True, eq=False)
class Planned:
    """A problem and what starts it; counted: for any number of rows of its class."""

    problem: Problem
    start: Callable[..., None]
    counted: bool = False


@dataclass(frozen=True, eq=False)
class Call:
    """A call whose arguments are accepted but for their addresses.

    given: by parameter. tensors: all that it uses, those that are allocated among them. numbers: by parameter.
    """

    function: Function
    variant: Variant
    given: Mapping[str, object]
    tensors: Mapping[str, torch.Tensor]
    numbers: Mapping[str, float]
    layouts: Mapping[str, Layout]
    generation: int

    @classmethod
    def of(cls, f: Function, given: Mapping[str, object]) -> "Call":
        """VariantPackError, and VariantPackTypeError for wrong types, naming the argument."""
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
        watched.refuse({a.name: given.get(a.name) for a in variant.arguments if a.written})
        return cls(f, variant, given, tensors, numbers, layouts, generation)

    @property
    def device(self) -> str:
        """Where it is planned for: where its tensors are; of the CPU's on the emulator, if that is asked for."""
        device = str(next(iter(self.layouts.values())).device)
        return str(EMULATOR) if device == "cpu" and settings.device() == str(EMULATOR) else device

    @functools.cached_property
    def split(self) -> Split:
        return split(self.variant.arguments, self.layouts)

    @functools.cached_property
    def planned(self) -> Planned:
        """By the class of its number of rows if its plan serves any number of them, else by itself."""
        return self.by_class(self.split.count) or Planned(*self._exact())

    def by_class(self, count: int) -> Planned | None:
        """The plan for a class of row counts; None where plans are for one number."""
        runs_kernels = self.device.startswith(("cuda", str(EMULATOR)))
        if not count or not runs_kernels:
            return None
        most = fastcall.row_class(count)
        try:
            problem = self._problem(self.split.at(most))
        except VariantPackError:
            return None  # said of the call's own layouts
        start = problem.executable.counted(most, self._dependent(problem))
        return None if start is None else Planned(problem, start, counted=True)

    def run(self) -> None:
        """VariantPackError where memory that is written is also something else's."""
        planned, problem = self.planned, self.planned.problem
        for conflict in self._conflicts:
            conflict.check(self.tensors)
        space = torch.empty(problem.workspace_bytes, dtype=torch.uint8, device=self._torch_device)
        places = {name: t.data_ptr() for name, t in self.tensors.items()} | dict(self.numbers)
        values = [places[name] for name in problem.values]
        planned.start(self._stream(), space.data_ptr(), self.split.count, *values)
        if self._written:
            torch_private.increment_version()(tuple(self.given[name] for name in self._written))

    def fast(self) -> Callable[..., object] | None:
        """What runs calls like this one; None if they cannot be told."""
        given = [name for name in self.tensors if self.given.get(name) is not None]
        new = [name for name in self.tensors if name not in given]
        ignored = [a.name for a in self.variant.arguments if self.given.get(a.name) is not None and a.name not in given]
        # Most begin at multiples of 16 bytes; the others are looked at in full.
        usual = all(fastcall.comparable(self.tensors[n]) and self.layouts[n].alignment == ALIGNMENT for n in given)
        if ignored or not usual or 0 in next(iter(self.layouts.values())).shape:
            return None
        # Accepted as gradients are off, which a guard does not look at.
        if any(self.given[name].requires_grad for name in self._written):
            return None
        # A guard says no to one tensor given twice, which a call in place does.
        same = {name: next(n for n in given if self.tensors[n] is self.tensors[name]) for name in given}
        distinct = [name for name in given if same[name] == name]
        clashes = [c for c in self._conflicts if c.made in given and c.other in given and same[c.made] != same[c.other]]
        f, split, planned = self.function, self.split, self.planned
        form = Form(
            f.name,
            f.parameters,
            f.numbers,
            f.options,
            tuple(a.name for a in f.arguments if a.name in f.parameters and self.given[a.name] is None),
            tuple(same.items()),
            tuple(self._given(name) for name in given),
            tuple(New(n, split.kinds[n] is Kind.COUNTED, split.tail(n), split.kinds[n] is Kind.SIZED) for n in new),
            split.leading,
            len(split.tail(given[0])),
            tuple((c.made, c.other) for c in clashes),
            planned.problem.values,
            self._written,
            tuple(n if n in self.tensors else None for n in f.results if n in self.tensors or n in f.asked),
            ALIGNMENT,
        )
        starts = {fastcall.row_class(split.count): (planned.start, planned.problem.workspace_bytes)}

        def prepare(count: int) -> tuple[Callable[..., None], int] | None:
            found = self.by_class(count) if planned.counted else None
            if found is None:
                return None
            made = starts[fastcall.row_class(count)] = (found.start, found.problem.workspace_bytes)
            return made

        sizes = self._guarded(distinct)
        names: dict[str, object] = {
            "store": store,
            "generation": self.generation,
            "alike": torch_private.guard([self.tensors[n] for n in distinct], *sizes),
            "stream": self._stream,
            "starts": starts,
            "prepare": prepare,
            "empty": _empty(self._torch_device),
        }
        names |= {f"{n}_kind": type(self.given[n]) for n in f.options}
        names |= {f"{n}_value": self.given[n] for n in f.options}
        names |= {f"{n}_type": self.tensors[n].dtype for n in new}
        for name in self.tensors:
            if split.kinds[name] is Kind.SIZED:
                names[f"{name}_extents"] = functools.lru_cache(maxsize=_KEPT)(functools.partial(split.extents, name))
        names |= {f"clash{n}": functools.lru_cache(maxsize=_KEPT)(c.clash) for n, c in enumerate(clashes)}
        return fastcall.function(form, names)

    def _problem(self, layouts: tuple[tuple[str, Layout], ...]) -> Problem:
        return plan(self.function.name, self.variant, layouts, self.device, self.generation)

    def _exact(self) -> tuple[Problem, Callable[..., None]]:
        problem = self._problem(tuple(self.layouts.items()))
        return problem, problem.executable.starts[self._dependent(problem)]

    def _dependent(self, problem: Problem) -> bool:
        return self.given.get("enable_pdl", False) is not False and problem.executable.undependable is None

    @property
    def _torch_device(self) -> torch.device:
        return next(iter(self.layouts.values())).device

    @functools.cached_property
    def _stream(self) -> Callable[[], int]:
        return stream_getter(devices.get(self.device), None)

    @property
    def _written(self) -> tuple[str, ...]:
        """What the caller gave to be written, each tensor once, but for those of inference, which have no versions."""
        found: dict[int, str] = {}
        for a in self.variant.arguments:
            t = self.given.get(a.name)
            if a.written and a.name in self.tensors and t is not None and not t.is_inference():
                found.setdefault(id(t), a.name)
        return tuple(found.values())

    @functools.cached_property
    def _conflicts(self) -> tuple["_Pair", ...]:
        """What may not share memory, of the plan."""
        problem, found = self.planned.problem, []
        for made, other, conflict in problem.executable.binder.conflicts:
            names = problem.parameters[made.name], problem.parameters[other.name]
            found.append(_Pair(*names, self.split, conflict.in_place, conflict.same_type))
        return tuple(found)

    def _given(self, name: str) -> Given:
        split, t = self.split, self.layouts[name]
        kind, itemsize = split.kinds[name], t.dtype.itemsize
        tail, tail_strides = split.tail(name), t.stride[len(t.shape) - len(split.tail(name)) :]
        last = Storage(tail, tail_strides, itemsize).nbytes
        row = split.row_stride(name) * itemsize if kind is Kind.COUNTED else 0
        return Given(name, kind is Kind.COUNTED, tail, self._is_packed(name), row, last, kind is Kind.SIZED)

    def _is_packed(self, name: str) -> bool:
        """Whether strides follow from extents that are counted."""
        return self.split.kinds[name] is not Kind.FIXED and self.planned.counted and self.tensors[name].is_contiguous()

    def _guarded(self, names: list[str]) -> tuple[list, list]:
        """Extents and strides that calls like this one have, None for those that follow from the number of rows."""
        extents, strides = [], []
        for name in names:
            t, kind = self.layouts[name], self.split.kinds[name]
            leading = 0
            if self.planned.counted:
                leading = self.split.leading if kind is Kind.COUNTED else len(t.shape) if kind is Kind.SIZED else 0
            free = leading if self._is_packed(name) else 0
            # Strides of other than packed tensors are compared, and with them all extents but the first.
            open_ = free or int(leading > 0 and self.split.can_grow(name))
            extents.append([None] * open_ + list(t.shape[open_:]))
            strides.append([None] * free + list(t.stride[free:]))
        return extents, strides


@dataclass(frozen=True, eq=False)
class _Pair:
    """Parameters of which one is written that may share no memory, or in place all of it."""

    made: str
    other: str
    split: Split
    in_place: bool
    same_type: bool

    def clash(self, count: int, apart: int) -> bool:
        """Whether they do, for a number of rows, the written one beginning so many bytes behind the other."""
        return self._conflict(dict(self.split.at(count))).clash(apart)

    def check(self, tensors: Mapping[str, torch.Tensor]) -> None:
        made, other = tensors[self.made], tensors[self.other]
        if not self._conflict(self.split.layouts).clash(made.data_ptr() - other.data_ptr()):
            return
        accepted = "memory of its own"
        if self.in_place:
            accepted += ", or exactly that tensor's with the same data type, shape and stride"
        raise VariantPackError(f"output {self.made!r} overlaps {self.other!r}; accepted: {accepted}")

    def _conflict(self, layouts: Mapping[str, Layout]) -> Conflict:
        one, two = (layouts[name] for name in (self.made, self.other))
        storages = (Storage(t.shape, t.stride, t.dtype.itemsize) for t in (one, two))
        return Conflict(*storages, self.in_place, self.same_type)


def _number(name: str, value: object) -> float:
    try:
        return buffers.number(value, data_type.FLOAT)
    except VariantPackError as error:
        raise type(error)(f"number {name!r}: {error}") from None


def _empty(device: torch.device) -> Callable[..., torch.Tensor]:
    if device.type == "cuda":
        return torch_private.empty_cuda(device)
    return lambda shape, stride, dtype: torch.empty_strided(shape, stride, dtype=dtype, device=device)
