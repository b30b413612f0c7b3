"""DTensors: which placements an operator runs with, and the call that runs it on what each rank has.

The rules are data of the functions themselves: from the shapes of its arguments follows which dimension of each is
split where rows are (``axes``), ``over_rows`` says what becomes of results without rows, and ``columns`` how a function
runs where columns are split. ``torch.library.register_torch_dispatch`` makes them known. (The rules of
``torch.distributed.tensor.experimental.register_sharding`` would be kept by arguments without those that are bool,
which here say what is returned; they would write results into copies of tensors that are given in other placements;
and they cannot put a step between two of an operator.)

torch is told of DTensors when there are any: torch takes half a second to import them.
"""

import functools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphfuse.errors import VariantPackError, VariantPackTypeError
from graphfuse.functional.axes import Axes, axes
from graphfuse.functional.declaration import Function, Part, Variant
from graphfuse.functional.layout import check, check_given, fake_layout
from graphfuse.functional.operator import FUNCTIONS, LIBRARY, ports
from graphfuse.functional.tensor_parameter import Shape, TensorParameter, elements, stored
from graphfuse.runtime import torch_private

_known: set[str] = set()
"""Operators whose rules torch was told."""


def register() -> None:
    """Tell torch how all operators run on DTensors, which imports these."""
    from torch.distributed.tensor import DTensor

    for name, f in FUNCTIONS.items():
        if name not in _known:
            _known.add(name)
            for operator in (name, f"{name}.out") if ports(f)[0] else (name,):
                run = functools.partial(_dispatch, f)
                torch.library.register_torch_dispatch(operator, DTensor, run, lib=LIBRARY)


def prepare() -> None:
    """``register``, if there can be DTensors by now."""
    if len(_known) != len(FUNCTIONS) and hasattr(sys.modules.get("torch.distributed.tensor"), "DTensor"):
        register()


@dataclass(frozen=True)
class Rule:
    """What a call does along one dimension of the mesh.

    axis: the dimension of the first tensor that is split; None if none is. columns: whether that is its last one.
    """

    axis: int | None = None
    columns: bool = False


def splittable(used: Sequence[TensorParameter], found: Mapping[str, Axes]) -> tuple[int, ...]:
    """The dimensions of the first tensor along which ranks can run by themselves: not columns, and only those that
    every result has or is made over."""
    rank = len(found[used[0].name])
    written = [a for a in used if a.written]
    return tuple(i for i in range(rank - 1) if all(i in found[a.name] or a.over_rows is not None for a in written))


def _dispatch(f: Function, _, operator: torch._ops.OpOverload, types, args, kwargs=None) -> object:
    """An operator with a DTensor among its arguments."""
    parameters = [a.name for a in operator._schema.arguments]
    given = dict(f.defaults) | dict(zip(parameters, args, strict=False)) | (kwargs or {})
    variant = f.variant(given)
    used = _used(variant, given)
    with torch.no_grad():  # autograd is above, or is not asked for
        return _Call.of(f, variant, used, given).run(operator, parameters)


@dataclass(frozen=True, eq=False)
class _Call:
    """A call of global tensors that fit each other.

    shapes: in elements, of those that are given. rules: by dimension of the mesh.
    """

    f: Function
    used: tuple[TensorParameter, ...]
    given: Mapping[str, object]
    shapes: Mapping[str, Shape]
    axes: Mapping[str, Axes]
    mesh: Any
    rules: tuple[Rule, ...]

    @classmethod
    def of(cls, f: Function, variant: Variant, used: tuple[TensorParameter, ...], given: Mapping[str, object]):
        tensors = {a.name: given[a.name] for a in used if given.get(a.name) is not None}
        for a in variant.arguments:
            check_given(a, given.get(a.name))
        layouts = {a.name: fake_layout(a, tensors[a.name]) for a in used if a.name in tensors}
        check(variant.arguments, layouts)
        shapes = {name: elements(t.shape, t.stored) for name, t in layouts.items()}
        mesh = _mesh(tensors)
        found = axes(used, shapes)
        rules = tuple(_rule(f, used, found, shapes, tensors, mesh, dim) for dim in range(mesh.ndim))
        return cls(f, used, given, shapes, found, mesh, _one_split_of_columns(rules))

    def run(self, operator: torch._ops.OpOverload, parameters: Sequence[str]) -> object:
        local = {name: self._local(name, value) for name, value in self.given.items()}
        if any(rule.columns for rule in self.rules):
            made = self.f.columns(self.f.name, local, self._part(local))
            found = tuple(made.get(name) for name in self.f.results)
        else:
            names = [a for a in operator._schema.arguments]
            positional = [local[a.name] for a in names if not a.kwarg_only]
            found = operator(*positional, **{a.name: local[a.name] for a in names if a.kwarg_only})
            if found is None:
                return None
            found = found if isinstance(found, tuple) else (found,)
        returned = tuple(self._whole(name, t) for name, t in zip(self._returned, found, strict=True))
        return returned if len(returned) > 1 else returned[0]

    @property
    def _returned(self) -> tuple[str, ...]:
        names = {a.name for a in self.used} | self.f.asked
        return tuple(name for name in self.f.results if name in names)

    def _placements(self, a: TensorParameter) -> tuple:
        """Those that an argument has in this call."""
        from torch.distributed.tensor import Partial, Replicate, Shard

        found = []
        for rule in self.rules:
            if rule.axis is None:
                found.append(Replicate())
            elif rule.axis in self.axes[a.name]:
                found.append(Shard(self.axes[a.name].index(rule.axis)))
            elif a.written and not rule.columns:
                found.append(Partial(a.over_rows))
            else:  # of whole rows, by then, where columns are split
                found.append(Replicate())
        return tuple(found)

    def _local(self, name: str, value: object) -> object:
        """What this rank has of a parameter, where the call wants it."""
        if not _is_sharded(value):
            return value
        a = next((a for a in self.used if a.name == name), None)
        if a is None:  # ignored by the function
            return value.to_local()
        wanted = self._placements(a)
        if tuple(value.placements) != wanted:
            if a.written:
                raise VariantPackError(
                    f"{name} has placements {tuple(value.placements)} and would be written; accepted, "
                    f"as {self.used[0].name} is given: {wanted}"
                )
            value = value.detach().redistribute(self.mesh, wanted)  # torch 2.11 would detach the result in place
        return value.to_local()

    def _whole(self, name: str, local: torch.Tensor | None) -> object:
        from torch.distributed.tensor import DTensor

        if local is None:
            return None
        a = next(a for a in self.used if a.name == name)
        shape = stored(_allocated(self.used, self.shapes)[name], a.types[local.dtype])
        stride, count = [], 1
        for extent in reversed(shape):
            stride.insert(0, count)
            count *= max(extent, 1)
        placements = self._placements(a)
        return DTensor.from_local(
            local, self.mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(stride)
        )

    def _part(self, local: Mapping[str, object]) -> Part:
        """The columns at hand, and the sum over ranks that have the others."""
        from torch.distributed.tensor import DTensor, Partial, Replicate

        first = self.used[0].name
        partial = [Partial("sum") if rule.columns else Replicate() for rule in self.rules]

        def sum(t: torch.Tensor) -> torch.Tensor:
            return DTensor.from_local(t, self.mesh, partial, run_check=False).full_tensor()

        return Part(local[first].shape[-1], self.shapes[first][-1], sum)


