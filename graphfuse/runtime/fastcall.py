"""The fast path of repeated calls: generated Python that compares arguments, takes addresses and starts kernels.

The code is written out for one plan or one kind of call, because loops over arguments would take twice as long. There
are three kinds of generated functions:

- `start` starts the parts of a plan at given addresses, for a given number of rows;
- `execute` does so for a variant pack that is like one that was accepted before;
- `function` does so for arguments that are like those of an earlier call, and allocates what the call returns.

Two calls are alike if nothing differs but addresses, numbers passed by value and, where the plan serves any number of
rows, that number. A fast path declines a call that is not alike, or that would be refused, before it has done anything.
Its caller then checks the call in full, runs it or says what is wrong. Fast paths remember nothing of the calls that
they serve.
"""

import functools
import itertools
import linecache
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType

from graphfuse import engine
from graphfuse.errors import VariantPackError
from graphfuse.ir import Tensor, TensorId
from graphfuse.runtime import torch_private
from graphfuse.runtime.buffers import number
from graphfuse.runtime.kept import make_room
from graphfuse.runtime.overlaps import Conflict
from graphfuse.runtime.storage import storage
from graphfuse.runtime.variant_pack import Bindings
from graphfuse.tensor import Tensor as GraphTensor

DECLINED = object()
"""The answer to a call unlike the earlier one: nothing has been done."""

Start = Callable[..., None]
"""Of stream, address of the workspace, count, and the address or number of each bound tensor, in order. count: what the
numbers of rows are multiples of (``KernelPart.rows``); 0 where the plan is for one number of rows."""


def written(what: str, name: str, text: str, names: Mapping[str, object]) -> Callable[..., object]:
    """The function `name` that a text of Python defines. names: its globals. what: names the text in tracebacks, which
    show its lines."""
    space = dict(names)
    exec(_compiled(what, text), space)
    return space[name]


_TEXTS_KEPT = 1024
_codes: dict[str, CodeType] = {}
_numbers = itertools.count()


def _compiled(what: str, text: str) -> CodeType:
    code = _codes.get(text)
    if code is None:
        file = f"<graphfuse {what}, {next(_numbers)}>"
        code = compile(text, file, "exec")
        for oldest in make_room(_codes, _TEXTS_KEPT):
            linecache.cache.pop(oldest.co_filename, None)
        _codes[text] = code
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    return code


# Starting the parts of a plan


@dataclass(frozen=True, eq=False)
class KernelPart:
    """A part of a plan that a kernel runs.

    launcher: the kernel's, as ``runtime.launch.Launcher`` or the emulator's. scratch: byte offset of the launch's own
    memory in the workspace. rows: how many rows the kernel has for each of the `count` that `start` is given; None if
    it always has the number of rows that the launch was planned for.
    """

    launch: engine.Launch
    launcher: object
    scratch: int
    rows: int | None = None


@dataclass(frozen=True, eq=False)
class HostPart:
    """A part of a plan that runs from Python. run: called with buffers and stream."""

    run: Callable[[engine.Buffers, int], None]


Part = KernelPart | HostPart

_START = """
def start(stream, workspace, count, {values}):
{parts}
    return None
"""

# The pool of a stream holds blocks that nobody uses (runtime.launch). After an error the block is not put back.
_KERNEL = """
    try:
        block = waiting{k}[stream].pop()
    except (KeyError, IndexError):
        block = new{k}(stream)
    memory, config, place, table, waiting, _ = block
    {grid}
    pack{k}(memory, 0, {arguments})
    error = launch{k}(place, function{k}, table, None)
    if error:
        refused{k}(error, block)
    waiting.append(block)
"""

_GRID = """rows = {rows}
    known, grid = known{k}[0]
    if known != rows:
        grid = grid{k}(rows)
        known{k}[0] = rows, grid
    config.gridDimX = grid"""


