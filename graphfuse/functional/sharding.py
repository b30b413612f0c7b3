"""DTensor support: the placements that an operator runs with, and the call on each rank's local tensors.

Rules are data of the functions themselves. The shapes of a function's arguments determine which dimension of each is
split with the rows (``axes``). ``over_rows`` says how results without rows are combined, and ``columns`` how a function
runs if columns are split. ``torch.library.register_torch_dispatch`` registers the rules.
(``torch.distributed.tensor.experimental.register_sharding`` does not suffice: it caches by arguments without those that
are bool, which here select what is returned; it would write results into copies of tensors that are given in other
placements; and it cannot run a step between two steps of an operator.)

Rules are registered only once DTensors are imported, because their import takes half a second.
"""

import functools
import importlib
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphfuse.base.errors import VariantPackError, VariantPackTypeError
from graphfuse.base.wording import with_article
from graphfuse.functional import tensor_parameter
from graphfuse.functional.axes import Axes, axes
from graphfuse.functional.declaration import NUMBERS, Function, RankColumns
from graphfuse.functional.layout import check, check_given, fake_layout
from graphfuse.functional.operator import FUNCTIONS, LIBRARY, ports
from graphfuse.functional.tensor_parameter import Shape, TensorParameter, elements, stored
from graphfuse.op_graph.ir import packed_stride
from graphfuse.runtime import torch_private
from graphfuse.runtime.bounded_dict import make_room

OTHERS: dict[str, Callable[..., object]] = {}
"""Operators whose function differs for each program, by qualified name. torch calls them with a DTensor among the
arguments: ``run(mode, operator, types, args, kwargs)``."""

_known: set[str] = set()
"""Operators whose rules are registered."""
_registering = threading.Lock()


def register() -> None:
    """Register with torch how all operators run on DTensors, which imports DTensors."""
    with _registering:
        runs = {name: functools.partial(_dispatch, f) for name, f in FUNCTIONS.items()} | OTHERS
        for name, run in runs.items():
            if name in _known:
                continue
            writes = name in FUNCTIONS and ports(FUNCTIONS[name])[0]
            for operator in (name, f"{name}.out") if writes else (name,):
                torch.library.register_torch_dispatch(operator, _torch().DTensor, run, lib=LIBRARY)
            _known.add(name)


def prepare() -> None:
    """Calls ``register`` if DTensors are imported."""
    if len(_known) != len(FUNCTIONS) + len(OTHERS) and hasattr(sys.modules.get("torch.distributed.tensor"), "DTensor"):
        register()


@dataclass(frozen=True)
class Rule:
    """Rule of a call along one dimension of the mesh.

    axis: the dimension of the first tensor that is split; None if none is. columns: whether that is its last one.
    """

    axis: int | None = None
    columns: bool = False


def splittable(used: Sequence[TensorParameter], found: Mapping[str, Axes]) -> tuple[int, ...]:
    """The dimensions of the first tensor along which ranks can run independently. Dimensions of a row are excluded, and
    those that a result neither has nor is combined over."""
    rank = len(found[used[0].name])
    written = [a for a in used if a.written]
    return tuple(
        i for i in range(rank - used[0].row_axes) if all(i in found[a.name] or a.over_rows is not None for a in written)
    )


def _dispatch(f: Function, _, operator: torch._ops.OpOverload, types, args, kwargs=None) -> object:
    """Result of an operator with a DTensor among its arguments."""
    arguments = operator._schema.arguments
    given = dict(f.defaults) | {a.name: value for a, value in zip(arguments, args, strict=False)} | (kwargs or {})

    def call(local: Mapping[str, object]) -> object:
        positional = (local[a.name] for a in arguments if not a.kwarg_only)
        return operator(*positional, **{a.name: local[a.name] for a in arguments if a.kwarg_only})

    return on_ranks(f, given, call)


