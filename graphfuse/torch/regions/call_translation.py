"""Translation of a call of aten to steps of an op graph, by the names that ops have in aten (``Op.aten``).

A result that torch rounds to 16 bits is the declared type of a step, so that a program rounds where eager mode does.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from graphfuse.base.dtypes import data_type, from_foreign
from graphfuse.base.wording import with_article
from graphfuse.functional.tensor_parameter import INTEGERS
from graphfuse.ops import OPS
from graphfuse.torch.analysis.aten_calls import Call
from graphfuse.torch.analysis.meaning import called_name, same
from graphfuse.torch.analysis.traversal import reachable
from graphfuse.torch.regions.columns import ColumnAxes

ROUNDED = {torch.bfloat16: data_type.BFLOAT16, torch.float16: data_type.HALF}
COMPUTED = frozenset({torch.float32, torch.bool, *ROUNDED})
"""Types of tensors that steps read. Operations on other types stay with torch."""
FP8 = {torch.float8_e4m3fn: 464.0}
"""Further types that steps may make, and the largest magnitude that each rounds to a finite number."""
SMALL_INTEGERS = frozenset({torch.int8, torch.uint8})
"""Types that casts make. Ops that make floats also read them and FP8, as floats represent all of their numbers."""
_DECLARED = frozenset({*ROUNDED, *FP8, *SMALL_INTEGERS})
TO_BOOL = frozenset("cmp_eq cmp_neq cmp_gt cmp_ge cmp_lt cmp_le logical_and logical_or logical_not".split())
_OF_BOOL = frozenset({"identity", "binary_select", "max", "min", "mul"})
"""Ops whose results are 0 or 1: always in TO_BOOL, and in _OF_BOOL if all operands are 0 or 1."""
_OF_INTEGERS = frozenset({("cross_entropy", "target")})
"""Ports that read integers."""
_WITH_NUMBERS = frozenset({("mul", "b"), ("div", "b")})
"""Ports at which torch's CPU kernels read a tensor without dimensions as a number, which is not rounded."""
_ROUNDING_NUMBERS = frozenset({"pow", "mod"})
"""Ops for which torch rounds numbers to the type of the tensors, as it does for comparisons."""


class Untranslated(Exception):
    """Raised if an operation cannot be translated. The message says why."""


class NoOp(Untranslated):
    """No op of the table computes the call."""


class AlongTwoAxes(Untranslated):
    """An operation reads rows along one axis and along another."""

    def __init__(self) -> None:
        super().__init__("it reads rows along one axis and along another")


@dataclass(frozen=True, eq=False)
class Value:
    """A tensor of torch.

    step: the step that makes it; None for a tensor that a program reads. axes: the graph's axis of each dimension,
    counted from the last; None if its reader decides. once: the shape that the step makes, if the tensor repeats that
    along some dimensions.
    """

    tensor: torch.Tensor
    step: OwnedStep | None = None
    axes: tuple[int, ...] | None = None
    once: torch.Size | None = None

    @property
    def shape(self) -> torch.Size:
        """Shape in the graph."""
        return self.tensor.shape if self.once is None else self.once

    def aligned(self) -> tuple[int, ...]:
        return tuple(range(-self.tensor.dim(), 0)) if self.axes is None else self.axes


@dataclass(frozen=True, eq=False)
class OwnedStep:
    """A step that has no number yet. owner: the node that it is a part of. inputs: values and numbers, by port."""

    owner: Node
    op: str
    inputs: Mapping[str, object]
    attributes: Mapping[str, object]
    dtype: str

    @property
    def read(self) -> list[Value]:
        """Inputs that are tensors."""
        return [v for v in self.inputs.values() if isinstance(v, Value)]

    def upstream(self) -> Iterator[OwnedStep]:
        """The step and all steps that it depends on."""
        return reachable([self], lambda one: (v.step for v in one.read if v.step is not None))


