"""The op graph of a region as data: for any number of rows, and readable by any process."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property

from graphfuse.api import pygraph
from graphfuse.base.dtypes import data_type
from graphfuse.base.enums import norm_forward_phase, reduction_mode
from graphfuse.base.errors import SerializedError
from graphfuse.functional.tensor_parameter import Shape
from graphfuse.op_graph.freeze import infer
from graphfuse.op_graph.ir import packed_stride
from graphfuse.op_graph.tensor import Tensor
from graphfuse.ops import OPS
from graphfuse.torch.operators.by_rule import empty_graph

Source = str | int | float
"""Source that a step reads: an input by name, a step by "@" and its number, or a number."""


def number_of(source: Source) -> int | None:
    """Number of the step that a source names; None for an input or a number."""
    return int(source[1:]) if isinstance(source, str) and source.startswith("@") else None


_ENUMS = {"mode": reduction_mode, "norm_forward_phase": norm_forward_phase}


@dataclass(frozen=True)
class RowExtents:
    """Shape of a tensor relative to that of the rows.

    axes: for each axis "n" for the rows' extent, "1" for 1, "-" if the tensor lacks it. part: columns of a part, if an
    axis of the parts and one of their columns replace the last axis of the rows; 0 for any other tensor.
    """

    axes: str
    part: int = 0

    def of(self, rows: Shape) -> Shape:
        """Shape for rows of a shape, whose leading axes may be joined."""
        return tuple(n for n, kind in zip(self.padded(rows), self.joined(self.rank(rows)), strict=True) if kind != "-")

    def padded(self, rows: Shape) -> Shape:
        """Shape with extents of 1 for axes that the tensor lacks."""
        extents = (*rows[:-1], rows[-1] // self.part, self.part) if self.part else rows
        return tuple(n if kind == "n" else 1 for kind, n in zip(self.joined(len(extents)), extents, strict=True))

    def rank(self, rows: Shape) -> int:
        """Number of axes of a tensor that has all those of rows of a shape."""
        return len(rows) + (self.part > 0)

    def joined(self, rank: int) -> str:
        """Axes after leading ones are joined, so that `rank` remain."""
        return self.axes[:1] + self.axes[1 + len(self.axes) - rank :] if rank < len(self.axes) else self.axes

    @property
    def whole(self) -> bool:
        return set(self.axes) == {"n"} and not self.part

    @property
    def has_some_row_axes(self) -> bool:
        """True if the tensor has some axes of rows and not others, such as one with the same values for all rows of a
        sample."""
        return len(set(self.axes[:-1])) > 1

    @property
    def is_vector(self) -> bool:
        """True for one value per column, the same in all rows."""
        return set(self.axes[:-1]) <= {"-", "1"} and self.axes[-1] == "n" and not self.part

    @property
    def is_of_tokens(self) -> bool:
        """True for a tensor that is the same along the axis before the columns, and not along all others."""
        return not self.part and self.axes[-2] in "1-" and "n" in self.axes[:-2]

    @property
    def is_split(self) -> bool:
        """True if an axis is missing between others, or more than the last one after them."""
        return "-" in self.axes.removesuffix("-").lstrip("-")

    @property
    def without_columns(self) -> bool:
        """True if the last axis is missing, and not all are."""
        return self.axes.endswith("-") and self.axes.strip("-") != ""


@dataclass(frozen=True)
class RegionInput:
    """An input. dtype: name of its data type. part: as in ``RowExtents``."""

    name: str
    axes: str
    dtype: str
    part: int = 0

    @property
    def extents(self) -> RowExtents:
        return RowExtents(self.axes, self.part)


@dataclass(frozen=True)
class ProgramStep:
    """A node of the graph. op: name in the op table. inputs: sources by port. dtype: type to which its first output is
    rounded; "" for none. part: columns of the parts of rows that it computes with; 0 for rows."""

    op: str
    inputs: Mapping[str, Source]
    attributes: Mapping[str, object] = field(default_factory=dict)
    dtype: str = ""
    part: int = 0

    def reading(self, new: Mapping[Source, Source]) -> ProgramStep:
        """The step with some sources replaced. new: replacements, by source."""
        return replace(self, inputs={port: new.get(source, source) for port, source in self.inputs.items()})


@dataclass(frozen=True)
class Result:
    """An output. step: number of the step that makes it. mark: as in ``Program``."""

    step: int
    axes: str
    dtype: str
    part: int = 0
    mark: str = ""

    @property
    def name(self) -> str:
        return f"out{self.step}{self.mark}"

    @property
    def extents(self) -> RowExtents:
        return RowExtents(self.axes, self.part)


@dataclass(frozen=True)
class Program:
    """Steps in order. The last axis has the columns, the others rows.

    follows: whether outputs that have all rows and columns have the strides of the first input; otherwise they are
    packed. joined: for two row tensors, the extents of both along the axis before the columns; there are inputs for
    each of them, except for those of tokens (`is_of_tokens`), which both share. mark: suffix of the names of tensors.
    """

    inputs: tuple[RegionInput, ...]
    steps: tuple[ProgramStep, ...]
    outputs: tuple[Result, ...]
    follows: bool = False
    joined: tuple[int, ...] = ()
    mark: str = ""

    @cached_property
    def text(self) -> str:
        """JSON, the same for equal programs."""
        return json.dumps(asdict(self, dict_factory=_text_fields), separators=(",", ":"), sort_keys=True)

    def marked(self, mark: str) -> Program:
        """Program with a mark in the names of its tensors, except for those of tokens."""
        names: dict[Source, str] = {one.name: one.name + mark for one in self.inputs if not one.extents.is_of_tokens}
        inputs = tuple(replace(one, name=names.get(one.name, one.name)) for one in self.inputs)
        steps, outputs = (one.reading(names) for one in self.steps), (replace(one, mark=mark) for one in self.outputs)
        return replace(self, inputs=inputs, steps=tuple(steps), outputs=tuple(outputs), mark=mark)

    @property
    def operations(self) -> str:
        """Names of its ops, for reports."""
        names = (step.op if step.op != "identity" else f"cast to {step.dtype or 'FLOAT'}" for step in self.steps)
        return ", ".join(dict.fromkeys(names))

    @staticmethod
    def read(text: str) -> Program:
        """The program that a text describes. Raises SerializedError, which names the fault, if it describes none."""
        try:
            made = json.loads(text)
            inputs = tuple(RegionInput(**one) for one in made["inputs"])
            steps = tuple(ProgramStep(**one) for one in made["steps"])
            outputs = tuple(Result(**one) for one in made["outputs"])
            program = Program(inputs, steps, outputs, made.get("follows", False), tuple(made.get("joined", ())))
        except (ValueError, TypeError, KeyError) as error:
            raise SerializedError(f"the graph of a region is damaged: {type(error).__name__}: {error}") from None
        if (why := program._fault()) is not None:
            raise SerializedError(f"the graph of a region is damaged: {why}")
        return program

    def _fault(self) -> str | None:
        """The first fault; None if the program can be drawn."""
        if not self.inputs:
            return "it has no inputs"
        if self.joined and (len(self.joined) != 2 or not all(isinstance(n, int) for n in self.joined)):
            return f"it is of joined rows with extents {self.joined}; accepted: two integers"
        names = [f"in{n}" for n in range(len(self.inputs))]  # names in generated code
        if [one.name for one in self.inputs] != names:
            return f"its inputs are {[one.name for one in self.inputs]}; accepted: {', '.join(names)}"
        rank = len(self.inputs[0].axes) - (self.inputs[0].part > 0)
        for one in (*self.inputs, *self.outputs):
            if len(one.axes) != rank + (one.part > 0) or not set(one.axes) <= set("n1-"):
                return f"{one.name} has axes {one.axes!r}; accepted: {rank} of n, 1 and -"
            if one.dtype not in data_type.__members__:
                return f"{one.name} has data type {one.dtype!r}, which is none"
        known: set[Source] = {one.name for one in self.inputs}
        for number, step in enumerate(self.steps):
            if (why := _fault_of(step, known)) is not None:
                return f"step {number}: {why}"
            known.add(f"@{number}")
        made = [one.step for one in self.outputs]
        if not made or any(f"@{n}" not in known for n in made) or len({*made}) != len(made):
            return f"its outputs are of steps {made}; accepted: different ones of {len(self.steps)}"
        return None

    def graph(
        self, dims: Sequence[Shape], strides: Sequence[Shape] = (), training: bool = False
    ) -> tuple[pygraph, dict[str, Tensor], list[Tensor]]:
        """A new graph, its inputs by name, and the result of each step. dims, strides: of inputs, all of one rank;
        without strides, rows lie one after the other."""
        graph = empty_graph("region", data_type.FLOAT)
        strides = strides or [*map(packed_stride, dims)]
        given = {
            one.name: graph.tensor(dim, stride, data_type[one.dtype], name=one.name)
            for one, dim, stride in zip(self.inputs, dims, strides, strict=True)
        }
        made = self.draw(graph, given, training)
        for one in self.outputs:
            made[one.step].set_output().set_data_type(data_type[one.dtype])
            if self.follows and one.extents.whole:
                made[one.step].set_stride(strides[0])
        return graph, given, made

    def draw(
        self, graph: pygraph, given: Mapping[str, Tensor], training: bool = False, separate_scale: bool = False
    ) -> list[Tensor]:
        """Tensors that steps make, drawn into a graph. given: the graph's tensors for the inputs, all of one rank.
        training: whether norms make what their gradients need. separate_scale: whether the scale of a norm is a
        separate multiplication after it, as it varies along rows."""
        made: list[Tensor] = []
        parts = {one.name: one.part for one in self.inputs} | {f"@{n}": s.part for n, s in enumerate(self.steps)}
        views: dict[tuple[Source, int], Tensor] = {}

        def read(source: Source, part: int) -> Tensor | float:
            """A source as it is read by a step that computes with such parts."""
            if not isinstance(source, str):
                return source
            number = number_of(source)
            t = given[source] if number is None else made[number]
            if parts[source] == part:
                return t
            if (source, part) not in views:
                views[source, part] = _viewed(graph, t, part, f"v{len(views)}")
            return views[source, part]

        for number, step in enumerate(self.steps):
            op = OPS[step.op]
            attributes = {name: _ENUMS[name][v] if name in _ENUMS else v for name, v in step.attributes.items()}
            inputs = {port: read(source, step.part) for port, source in step.inputs.items()}
            attributes |= op.training if training else {}
            scale = inputs.pop("scale", None) if separate_scale and step.op == "rmsnorm" else None
            getattr(graph, step.op)(**inputs, **attributes, name=f"s{number}{self.mark}")
            node = graph.nodes[-1]
            out = node.outputs[op.outputs[0].name]
            if scale is not None:
                infer(graph, node)
                out = graph.mul(out, scale)
                node = graph.nodes[-1]
            if step.op == "reduction":
                out.set_dim((*node.inputs["input"].get_dim()[:-1], 1))
            if step.dtype:
                out.set_data_type(data_type[step.dtype])
            infer(graph, node)  # for reductions that read it
            made.append(out)
        for one in self.outputs:
            made[one.step] = read(f"@{one.step}", one.part)
        return made


def _viewed(graph: pygraph, t: Tensor, part: int, name: str) -> Tensor:
    """Rows viewed with an axis for their parts; for part 0, parts viewed as rows."""
    dim = tuple(t.get_dim())
    rows, columns = (dim[:-1], dim[-1:]) if part else (dim[:-2], (dim[-2] * dim[-1],))
    if part:
        columns = (columns[0] // part, part) if columns[0] > 1 else (1, 1)
    made = graph.reshape(t, name=name).set_dim((*rows, *columns))
    infer(graph, graph.nodes[-1])
    return made


_OPTIONAL = frozenset({"part", "joined", "mark"})


def _text_fields(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    """Fields of a program that its text holds."""
    return {name: value for name, value in pairs if name not in _OPTIONAL or value}


def _fault_of(step: ProgramStep, known: Collection[Source]) -> str | None:
    """Fault of a step; None if there is none. known: the sources before it."""
    op = OPS.get(step.op)
    if op is None:
        return f"op {step.op!r}, which the op table lacks"
    ports, attributes = {port.name for port in op.inputs}, {a.name for a in op.attributes}
    if others := [*(step.inputs.keys() - ports), *(step.attributes.keys() - attributes)]:
        return f"{step.op} is given {', '.join(others)}; accepted: {', '.join((*sorted(ports), *sorted(attributes)))}"
    if lacking := [port.name for port in op.inputs if not port.optional and port.name not in step.inputs]:
        return f"{step.op} lacks {', '.join(lacking)}"
    for port, source in step.inputs.items():
        is_number = isinstance(source, int | float) and not isinstance(source, bool)
        if not is_number and source not in known:
            return f"{step.op} reads {source!r} as {port}, which nothing before it makes"
    for name, value in step.attributes.items():
        if name in _ENUMS and value not in _ENUMS[name].__members__:
            return f"{step.op} has {name} {value!r}; accepted: {', '.join(_ENUMS[name].__members__)}"
    if step.dtype and step.dtype not in data_type.__members__:
        return f"{step.op} makes {step.dtype!r}, which is no data type"
    return None