def start(
    bound: Sequence[Tensor],
    in_workspace: Mapping[TensorId, int],
    constants: Mapping[TensorId, float],
    parts: Sequence[Part],
) -> Start:
    """Writes the function that starts the parts of a plan, in order.

    bound: the tensors whose address or number a call gives. in_workspace: byte offsets of tensors that lie in the
    workspace. constants: numbers that the graph holds.
    """
    place = {t.id: f"t{t.id}" for t in bound}
    place |= {t: f"c{t}" for t in constants}
    place |= {t: f"workspace + {offset}" for t, offset in in_workspace.items()}
    names: dict[str, object] = {f"c{t}": value for t, value in constants.items()} | {"Bindings": Bindings}
    lines: list[str] = []
    for k, part in enumerate(parts):
        if isinstance(part, HostPart):
            scalars = {t.id for t in bound if t.by_value} | set(constants)
            given = ", ".join(f"{t}: {where}" for t, where in place.items() if t not in scalars)
            numbers = ", ".join(f"{t}: {place[t]}" for t in sorted(scalars))
            lines.append(f"    run{k}(Bindings({{{given}}}, {{{numbers}}}, workspace), stream)")
            names[f"run{k}"] = part.run
            continue
        launch, launcher = part.launch, part.launcher
        if launch.cleared:
            lines.append(f"    clear{k}(stream, [{', '.join(place[t] for t in launch.cleared)}])")
            names[f"clear{k}"] = launcher.clear
        if not launch.grid:
            continue
        grid = "" if part.rows is None else _GRID.format(k=k, rows=f"count * {part.rows}" if part.rows > 1 else "count")
        arguments = ", ".join(_argument(a, place, part) for a in launch.arguments)
        lines.append(_KERNEL.format(k=k, grid=grid, arguments=arguments))
        names |= {
            f"waiting{k}": launcher.waiting,
            f"new{k}": launcher.new,
            f"pack{k}": launcher.packing.layout.pack_into,
            f"launch{k}": launcher.launch,
            f"function{k}": launcher.function,
            f"refused{k}": launcher.refused,
        }
        if part.rows is not None:
            names |= {
                f"grid{k}": launcher.grid,
                f"known{k}": [(launch.by_rows.rows, launcher.grid(launch.by_rows.rows))],
            }
    text = _START.format(values=", ".join(f"t{t.id}" for t in bound), parts="\n".join(lines))
    return written("start", "start", text, names)


def _argument(argument: engine.Argument, place: Mapping[TensorId, str], part: KernelPart) -> str:
    match argument:
        case engine.Address(tensor) | engine.HostScalar(tensor):
            return place[tensor]
        case engine.Scratch(offset):
            return f"workspace + {part.scratch + offset}"
        case engine.RowCount():
            return repr(part.launch.by_rows.rows) if part.rows is None else "rows"
        case engine.Constant(_, value):
            return f"float({str(value)!r})" if isinstance(value, float) else repr(value)


# Variant packs

_KEYS = frozenset({str, int, GraphTensor, type(None)})

_EXECUTE = """
def execute(pack, workspace, stream, dependent):
    if type(pack) is not dict or len(pack) != {count}:
        return False
    try:
        {values}
        if {unlike}:
            return False
        if {nested}:  # to compare one would end the process
            return False
        if not alike({tensors}):
            return False
        {addresses}
        {numbers}
    except (KeyError, AttributeError, RuntimeError, TypeError, VariantPackError):  # other keys, no tensors, no numbers
        return False
    if {misplaced}:
        return False
    run = start if dependent is False else starts.get(dependent)
    if run is None:
        return False
    run(stream, space, 0, {given})
    return True
"""

Execute = Callable[[object, object, int, bool], bool]
"""Of variant pack, workspace, stream, and whether kernels may begin before those before them end. Returns whether it
ran the pack."""


@dataclass(frozen=True, eq=False)
class Space:
    """The workspace that a plan needs, in bytes, both 0 where it needs none."""

    nbytes: int
    alignment: int