def _used(variant: Variant, given: Mapping[str, object]) -> tuple[TensorParameter, ...]:
    """As ``complete``, without allocating what is not given."""
    found = []
    for a in variant.arguments:
        if a.only is not None and getattr(given.get(a.only[0]), "dtype", None) != a.only[1]:
            continue
        if a.asked is not None and not given[a.asked]:
            continue
        if given.get(a.name) is not None or not a.optional:
            found.append(a)
    return tuple(found)


def _allocated(used: Sequence[TensorParameter], given: Mapping[str, Shape]) -> dict[str, Shape]:
    """Shapes in elements of all tensors of a call."""
    shapes = dict(given)
    for a in used:
        if a.name not in shapes:
            shapes[a.name] = tuple(a.shape(shapes)[0])
    return shapes


def _is_sharded(value: object) -> bool:
    from torch.distributed.tensor import DTensor

    return isinstance(value, DTensor)


def _mesh(tensors: Mapping[str, torch.Tensor]):
    """The mesh of all tensors. VariantPackError where there is none, VariantPackTypeError for a plain tensor of more
    than one element, which could be anything on other ranks."""
    sharded = {name: t for name, t in tensors.items() if _is_sharded(t)}
    name, first = next(iter(sharded.items()))
    for other, t in sharded.items():
        if t.device_mesh != first.device_mesh:
            raise VariantPackError(f"{other} is on {t.device_mesh}, {name} on {first.device_mesh}; one is accepted")
    for other, t in tensors.items():
        if other not in sharded and t.numel() != 1 and not torch_private.replicates_implicitly():
            raise VariantPackTypeError(
                f"{other} is a {type(t).__name__} of shape {tuple(t.shape)}, {name} a DTensor; accepted: a DTensor, "
                "as distribute_tensor makes"
            )
    return first.device_mesh


def _rule(f, used, found, shapes, tensors, mesh, dim: int) -> Rule:
    """What is split along a dimension of the mesh: what the first tensor is split along, or else another that has all
    of its dimensions. Columns only where the function can. Nothing for a sum that is due and for other placements."""
    from torch.distributed.tensor import Shard

    first, rows = used[0].name, splittable(used, found)
    full = [a.name for a in used if found[a.name] == found[first] and _is_sharded(tensors.get(a.name))]
    placements = [tensors[name].placements[dim] for name in full]
    axes = [found[first][p.dim] for p in placements if type(p) is Shard]
    for axis in axes:
        if axis in rows:
            return Rule(axis)
    last, ranks = len(found[first]) - 1, mesh.size(dim)
    # A rank without columns would have nothing to run on.
    filled = (ranks - 1) * -(-shapes[first][-1] // ranks) < shapes[first][-1]
    return Rule(last, columns=True) if last in axes and f.columns is not None and filled else Rule()


def _one_split_of_columns(rules: Sequence[Rule]) -> tuple[Rule, ...]:
    """Columns are split along one dimension of the mesh at most: the shares of several might be empty."""
    kept = next((i for i, rule in enumerate(rules) if rule.columns), None)
    return tuple(Rule() if rule.columns and i != kept else rule for i, rule in enumerate(rules))