def on_ranks(f: Function, given: Mapping[str, object], call: Callable[[Mapping[str, object]], object]) -> object:
    """Results of a function with a DTensor among its arguments. given: arguments by parameter. call: runs the function
    on the rank's local arguments."""
    with torch.no_grad():  # autograd has run already, or is not required
        plan = _plan(f, given)
        # Not stored in the plan: process groups are destroyed, and an equal mesh has others.
        mesh = next(value.device_mesh for value in given.values() if _is_sharded(value))
        local = {name: plan.local(name, value, mesh) for name, value in given.items()}
        if plan.columns:
            made = f.columns(f.name, local, plan.part(local, mesh))
            found = tuple(made.get(result.name) for result in plan.results)
        else:
            found = call(local)
            if found is None:
                return None
            found = found if isinstance(found, tuple) else (found,)
        returned = tuple(plan.whole(result, t, mesh) for result, t in zip(plan.results, found, strict=True))
    return returned if len(returned) > 1 else returned[0]


@dataclass(frozen=True, eq=False)
class _Result:
    """A global tensor that a call returns. shape: counted in elements."""

    name: str
    placements: tuple
    shape: Shape


@dataclass(frozen=True, eq=False)
class _Plan:
    """Plan of calls with similar arguments. first: name of the first tensor. used: tensors by name. placements: of the
    arguments in use, by name. columns: columns of the first tensor if they are split over ranks, otherwise 0. partial:
    placements of tensors that are then added up."""

    first: str
    used: Mapping[str, TensorParameter]
    placements: Mapping[str, tuple]
    results: tuple[_Result, ...]
    columns: int
    partial: tuple

    def local(self, name: str, value: object, mesh: Any) -> object:
        """This rank's local part of a parameter, in the placements that the call requires."""
        wanted = self.placements.get(name)
        if not _is_sharded(value):
            if wanted is None or not isinstance(value, torch.Tensor) or all(p.is_replicate() for p in wanted):
                return value
            value = _torch().DTensor.from_local(value, mesh, [_torch().Replicate()] * mesh.ndim, run_check=False)
        if wanted is None or value.placements == wanted:  # no placements: the function ignores it
            return value.to_local()
        if self.used[name].written:
            raise VariantPackError(
                f"{name} has placements {tuple(value.placements)} and would be written; accepted, "
                f"as {self.first} is given: {wanted}"
            )
        # torch 2.11 would detach the result in place.
        return value.detach().redistribute(mesh, wanted).to_local()

    def whole(self, result: _Result, local: torch.Tensor | None, mesh: Any) -> object:
        if local is None:
            return None
        shape = torch.Size(stored(result.shape, self.used[result.name].types[local.dtype]))
        stride = packed_stride(shape)
        return _torch().DTensor.from_local(local, mesh, result.placements, run_check=False, shape=shape, stride=stride)

    def part(self, local: Mapping[str, object], mesh: Any) -> RankColumns:
        """The local columns, and the sum over the ranks that have the others."""

        def sum(t: torch.Tensor) -> torch.Tensor:
            return _torch().DTensor.from_local(t, mesh, self.partial, run_check=False).full_tensor()

        return RankColumns(local[self.first].shape[-1], self.columns, sum)


_KEPT = 1024
_plans: dict[tuple, _Plan] = {}


def _plan(f: Function, given: Mapping[str, object]) -> _Plan:
    """The plan of a call, cached for similar calls. Raises VariantPackError, and VariantPackTypeError for wrong types,
    if global tensors do not fit each other."""
    key = f, *(_cache_key(value) for name, value in given.items() if name not in NUMBERS)
    try:
        found = _plans.get(key)
    except TypeError:  # extents that are symbolic under a compiler
        return _planned(f, given)
    if found is None:
        found = _planned(f, given)
        make_room(_plans, _KEPT)
        _plans[key] = found
    return found


def _cache_key(value: object) -> object:
    """Everything that a plan depends on in an argument."""
    if _is_sharded(value):
        return value.shape, value.stride(), value.dtype, value.device, value.device_mesh, tuple(value.placements)
    if isinstance(value, torch.Tensor):
        implicit = torch_private.replicates_implicitly()
        return value.shape, value.stride(), value.dtype, value.device, value.layout, implicit
    return value


