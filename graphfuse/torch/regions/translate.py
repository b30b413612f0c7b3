"""From operations of torch to steps of op graphs, by what ops of the table are called in aten (``Op.aten``).

Each result that torch rounds to 16 bits is a step's declared type, so that a program rounds where eager mode does.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from graphfuse.base.dtypes import data_type
from graphfuse.ops import OPS
from graphfuse.torch.fusion.meaning import same, told
from graphfuse.torch.regions.aten_calls import Call, calls_of

ROUNDED = {torch.bfloat16: data_type.BFLOAT16, torch.float16: data_type.HALF}
COMPUTED = frozenset({torch.float32, torch.bool, *ROUNDED})
"""Types of tensors that steps read. Others are left to torch."""
FP8 = {torch.float8_e4m3fn: 464.0}
"""Types that steps may make, beside those, and the largest magnitude that is rounded to a number."""
_TO_BOOL = frozenset({"cmp_eq", "cmp_neq", "cmp_gt", "cmp_ge", "cmp_lt", "cmp_le"})
_OF_BOOL = frozenset({"identity", "binary_select", "max", "min", "mul"})
"""Ops whose results are 0 or 1, those of the second line if all that they read is."""
_WITH_NUMBERS = frozenset({("mul", "b"), ("div", "b")})
"""Ports of ops at which torch's CPU kernels take a tensor without dimensions as a number, which nothing rounds."""


class Untranslated(Exception):
    """Why an operation is none of a program."""


@dataclass(frozen=True, eq=False)
class Value:
    """A tensor of torch. step: the one that makes it, None for a tensor that a program reads. axes: the graph's axis of
    each dimension, counted from the last; None where whoever reads it decides. once: the shape that the step makes,
    where the tensor repeats that."""

    tensor: torch.Tensor
    step: OwnedStep | None = None
    axes: tuple[int, ...] | None = None
    once: torch.Size | None = None

    @property
    def shape(self) -> torch.Size:
        """The shape in the graph."""
        return self.tensor.shape if self.once is None else self.once

    def aligned(self) -> tuple[int, ...]:
        return tuple(range(-self.tensor.dim(), 0)) if self.axes is None else self.axes


@dataclass(frozen=True, eq=False)
class OwnedStep:
    """A step before it has a number. owner: the node that it is of. inputs: values, other steps and numbers."""

    owner: Node
    op: str
    inputs: Mapping[str, object]
    attributes: Mapping[str, object]
    dtype: str


class TranslatedGraph:
    """All of a graph that translates. values: by node, its tensor or tensors. steps: in order. why: for nodes that do
    not translate. node_of: the node that has a tensor, by the tensor's number. unread: nodes that nobody reads, and
    which are left as they are."""

    def __init__(self) -> None:
        self.values: dict[Node, object] = {}
        self.steps: list[OwnedStep] = []
        self.why: dict[Node, str] = {}
        self.node_of: dict[int, Node] = {}
        self.unread: set[Node] = set()
        self.held: list[object] = []  # tensors that numbers are of

    def add(self, node: Node) -> bool:
        """True if a node translates; what it is made of has been added before."""
        found = calls_of(node)
        if found is None:
            self.why[node] = "it is no operation on tensors that programs have"
            return False
        calls, made = found
        known = {id(t): v for a in node.all_input_nodes for t, v in self._tensors(a)}
        before = len(self.steps)
        try:
            for call in calls:
                self._call(node, call, known)
            value = _like(made, known)
            self._check_leaves(self.steps[before:])
            if isinstance(value, Value) and value.step is None:  # a view of what is read
                self.node_of[id(value.tensor)] = node
            self.values[node] = value
        except Untranslated as error:
            del self.steps[before:]
            self.why[node] = str(error)
            return False
        return True

    def _tensors(self, node: Node):
        """Recorded tensors of a node, with their values."""
        recorded = told(node)
        value = self.values.get(node)
        for i, t in enumerate(recorded if isinstance(recorded, list | tuple) else (recorded,)):
            if isinstance(t, torch.Tensor):
                one = value[i] if isinstance(value, list | tuple) else value
                if one is None and t is recorded:
                    self.node_of[id(t)] = node
                yield t, one if one is not None else Value(t)

    def _check_leaves(self, steps: Sequence[OwnedStep]) -> None:
        """Tensors that steps read, of which each must be a node's."""
        read = (v for step in steps for v in step.inputs.values() if isinstance(v, Value) and v.step is None)
        if any(id(v.tensor) not in self.node_of for v in read):
            raise Untranslated("it reads a tensor that is no node's")

    def _call(self, node: Node, call: Call, known: dict[int, Value]) -> None:
        drawing = _CallDrawing(self, node, call, known)
        draw = _COMPOSITES.get(call.name)
        made = draw(drawing) if draw else drawing.by_table()
        for t, value in zip(call.results, made if isinstance(made, tuple) else (made,), strict=False):
            known[id(t)] = value
            self.held.append(t)