class CallTranslation:
    """Builder of the steps of one call. columns: those of rows, or of parts of rows. reduced: receives the columns that
    a node reduces."""

    def __init__(
        self,
        steps: list[OwnedStep],
        node: Node,
        call: Call,
        known: dict[torch.Tensor, Value],
        columns: ColumnAxes,
        reduced: dict[Node, ColumnAxes],
    ):
        self.steps, self.node, self.call, self.known = steps, node, call, known
        self._columns, self._reduced = columns, reduced
        self.end = columns.end

    def __getitem__(self, name: str) -> object:
        """An argument of the call: the value of a tensor, the number that torch made a tensor of, or what was given."""
        given = self.call.arguments[name]
        return self.known.setdefault(given, Value(given)) if isinstance(given, torch.Tensor) else given

    def converted(self, name: str) -> object:
        """An argument as the call computes with it: a tensor without dimensions is converted to the type of the
        result."""
        value = self[name]
        return self._narrowed("", name, value, self.out.dtype) if isinstance(value, Value) else value

    @property
    def out(self) -> torch.Tensor:
        return self.call.results[0]

    def read(self, t: torch.Tensor) -> Value:
        """Value of a tensor that no step makes."""
        return Value(t, axes=tuple(range(self.end - t.dim(), self.end)) if self.end else None)

    def by_table(self) -> Value:
        for op, parameters in _by_aten().get(self.call.name, ()):
            if (given := self._fitting(parameters)) is not None:
                ports = [p.name for p in OPS[op].inputs]
                inputs = {name: value for name, value in given.items() if name in ports}
                return self.step(op, inputs, {n: v for n, v in given.items() if n not in ports})
        of = called_name(self.node)
        calls = "" if self.call.name.startswith(of) else f", which {of} calls"
        raise NoOp(f"no op computes {self.call.name} of such arguments{calls}")

    def _fitting(self, parameters: Mapping[str, tuple[str, str]]) -> dict[str, object] | None:
        """Arguments by port or attribute; None if one has a value that the op does not support."""
        given: dict[str, object] = {}
        for a in self.call.overload._schema.arguments:
            value = self.call.arguments[a.name]
            kind, name = parameters.get(a.name, ("=", None))
            if kind == ":":
                given[name] = self[a.name]
            elif str(value) != (str(a.default_value) if name is None else name):
                return None
        return given

    def step(
        self, op: str, inputs: Mapping[str, object], attributes: Mapping[str, object] | None = None, **made: object
    ) -> Value:
        """Result of a new step. made: shape, dtype and axes of the result, if they are not those of the call."""
        shape, dtype = made.get("shape", self.out.shape), made.get("dtype", self.out.dtype)
        inputs = {port: self._known(v) for port, v in inputs.items()}
        values = [v for v in inputs.values() if isinstance(v, Value)]
        if not values:
            raise Untranslated(f"{self.call.name} computes with numbers alone")
        self._check(op, inputs, attributes or {}, dtype)
        if OPS[op].pointwise:
            if not _fits(values, shape):
                raise Untranslated(f"{self.call.name} repeats what it reads")
            axes = _axes(values, shape, self.end)
            inputs = self._converted(op, inputs, dtype)
            read = {port: _placed(v, axes) if isinstance(v, Value) else v for port, v in inputs.items()}
        else:
            if any(v.once is not None for v in values):
                raise Untranslated(f"{self.call.name} reduces what is repeated")
            whole = inputs["input"].aligned()
            axes = made.get("axes", whole)
            read = {port: _placed(v, whole) if isinstance(v, Value) else v for port, v in inputs.items()}
        rounded = from_foreign(dtype).name if dtype in _DECLARED else ""
        one = OwnedStep(self.node, op, read, attributes or {}, rounded)
        self.steps.append(one)
        return Value(self.out if shape is self.out.shape else self.out.new_empty(shape, dtype=dtype), one, axes)

    def _check(
        self, op: str, inputs: Mapping[str, object], attributes: Mapping[str, object], dtype: torch.dtype
    ) -> None:
        """Raises Untranslated if an op does not compute with such tensors and numbers as the call does."""
        if dtype not in COMPUTED | _DECLARED or dtype in SMALL_INTEGERS and op != "identity":
            raise Untranslated(f"{self.call.name} makes {dtype}")
        widens = OPS[op].pointwise and (dtype.is_floating_point or op == "identity")
        for port, value in ((port, v) for port, v in inputs.items() if isinstance(v, Value)):
            accepted = COMPUTED | SMALL_INTEGERS | FP8.keys() if widens else COMPUTED
            if value.tensor.dtype not in (INTEGERS if (op, port) in _OF_INTEGERS else accepted):
                raise Untranslated(f"{self.call.name} reads {value.tensor.dtype}")
            if value.step is None and value.tensor.dtype is torch.bool and not value.tensor.dim():
                raise Untranslated(f"{self.call.name} reads a truth value without dimensions")
            if value.tensor.device != self.out.device:
                raise Untranslated(f"{self.call.name} reads a tensor of {value.tensor.device}")
        named = (v for v in attributes.values() if not isinstance(v, bool))
        for given in (*(v for v in inputs.values() if not isinstance(v, Value)), *named):
            if isinstance(given, bool) or not isinstance(given, int | float | str):
                raise Untranslated(f"{self.call.name} is given {with_article(type(given).__name__)}")
        reads_bools = all(isinstance(v, Value) and v.tensor.dtype is torch.bool for v in inputs.values())
        if dtype is torch.bool and not (op in TO_BOOL or op in _OF_BOOL and reads_bools):
            raise Untranslated(f"{self.call.name} of truth values")

    def _known(self, value: object) -> object:
        """Value of a number that Dynamo has made an input, if it is an epsilon; Dynamo guards the value. Other numbers
        may vary from call to call, and are returned as they are."""
        is_of_rows = same(self.out.shape[-1], 1) if self.out.dim() else True
        is_epsilon = isinstance(value, torch.SymFloat) and value.node.has_hint() and is_of_rows
        return float(value) if is_epsilon and value.node.expr.is_Symbol else value

    def _converted(self, op: str, inputs: dict[str, object], dtype: torch.dtype) -> dict[str, object]:
        """Inputs as a pointwise op reads them. torch converts tensors without dimensions to the common type of the
        others, and so the numbers in comparisons."""
        compared = op in TO_BOOL
        if compared:
            tensors = [v.tensor for v in inputs.values() if isinstance(v, Value)]
            dtype = torch.result_type(tensors[0], tensors[-1])
        made = {port: self._narrowed(op, port, v, dtype) for port, v in inputs.items() if isinstance(v, Value)}
        if compared or op in _ROUNDING_NUMBERS:
            made |= {port: rounded_number(v, dtype) for port, v in inputs.items() if port not in made}
        return inputs | made

    def _narrowed(self, op: str, port: str, value: Value, dtype: torch.dtype) -> Value:
        if value.tensor.dim() or dtype not in ROUNDED or value.tensor.dtype in (dtype, torch.bool):
            return value
        if value.tensor.device.type == "cpu" and (op, port) in _WITH_NUMBERS:
            return value
        one = OwnedStep(self.node, "identity", {"input": _placed(value, ())}, {}, ROUNDED[dtype].name)
        self.steps.append(one)
        return Value(value.tensor.to(dtype), one, ())

    def number_of_column(self, index: Value, axes: Sequence[int] | None = None) -> Value:
        """Numbers of columns as float32, which represents them all. index: integers, or a step made of them. axes: of
        integers that are read."""
        if index.step is not None:
            return index
        if index.tensor.dtype not in INTEGERS:
            raise Untranslated(f"{self.call.name} by numbers of {index.tensor.dtype}")
        axes = index.aligned() if axes is None else (*axes,)
        one = OwnedStep(self.node, "identity", {"input": replace(index, axes=axes)}, {}, "")
        self.steps.append(one)
        return Value(index.tensor.to(torch.float32), one, axes)

    def between(self, op: str, **inputs: object) -> Value:
        """Step whose result is not rounded, in the shape to which its inputs broadcast."""
        shape = torch.broadcast_shapes(*(v.shape for v in inputs.values() if isinstance(v, Value)))
        return self.step(op, inputs, shape=shape, dtype=torch.bool if op in TO_BOOL else torch.float32)

    def reduced(self, mode: str, value: Value, dims: object, keepdim: bool, dtype: torch.dtype) -> Value:
        """Step that reduces rows. Raises Untranslated if other dimensions are reduced."""
        reduced, axes = self.columns(value, dims), value.aligned()
        left = [d for d in range(value.tensor.dim()) if keepdim or d not in reduced]
        shape = torch.Size(1 if d in reduced else value.tensor.shape[d] for d in left)
        made = {"shape": shape, "dtype": dtype, "axes": tuple(axes[d] for d in left)}
        return self.step("reduction", {"input": value}, {"mode": mode}, **made)

    def columns(self, value: Value, dims: object) -> Sequence[int]:
        """Dimensions that are reduced. Raises Untranslated if they are not those of the columns."""
        rank, axes = value.tensor.dim(), value.aligned()
        found = [dims] if isinstance(dims, int) else [*dims] if dims else [*range(rank)]
        columns = ColumnAxes.of({axes[d]: value.tensor.shape[d] for d in found}) if rank else None
        what = f"{self.call.name} reduces dimensions {tuple(found)}; accepted:"
        if columns is None:
            raise Untranslated(f"{what} one, or neighbours whose extents do not vary")
        self._reduced[self.node] = columns
        if columns != self._columns:
            raise Untranslated(f"{what} those of other reductions")
        return sorted(d % rank for d in found)