def execute(
    pack: object,
    workspace: object,
    tensors: Mapping[TensorId, tuple[object, Tensor]],
    conflicts: Sequence[tuple[Tensor, Tensor, Conflict]],
    space: Space,
    starts: Mapping[bool, Start],
) -> Execute | None:
    """Writes the function that executes packs like one that was accepted, and returns False for others. None where
    packs like it cannot be told from others: its type, a key or a value is of a kind that comparisons do not cover.

    tensors: the bound tensors in the order that `starts` take them, each with its key in the pack. conflicts: an
    output, another tensor, and what the two may not share. starts: by whether kernels may begin early.
    """
    if type(pack) is not dict or not (workspace is None or comparable(workspace)):
        return None
    if not all(type(key) in _KEYS for key in pack):  # which tensor another object means may change
        return None
    names: dict[str, object] = {
        "start": starts[False],
        "starts": starts,
        "number": number,
        "VariantPackError": VariantPackError,
    }
    values, unlike, numbers, addresses = [], [], [], []
    models: dict[str, object] = {}
    for t, (key, tensor) in tensors.items():
        local, value = f"t{t}", pack[key]
        names[f"k{t}"] = key
        values.append(f"{local} = pack[k{t}]")
        if tensor.by_value:
            if type(value) not in (int, float):
                return None
            unlike.append(f"type({local}) is not {type(value).__name__}")
            numbers.append(f"{local} = number({local}, type{t})")
            names[f"type{t}"] = tensor.dtype
        elif type(value) is int:
            unlike.append(f"type({local}) is not int or not 0 <= {local} < {1 << 64}")
        elif comparable(value):
            models[local] = value
            addresses.append(f"a{t} = {local}.data_ptr()")
        else:
            return None
    where = {t: f"a{t}" if f"t{t}" in models else f"t{t}" for t in tensors}
    if workspace is None:
        unlike.append("workspace is not None")
    else:
        models["workspace"] = workspace
    if int in map(type, pack):  # True and 1.0 equal 1 and are no keys
        unlike.insert(0, "not set(map(type, pack)) <= keys")
        names["keys"] = _KEYS
    if models:
        names["alike"] = guard(list(models.values()))
    addresses.append("space = workspace.data_ptr()" if workspace is not None else "space = 0")
    misplaced = [*_misplaced([(where[t], tensor) for t, (_, tensor) in tensors.items()], space)]
    for n, (made, other, conflict) in enumerate(conflicts):
        low, high = conflict.near
        apart = f"{where[made.id]} - {where[other.id]}"
        misplaced.append(f"{low} < {apart} < {high} and clash{n}({apart})")
        names[f"clash{n}"] = conflict.clash
    text = _EXECUTE.format(
        count=len(pack),
        values="; ".join(values) or "pass",
        unlike=" or ".join(unlike) or "False",
        nested=" or ".join(f"{local}.is_nested" for local in models) or "False",
        tensors=", ".join(models),
        addresses="; ".join(addresses),
        numbers="; ".join(numbers) or "pass",
        misplaced=" or ".join(misplaced) or "False",
        given=", ".join(where.values()),
    )
    if not models:
        text = text.replace("if not alike():", "if False:")
    return written("execute", "execute", text, names)


def _misplaced(tensors: Sequence[tuple[str, Tensor]], space: Space) -> Iterator[str]:
    """Conditions, as Python, under which an address is null or not aligned, or a tensor overlaps the workspace."""
    aligned: dict[int, list[str]] = {}
    for local, tensor in tensors:
        if not tensor.by_value and tensor.elements:
            aligned.setdefault(tensor.alignment, []).append(local)
            if space.nbytes:
                yield f"-{space.nbytes} < space - {local} < {storage(tensor).nbytes}"
    if space.nbytes:
        aligned.setdefault(space.alignment, []).append("space")
    for alignment, locals_ in aligned.items():
        yield f"not ({' and '.join(locals_)})"
        if alignment > 1:
            yield f"({' | '.join(locals_)}) % {alignment}"


def comparable(value: object) -> bool:
    """Whether a guard can compare a value: it is a plain torch tensor or parameter, not nested and of no subclass."""
    torch = sys.modules.get("torch")
    return torch is not None and type(value) in (torch.Tensor, torch.nn.Parameter) and not value.is_nested


def guard(tensors: Sequence[object]) -> torch_private.Check:
    """Tells whether tensors are like these in all but their memory."""
    return torch_private.guard(tensors, [t.shape for t in tensors], [t.stride() for t in tensors])


# Functions

_FUNCTION = """
def call({parameters}):
    try:
        if {unlike}:
            return declined
        shape = {first}.shape  # a nested tensor, which to compare would end the process, has none
        if {nested}:
            return declined
        if not alike({tensors}):
            return declined
        {extents}
        if {shapes}:
            return declined
        {addresses}
    except (AttributeError, RuntimeError, TypeError):  # of no tensor, none with memory
        return declined
    count = {count}
    if {misplaced}:
        return declined
    found = starts.get({row_class}) or prepare(count)
    if found is None:
        return declined
    start, nbytes = found
    {made}
    space = 0
    if nbytes:
        workspace = empty((nbytes,), (1,), uint8)
        space = workspace.data_ptr()
    start(stream(), space, count, {values})
    {bumped}
    return {results}
"""