def _like(made: object, known: Mapping[int, Value]) -> object:
    """Values of what a node returns."""
    if isinstance(made, torch.Tensor):
        if id(made) not in known:
            raise Untranslated("it makes a tensor of none")
        return known[id(made)]
    if isinstance(made, list | tuple):
        return tuple(_like(one, known) for one in made)
    raise Untranslated(f"it makes a {type(made).__name__}")


class _CallDrawing:
    """Steps of one call."""

    def __init__(self, translation: TranslatedGraph, node: Node, call: Call, known: dict[int, Value]):
        self.translation, self.node, self.call, self.known = translation, node, call, known

    def __getitem__(self, name: str) -> object:
        """An argument of the call: a value, a number that was made a tensor, or what was given."""
        given = self.call.arguments[name]
        return self.known.setdefault(id(given), Value(given)) if isinstance(given, torch.Tensor) else given

    @property
    def out(self) -> torch.Tensor:
        return self.call.results[0]

    def by_table(self) -> Value:
        for op, parameters in _BY_ATEN.get(self.call.name, ()):
            if (given := self._fitting(parameters)) is not None:
                ports = [p.name for p in OPS[op].inputs]
                inputs = {name: value for name, value in given.items() if name in ports}
                return self.step(op, inputs, {n: v for n, v in given.items() if n not in ports})
        raise Untranslated(f"no op of the table is {self.call.name}")

    def _fitting(self, parameters: Mapping[str, tuple[str, str]]) -> dict[str, object] | None:
        """Arguments by port or attribute; None where one has a value that the op does not have."""
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
        """A step. made: shape, dtype of its result where these are not those of the call's."""
        shape, dtype = made.get("shape", self.out.shape), made.get("dtype", self.out.dtype)
        inputs = {port: self._known(v) for port, v in inputs.items()}
        values = [v for v in inputs.values() if isinstance(v, Value)]
        self._check(op, inputs, attributes or {}, dtype)
        if OPS[op].pointwise:
            if not _fits(values, shape):
                raise Untranslated(f"{self.call.name} repeats what it reads")
            axes = _axes(values, shape)
            inputs = self._converted(op, inputs, dtype)
            read = {port: _placed(v, axes) if isinstance(v, Value) else v for port, v in inputs.items()}
        else:
            if any(v.once is not None for v in values):
                raise Untranslated(f"{self.call.name} reduces what is repeated")
            whole = inputs["input"].aligned()
            axes = made.get("axes", whole)
            read = {port: _placed(v, whole) if isinstance(v, Value) else v for port, v in inputs.items()}
        one = OwnedStep(self.node, op, read, attributes or {}, ROUNDED[dtype].name if dtype in ROUNDED else "")
        self.translation.steps.append(one)
        return Value(self.out if shape is self.out.shape else self.out.new_empty(shape, dtype=dtype), one, axes)

    def _check(
        self, op: str, inputs: Mapping[str, object], attributes: Mapping[str, object], dtype: torch.dtype
    ) -> None:
        """Untranslated where an op does not compute with such tensors and numbers as the call does."""
        values = [v for v in inputs.values() if isinstance(v, Value)]
        if dtype not in COMPUTED and dtype not in FP8:
            raise Untranslated(f"{self.call.name} makes {dtype}")
        for value in values:
            if value.tensor.dtype not in COMPUTED:
                raise Untranslated(f"{self.call.name} reads {value.tensor.dtype}")
            if value.tensor.device != self.out.device:
                raise Untranslated(f"{self.call.name} reads a tensor of {value.tensor.device}")
        for given in (*(v for v in inputs.values() if not isinstance(v, Value)), *attributes.values()):
            if isinstance(given, bool) or not isinstance(given, int | float | str):
                raise Untranslated(f"{self.call.name} is given a {type(given).__name__}")
        reads_bools = all(isinstance(v, Value) and v.tensor.dtype is torch.bool for v in inputs.values())
        if dtype is torch.bool and not (op in _TO_BOOL or op in _OF_BOOL and reads_bools):
            raise Untranslated(f"{self.call.name} of truth values")

    def _known(self, value: object) -> object:
        """A number that Dynamo has made an input, where it is an epsilon, becomes its value, which Dynamo guards.
        Others vary from call to call."""
        is_of_rows = same(self.out.shape[-1], 1) if self.out.dim() else True
        is_epsilon = isinstance(value, torch.SymFloat) and value.node.has_hint() and is_of_rows
        return float(value) if is_epsilon and value.node.expr.is_Symbol else value

    def _converted(self, op: str, inputs: Mapping[str, object], dtype: torch.dtype) -> dict[str, object]:
        """Inputs as a pointwise op reads them: torch converts tensors without dimensions to the type that the others
        have together, and what they are compared with."""
        compared = op in _TO_BOOL
        if compared:
            tensors = [v.tensor for v in inputs.values() if isinstance(v, Value)]
            dtype = functools.reduce(torch.promote_types, (torch.result_type(t, tensors[-1]) for t in tensors))
        return {
            port: self._narrowed(op, port, v, dtype) if isinstance(v, Value) else _rounded(v, dtype) if compared else v
            for port, v in inputs.items()
        }

    def _narrowed(self, op: str, port: str, value: Value, dtype: torch.dtype) -> Value:
        if value.tensor.dim() or dtype not in ROUNDED or value.tensor.dtype in (dtype, torch.bool):
            return value
        if value.tensor.device.type == "cpu" and (op, port) in _WITH_NUMBERS:
            return value
        one = OwnedStep(self.node, "identity", {"input": _placed(value, ())}, {}, ROUNDED[dtype].name)
        self.translation.steps.append(one)
        return Value(value.tensor.to(dtype), one, ())

    def between(self, op: str, **inputs: object) -> Value:
        """A step whose result nothing rounds, of the shape that its inputs have together."""
        shape = torch.broadcast_shapes(*(v.shape for v in inputs.values() if isinstance(v, Value)))
        return self.step(op, inputs, shape=shape, dtype=torch.bool if op in _TO_BOOL else torch.float32)

    def reduced(self, mode: str, value: Value, dims: object, keepdim: bool, dtype: torch.dtype) -> Value:
        """The reduction of rows. Untranslated where other dimensions are reduced, or more."""
        dim = self.last(value, dims)
        kept = [*value.tensor.shape]
        kept[dim:] = [1] * keepdim
        left = value.aligned() if keepdim else value.aligned()[:dim]
        return self.step("reduction", {"input": value}, {"mode": mode}, shape=torch.Size(kept), dtype=dtype, axes=left)

    def last(self, value: Value, dims: object) -> int:
        """Number of the dimension that is reduced. Untranslated where it is not that of the columns, or not the only
        one."""
        rank = value.tensor.dim()
        found = [dims] if isinstance(dims, int) else [*dims] if dims else [*range(rank)]
        if len(found) != 1 or not rank or value.aligned()[found[0]] != -1:
            raise Untranslated(f"{self.call.name} reduces dimensions {tuple(found)}; accepted: the last")
        return rank - 1