def _fits(values: Sequence[Value], shape: Sequence[object]) -> bool:
    """True if values broadcast to this shape in the graph, as in torch."""

    def is_made(place: int) -> bool:
        wide = [v.shape[-place] for v in values if len(v.shape) >= place and not same(v.shape[-place], 1)]
        return all(same(n, shape[-place]) for n in wide) if wide else same(shape[-place], 1)

    return all(map(is_made, range(1, len(shape) + 1)))


def rounded_number(number: int | float, dtype: torch.dtype) -> int | float:
    """Number that torch uses for a given one if it compares tensors of a type with it, or raises them to that power."""
    return torch.tensor(number, dtype=dtype).item() if dtype in ROUNDED else number


def _placed(value: Value, axes: Sequence[int]) -> Value:
    """Value whose axes are set: those of its reader, if it is read and has none yet."""
    if value.axes is not None or value.step is not None:
        return value
    rank = value.tensor.dim()
    return Value(value.tensor, None, tuple(axes[len(axes) - rank :]) if rank else ())


def _axes(values: Sequence[Value], shape: Sequence[object], end: int) -> tuple[int, ...]:
    """Axes of the result of broadcasting values. end: the axis after the last."""
    rank = len(shape)
    known = [v for v in values if v.axes is not None] or [v for v in values if v.tensor.dim() == rank]
    found: list[int] = []
    for place in range(1, rank + 1):
        there = [v for v in known if v.tensor.dim() >= place]
        axes_here = {v.aligned()[-place] for v in there if not same(v.shape[-place], 1)}
        axes_here = axes_here or {v.aligned()[-place] for v in there} or {min(found, default=end) - 1}
        if len(axes_here) != 1:
            raise AlongTwoAxes
        found += axes_here
    found.reverse()
    if len({*found}) < rank:
        raise AlongTwoAxes
    return tuple(found)


@functools.cache
def _by_aten() -> dict[str, list[tuple[str, dict[str, tuple[str, str]]]]]:
    """Ops by their names in aten, each with what it requires by parameter: ":" and a port or attribute, or "=" and a
    value."""
    found: dict[str, list[tuple[str, dict[str, tuple[str, str]]]]] = {}
    for op in OPS.values():
        for text in op.aten:
            name, *given = text.split()
            parameters = {}
            for one in given:
                kind = ":" if ":" in one else "="
                parameter, _, value = one.partition(kind)
                parameters[parameter] = (kind, value)
            found.setdefault(name, []).append((op.name, parameters))
    return found