@dataclass(frozen=True)
class Given:
    """A tensor that a call gives. A fast path serves calls with different counts of slices (``functional.split``).

    counted: whether its leading extents are those of the first tensor. tail: its other extents. packed: whether it has
    to be contiguous; the guard compares the strides of others. row: bytes from one slice to the next, 0 if it is not
    counted. last: bytes that the last slice takes. alignment: bytes that its address is a multiple of, up to 16. sized:
    whether its extents follow from the count by another rule.
    """

    name: str
    counted: bool
    tail: tuple[int, ...]
    packed: bool
    row: int
    last: int
    alignment: int = 16
    sized: bool = False

    @property
    def nbytes(self) -> str:
        """Bytes from its first to past its last, as Python of `count`."""
        if self.sized:
            return f"{self.name}_nbytes(count)"
        if not self.row:
            return str(self.last)
        return f"count * {self.row}" if self.row == self.last else f"((count - 1) * {self.row} + {self.last})"

    def beside(self, other: "Given", apart: str) -> str:
        """The condition that this one, so many bytes behind another, does not lie in gaps between the other's rows,
        however many there are; nothing where there are none of its size."""
        if self.row != other.row or self.last + other.last > self.row:
            return ""
        return f" and not {other.last} <= ({apart}) % {self.row} <= {self.row - self.last}"


@dataclass(frozen=True)
class New:
    """A tensor that the call allocates, contiguous. counted, tail, sized: as in ``Given``."""

    name: str
    counted: bool
    tail: tuple[int, ...]
    sized: bool = False