def _fits(values: Sequence[Value], shape: Sequence[object]) -> bool:
    """True if broadcasting gives values this shape in the graph, as in torch."""

    def is_made(place: int) -> bool:
        wide = [v.shape[-place] for v in values if len(v.shape) >= place and not same(v.shape[-place], 1)]
        return all(same(n, shape[-place]) for n in wide) if wide else same(shape[-place], 1)

    return all(map(is_made, range(1, len(shape) + 1)))


def _rounded(number: int | float, dtype: torch.dtype) -> int | float:
    """The number that torch compares tensors of a type with, given this one."""
    return torch.tensor(number, dtype=dtype).item() if dtype in ROUNDED else number


def _placed(value: Value, axes: Sequence[int]) -> Value:
    """A value that is read, of which whoever reads it decides the axes."""
    if value.axes is not None or value.step is not None:
        return value
    rank = value.tensor.dim()
    return Value(value.tensor, None, tuple(axes[len(axes) - rank :]) if rank else ())


def _axes(values: Sequence[Value], shape: Sequence[object]) -> tuple[int, ...]:
    """The axes of what is made of values by broadcasting."""
    rank = len(shape)
    known = [v for v in values if v.axes is not None] or [v for v in values if v.tensor.dim() == rank]
    found: list[int] = []
    for place in range(1, rank + 1):
        there = [v for v in known if v.tensor.dim() >= place]
        told = {v.aligned()[-place] for v in there if not same(v.shape[-place], 1)}
        told = told or {v.aligned()[-place] for v in there} or {found[-1] - 1 if found else -1}
        if len(told) != 1:
            raise Untranslated("it reads rows along one axis and along another")
        found += told
    found.reverse()
    if any(a >= b for a, b in zip(found, found[1:], strict=False)):
        raise Untranslated("its dimensions are not in the order of the rows'")
    return tuple(found)


