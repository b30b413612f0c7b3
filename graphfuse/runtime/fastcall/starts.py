"""Starts the parts of a plan at given addresses, for a given number of rows."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from graphfuse import engine
from graphfuse.ir import Tensor, TensorId
from graphfuse.runtime.fastcall.writing import written
from graphfuse.runtime.variant_pack import Bindings

Start = Callable[..., None]
"""Of stream, address of the workspace, count, and the address or number of each bound tensor, in order. count: what the
numbers of rows are multiples of (``KernelPart.rows``); 0 where the plan is for one number of rows."""


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