def _planned(f: Function, given: Mapping[str, object]) -> _Plan:
    variant = f.variant(given)
    for a in variant.arguments:
        check_given(a, given.get(a.name))
    used = tensor_parameter.used(variant.arguments, given)
    tensors = {a.name: given[a.name] for a in used if given.get(a.name) is not None}
    layouts = {a.name: fake_layout(a, tensors[a.name]) for a in used if a.name in tensors}
    check(variant.arguments, layouts)
    shapes = {name: elements(t.shape, t.stored) for name, t in layouts.items()}
    mesh = _mesh(tensors)
    found = axes(used, shapes)
    rules = tuple(_rule(f, used, found, shapes, tensors, mesh, dim) for dim in range(mesh.ndim))
    rules = _one_split_of_columns(rules)
    placements = {a.name: _placements(a, found[a.name], rules) for a in used}
    by_name = {a.name: a for a in used}
    for a in used:
        if a.name not in shapes:
            shapes[a.name] = a.shape(shapes)[0]
    results = [
        _Result(name, placements.get(name, ()), shapes.get(name, ()))
        for name in f.results
        if name in by_name or name in f.asked
    ]
    first = used[0].name
    split = any(rule.columns for rule in rules)
    partial = tuple(_torch().Partial("sum") if rule.columns else _torch().Replicate() for rule in rules)
    return _Plan(first, by_name, placements, tuple(results), shapes[first][-1] if split else 0, partial)


def _placements(a: TensorParameter, of: Axes, rules: Sequence[Rule]) -> tuple:
    """Placements of an argument. of: correspondence of its dimensions to the first tensor's."""
    found = []
    for rule in rules:
        if rule.axis is None:
            found.append(_torch().Replicate())
        elif rule.axis in of:
            found.append(_torch().Shard(of.index(rule.axis)))
        elif a.written and not rule.columns:
            found.append(_torch().Partial(a.over_rows))
        else:  # complete, even if columns are split
            found.append(_torch().Replicate())
    return tuple(found)


@functools.cache
def _torch() -> Any:
    """torch's module of DTensors, whose import takes half a second."""
    return importlib.import_module("torch.distributed.tensor")


def _is_sharded(value: object) -> bool:
    return isinstance(value, _torch().DTensor)


def _mesh(tensors: Mapping[str, torch.Tensor]):
    """The mesh of all tensors. Raises VariantPackError if they are on several, and VariantPackTypeError for a plain
    tensor of more than one element, which may differ on other ranks."""
    sharded = {name: t for name, t in tensors.items() if _is_sharded(t)}
    name, first = next(iter(sharded.items()))
    for other, t in sharded.items():
        if t.device_mesh != first.device_mesh:
            raise VariantPackError(f"{other} is on {t.device_mesh}, {name} on {first.device_mesh}; one is accepted")
    for other, t in tensors.items():
        if other not in sharded and t.numel() != 1 and not torch_private.replicates_implicitly():
            raise VariantPackTypeError(
                f"{other} is {with_article(type(t).__name__)} of shape {tuple(t.shape)}, {name} a DTensor; "
                "accepted: a DTensor, as distribute_tensor makes"
            )
    return first.device_mesh


def _rule(f, used, found, shapes, tensors, mesh, dim: int) -> Rule:
    """The split along a dimension of the mesh: that of the first tensor, or else of another that has all of its
    dimensions. Columns are split only if the function supports it. There is no split for pending sums and other
    placements."""
    first, rows = used[0].name, splittable(used, found)
    full = [a.name for a in used if found[a.name] == found[first] and _is_sharded(tensors.get(a.name))]
    placements = [tensors[name].placements[dim] for name in full]
    axes = [found[first][p.dim] for p in placements if type(p) is _torch().Shard]
    for axis in axes:
        if axis in rows:
            return Rule(axis)
    last, ranks = len(found[first]) - 1, mesh.size(dim)
    # Every rank must have columns.
    filled = (ranks - 1) * -(-shapes[first][-1] // ranks) < shapes[first][-1]
    return Rule(last, columns=True) if last in axes and f.columns is not None and filled else Rule()


def _one_split_of_columns(rules: Sequence[Rule]) -> tuple[Rule, ...]:
    """Rules that split columns along at most one dimension of the mesh: parts of several splits might be empty."""
    kept = next((i for i, rule in enumerate(rules) if rule.columns), None)
    return tuple(Rule() if rule.columns and i != kept else rule for i, rule in enumerate(rules))