@functools.cache
def _by_aten() -> dict[str, list[tuple[str, dict[str, tuple[str, str]]]]]:
    """Ops by what they are called in aten, each with what it takes by parameter: ":" and a port or attribute, or "="
    and a value."""
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


_BY_ATEN = _by_aten()


# What no single op of the table computes, or not by its arguments alone.


def _same(d: _CallDrawing) -> Value:
    """Views that add or drop dimensions of extent 1, or repeat."""
    value, new = d["self"], d.out
    if value.step is None:  # a tensor that is read as the view has it
        return Value(new)
    old = value.tensor
    if new.dtype is not old.dtype:
        raise Untranslated("a view of another type")
    axes, left = [], [(n, a) for n, a in zip(value.shape, value.aligned(), strict=True) if not same(n, 1)]
    once, spare = [], len(left) < len(value.shape)
    for n in new.shape:
        if left and same(n, left[0][0]):
            axes.append(left.pop(0)[1])
            once.append(n)
        elif same(n, 1) or spare:
            axes.append(None)
            once.append(1)
        else:
            raise Untranslated("a view that moves elements")
    if left:
        raise Untranslated("a view that moves elements")
    for place in range(len(axes) - 1, -1, -1):
        if axes[place] is None:
            behind = axes[place + 1] if place + 1 < len(axes) else 0
            axes[place] = behind - 1
    if any(a >= b for a, b in zip(axes, axes[1:], strict=False)):
        raise Untranslated("a view that adds a dimension where the rows have none")
    repeats = not all(map(same, once, new.shape))
    return Value(new, value.step, tuple(axes), torch.Size(once) if repeats else None)


def _cast(d: _CallDrawing) -> Value:
    x = d["self"]
    if d.out.dtype is torch.bool:
        return d.step("cmp_neq", {"input": x, "comparison": 0})
    if d.out.dtype in FP8:
        recorded = told(d.node)
        if isinstance(recorded, torch.Tensor) and recorded.requires_grad:
            raise Untranslated(f"a cast to {d.out.dtype}, of which the gradient is of that type")
        if not _saturates(d.out.dtype):
            beyond = d.between("cmp_gt", input=d.between("abs", input=x), comparison=FP8[d.out.dtype])
            x = d.between("binary_select", input0=math.nan, input1=x, mask=beyond)
    return d.step("identity", {"input": x})


@functools.cache
def _saturates(dtype: torch.dtype) -> bool:
    """True if torch casts what is beyond a type to its largest number, as kernels do; before 2.13 it became NaN."""
    return not torch.full((1,), 1e4).to(dtype).isnan().item()


def _power(d: _CallDrawing) -> Value:
    x, exponent = d["self"], d["exponent"]
    if exponent == 2:
        return d.step("mul", {"a": x, "b": x})
    if exponent == 3:
        return d.step("mul", {"a": d.step("mul", {"a": x, "b": x}), "b": x})  # torch rounds the square, too
    if exponent in (0.5, -0.5):
        return d.step("sqrt" if exponent > 0 else "rsqrt", {"input": x})
    if exponent == -1:
        return d.step("reciprocal", {"input": x})
    raise Untranslated(f"a power of {exponent}; accepted: 2, 3, 0.5, -0.5, -1")


def _clamp(d: _CallDrawing) -> Value:
    return _limited(d, d["min"], d["max"], "cmp_lt", "cmp_gt")


def _hard_tanh(d: _CallDrawing) -> Value:
    return _limited(d, d["min_val"], d["max_val"], "cmp_le", "cmp_ge")


def _limited(d: _CallDrawing, low: object, high: object, below: str, above: str) -> Value:
    """The values with limits in place of what is beyond. Comparisons say whose gradients are 0: that of `max` is shared
    where both are equal, which torch does for maximum alone."""
    x = d["self"]
    limits = [limit for limit in (low, high) if limit is not None]
    if any(limit != limit for limit in limits):
        raise Untranslated(f"{d.call.name} between {low} and {high}; accepted: numbers")
    for limit, beyond in ((low, below), (high, above)):
        if limit is not None:
            x = d.step(
                "binary_select", {"input0": limit, "input1": x, "mask": d.between(beyond, input=x, comparison=limit)}
            )
    return x


def _reduced(mode: str) -> Callable[[_CallDrawing], Value]:
    def draw(d: _CallDrawing) -> Value:
        x, arguments = d["self"], d.call.arguments
        if d.out.dtype not in (x.tensor.dtype, torch.float32):  # torch rounds the elements first
            raise Untranslated(f"{d.call.name} of {x.tensor.dtype} to {d.out.dtype}")
        return d.reduced(mode, x, arguments["dim"], bool(arguments.get("keepdim")), d.out.dtype)

    return draw