@dataclass(frozen=True)
class Form:
    """All that the text of a function's fast path depends on. Equal forms share one compiled text.

    parameters: names, in order. numbers: parameters that are numbers. options: parameters that are neither tensors nor
    numbers. absent: parameters for tensors that the call leaves out. same: for each tensor that is given, the first
    parameter that is the same object. leading: how many extents of the first tensor are counted; `trailing` others
    follow. clashes: pairs of a written and another tensor whose addresses are compared. values: parameters and new
    tensors that the plan is started with, in order. written: parameters whose versions the call counts up. results:
    names, None for what was not asked for. alignment: bytes beyond which no plan asks for more.
    """

    name: str
    parameters: tuple[str, ...]
    numbers: tuple[str, ...]
    options: tuple[str, ...]
    absent: tuple[str, ...]
    same: tuple[tuple[str, str], ...]
    given: tuple[Given, ...]
    new: tuple[New, ...]
    leading: int
    trailing: int
    clashes: tuple[tuple[str, str], ...]
    values: tuple[str, ...]
    written: tuple[str, ...]
    results: tuple[str | None, ...]
    alignment: int

    @property
    def text(self) -> str:
        first, by_name = self.given[0], {g.name: g for g in self.given}
        distinct = [name for name, other in self.same if name == other]
        unlike = ["store.generation != generation"]
        unlike += [f"type({n}) is not float or not -{_LARGEST} < {n} < {_LARGEST}" for n in self.numbers]
        # Two of one value may differ in type, as True and 1 do.
        unlike += [f"type({n}) is not {n}_kind or {n} != {n}_value" for n in self.options]
        unlike += [f"{n} is not None" for n in self.absent]
        unlike += [f"{n} is not {other}" for n, other in self.same if n != other]
        extents = [f"d{axis}" for axis in range(self.leading)]
        at = {name: f"{other}_at" for name, other in self.same} | {n.name: f"{n.name}_at" for n in self.new}
        shapes = [g for g in (by_name[name] for name in distinct) if g is not first]
        differ = [f"not {g.name}.is_contiguous()" for g in (first, *shapes) if g.packed]
        like = lambda g: "shape" if g.tail == first.tail else _tuple(*extents, *g.tail)  # noqa: E731
        differ += [f"{g.name}.shape != {like(g)}" for g in shapes if g.counted]
        differ += [f"{g.name}.shape != {g.name}_extents({self._count})[0]" for g in shapes if g.sized]
        misplaced = [*self._misaligned(at, [by_name[name] for name in distinct])]
        for n, (made, other) in enumerate(self.clashes):
            apart = f"{at[made]} - {at[other]}"
            near = f"-{by_name[made].nbytes} < {apart} < {by_name[other].nbytes}"
            beside = by_name[made].beside(by_name[other], apart)
            misplaced.append(f"{near}{beside} and clash{n}(count, {apart})")
        results = ", ".join(str(name) for name in self.results)
        return _FUNCTION.format(
            parameters=", ".join(self.parameters),
            unlike=" or ".join(unlike),
            first=first.name,
            nested=" or ".join(f"{n}.is_nested" for n in distinct if n != first.name) or "False",
            tensors=", ".join(distinct),
            extents=f"{', '.join(extents + ['_'] * self.trailing)}{',' * (self.leading + self.trailing == 1)} = shape",
            shapes=" or ".join(differ) or "False",
            addresses="; ".join(f"{n}_at = {n}.data_ptr()" for n in distinct),
            count=self._count,
            misplaced=" or ".join(misplaced),
            row_class=ROW_CLASS,
            made="; ".join(self._new(extents, n) for n in self.new) or "pass",
            values=", ".join(at.get(v, v) for v in self.values),
            bumped=f"bump({_tuple(*self.written)})" if self.written else "pass",
            results=f"({results})" if len(self.results) > 1 else results or "None",
        )

    def _misaligned(self, at: Mapping[str, str], given: Sequence[Given]) -> Iterator[str]:
        """Conditions under which addresses are aligned otherwise than the plan was made for: no less, as kernels access
        as much at once, and no more, as for such there are faster ones."""
        if most := [at[g.name] for g in given if g.alignment == self.alignment]:
            yield f"({' | '.join(most)}) % {self.alignment}"
        for g in given:
            if g.alignment < self.alignment:
                yield f"{at[g.name]} & -{at[g.name]} != {g.alignment}"

    @property
    def _count(self) -> str:
        return " * ".join(f"d{axis}" for axis in range(self.leading)) or "1"

    def _new(self, extents: Sequence[str], new: New) -> str:
        if new.sized:
            made = f"*{new.name}_extents(count)"
        else:
            tail_strides = [math.prod(new.tail[i + 1 :]) for i in range(len(new.tail))]
            row, strides = math.prod(new.tail), []
            for axis in range(len(extents)) if new.counted else ():
                strides.append(" * ".join([*extents[axis + 1 :], str(row)]))
            shape = (*extents, *new.tail) if new.counted else new.tail
            made = f"{_tuple(*shape)}, {_tuple(*strides, *tail_strides)}"
        return f"{new.name} = empty({made}, {new.name}_type); {new.name}_at = {new.name}.data_ptr()"


def _tuple(*items: object) -> str:
    return f"({''.join(f'{item}, ' for item in items)})"


ROW_CLASS = "(count if count < 16 else -(-count >> (s := count.bit_length() - 4)) << s)"
"""The class of a count, as Python: the count rounded up to four significant bits, which is the largest of its class."""

row_class: Callable[[int], int] = eval(f"lambda count: {ROW_CLASS}")

_LARGEST = "3.4028234e38"
"""Numbers of smaller magnitude are float32's; others are looked at in full."""


def function(form: Form, names: Mapping[str, object]) -> Callable[..., object]:
    """Writes the function that runs calls like an earlier one, and returns DECLINED for others.

    names: the objects that the text refers to:
    store and generation: the store of tuned knobs, and the generation of it that the call was planned with.
    alike: a guard of the given tensors. stream: tells the address of the current stream.
    starts: (start, bytes of workspace) by class of count. prepare: adds the one for a count; None where there is none.
    empty: allocates, given shape, strides and data type.
    NAME_type: data type of a new tensor. NAME_extents, NAME_nbytes: shape and strides, and bytes, of a sized tensor,
    given the count.
    NAME_kind, NAME_value: type and value of an option. clash0, clash1, ...: for each of `clashes`, whether the two
    overlap where they may not, given count and distance.
    """
    torch = sys.modules["torch"]
    own = {"declined": DECLINED, "uint8": torch.uint8, "bump": torch_private.increment_version()}
    return written(f"fast path of {form.name}", "call", _text(form), own | dict(names))


_text = functools.lru_cache(maxsize=1024)(lambda form: form.text)