def _length(d: _CallDrawing) -> Value:
    modes = {2: "NORM2", 1: "NORM1", math.inf: "AMAX"}
    if d["ord"] not in modes or d.out.dtype not in (d["self"].tensor.dtype, torch.float32):
        raise Untranslated(f"a norm of order {d['ord']}; accepted: 1, 2, inf")
    return d.reduced(modes[d["ord"]], d["self"], d["dim"], d["keepdim"], d.out.dtype)


def _variance(d: _CallDrawing) -> Value:
    x, out = d["self"], d.out
    columns = x.tensor.shape[d.last(x, d["dim"])]
    correction = 1 if d["correction"] is None else d["correction"]
    if not isinstance(columns, int) or not isinstance(correction, int | float) or columns <= correction:
        raise Untranslated("the variance of rows of an extent that varies")
    mean = d.reduced("AVG", x, d["dim"], True, torch.float32)
    centred = d.between("sub", a=x, b=mean)
    squares = d.reduced("ADD", d.between("mul", a=centred, b=centred), d["dim"], d["keepdim"], torch.float32)
    return d.step("mul", {"a": squares, "b": 1 / (columns - correction)}, shape=out.shape)


def _variance_and_mean(d: _CallDrawing) -> tuple[Value, Value]:
    return _variance(d), d.reduced("AVG", d["self"], d["dim"], d["keepdim"], d.out.dtype)


def _of_rows(op: str) -> Callable[[_CallDrawing], Value]:
    def draw(d: _CallDrawing) -> Value:
        d.last(d["self"], d["dim"])
        return d.step(op, {"input": d["self"]}, {"axis": -1})

    return draw


def _logsumexp(d: _CallDrawing) -> Value:
    x = d["self"]
    axes, dim = x.aligned(), d.last(x, d["dim"])
    return d.step("logsumexp", {"input": x}, {"axis": -1}, axes=axes if d["keepdim"] else axes[:dim])


def _layer_norm(d: _CallDrawing) -> Value:
    return _norm(d, "layernorm", d["normalized_shape"], {"scale": d["weight"], "bias": d["bias"]}, d["eps"])


def _rms_norm(d: _CallDrawing) -> Value:
    eps = torch.finfo(torch.float32).eps if d["eps"] is None else d["eps"]
    return _norm(d, "rmsnorm", d["normalized_shape"], {"scale": d["weight"]}, eps)


def _norm(d: _CallDrawing, op: str, shape: Sequence[object], vectors: Mapping[str, object], eps: float) -> Value:
    x = d["input"]
    if len(shape) != 1 or x.once is not None or x.aligned()[-1] != -1:
        raise Untranslated(f"{d.call.name} of rows of shape {tuple(shape)}; accepted: one dimension")
    given = {name: v for name, v in vectors.items() if v is not None}
    eps = float(eps) if isinstance(eps, torch.SymFloat) and eps.node.has_hint() else eps
    return d.step(op, {"input": x, **given, "epsilon": eps}, {"norm_forward_phase": "INFERENCE"})


_COMPOSITES: dict[str, Callable[[_CallDrawing], object]] = {
    **dict.fromkeys(
        "view.default reshape.default _unsafe_view.default unsqueeze.default squeeze.default squeeze.dim squeeze.dims "
        "expand.default alias.default".split(),
        _same,
    ),
    **dict.fromkeys(("_to_copy.default", "convert_element_type.default"), _cast),
    "scalar_tensor.default": lambda d: d["s"],
    "pow.Tensor_Scalar": _power,
    "clamp.default": _clamp,
    "clamp_min.default": lambda d: _limited(d, d["min"], None, "cmp_lt", ""),
    "clamp_max.default": lambda d: _limited(d, None, d["max"], "", "cmp_gt"),
    "hardtanh.default": _hard_tanh,
    "mean.dim": _reduced("AVG"),
    "sum.dim_IntList": _reduced("ADD"),
    "amax.default": _reduced("MAX"),
    "amin.default": _reduced("MIN"),
    "linalg_vector_norm.default": _length,
    "var.correction": _variance,
    "var_mean.correction": _variance_and_mean,
    "_softmax.default": _of_rows("softmax"),
    "_log_softmax.default": _of_rows("log_softmax"),
    "logsumexp.default": _logsumexp,
    "native_layer_norm.default": _layer_norm,
    "_fused_rms_norm.default": _rms_norm,
    "rms_norm.default": _rms_norm,
}
