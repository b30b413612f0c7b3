"""Generates the function that launches the parts of a plan at given addresses, for a given number of rows."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from graphfuse.contract import engine
from graphfuse.op_graph.ir import FrozenTensor, TensorId
from graphfuse.runtime.fastcall.writing import Lines, text, trying, when, written

Start = Callable[..., None]
"""Function of stream, address of the workspace, count, and the address or number of each bound tensor, in order. The
parts' numbers of rows are multiples of count (``FrozenPart.rows``). A plan for one number of rows ignores count."""


@dataclass(frozen=True, eq=False)
class FrozenPart:
    """A part of a plan, frozen.

    scratch: byte offset of the launch's scratch memory in the workspace. rows: its number of rows divided by the
    `count` of the call; None if it always has the number of rows that it was planned for.
    """

    frozen: engine.Frozen
    scratch: int = 0
    rows: int | None = None


def start(
    bound: Sequence[FrozenTensor],
    in_workspace: Mapping[TensorId, int],
    constants: Mapping[TensorId, float],
    parts: Sequence[FrozenPart],
) -> Start:
    """Generated function that launches the parts of a plan, in order.

    bound: the tensors whose address or number a call gives. in_workspace: byte offsets of tensors in the workspace.
    constants: numbers that are part of the graph.
    """
    place = {t.id: f"t{t.id}" for t in bound}
    place |= {t: f"c{t}" for t in constants}
    place |= {t: f"workspace + {offset}" for t, offset in in_workspace.items()}
    names: dict[str, object] = {f"c{t}": value for t, value in constants.items()}
    lines: list[str | Lines] = []
    for k, part in enumerate(parts):
        if part.rows is not None:
            lines.append(f"rows = count * {part.rows}" if part.rows > 1 else "rows = count")
        arguments = ", ".join(_argument(a, place, part) for a in part.frozen.arguments)
        match part.frozen:
            case engine.FrozenCall(run=run):
                lines.append(f"run{k}(stream, {arguments})")
                names[f"run{k}"] = run
            case engine.FrozenKernel(launch, launcher):
                if launch.cleared:
                    lines.append(f"clear{k}(stream, [{', '.join(place[t] for t in launch.cleared)}])")
                    names[f"clear{k}"] = launcher.clear
                if launch.grid:
                    lines += _kernel(k, arguments, part.rows is not None)
                    names |= _names(k, part.frozen, part.rows is not None)
    parameters = ("stream", "workspace", "count", *(f"t{t.id}" for t in bound))
    return written("start", "start", text("start", parameters, lines or ["pass"]), names)


def _kernel(k: int, arguments: str, by_rows: bool) -> Lines:
    """Lines that launch the kernel of part `k`.

    The pool of a stream has the blocks that are not in use (``runtime.launch``). After an error the block is dropped.
    """
    changed = when(["known != rows"], f"grid = grid{k}(rows)", f"known{k}[0] = rows, grid")
    return [
        *trying([f"block = waiting{k}[stream].pop()"], "KeyError, IndexError", f"block = new{k}(stream)"),
        "memory, config, place, table, waiting, _ = block",
        *([f"known, grid = known{k}[0]", *changed, "config.gridDimX = grid"] if by_rows else ()),
        f"pack{k}(memory, 0, {arguments})",
        f"error = launch{k}(place, function{k}, table, None)",
        *when(["error"], f"refused{k}(error, block)"),
        "waiting.append(block)",
    ]


def _names(k: int, frozen: engine.FrozenKernel, by_rows: bool) -> dict[str, object]:
    """Objects, by name, that the lines of `_kernel` refer to."""
    launcher, rows = frozen.launcher, frozen.rows
    names = {
        f"waiting{k}": launcher.waiting,
        f"new{k}": launcher.new,
        f"pack{k}": launcher.packing.layout.pack_into,
        f"launch{k}": launcher.launch,
        f"function{k}": launcher.function,
        f"refused{k}": launcher.refused,
    }
    return names | ({f"grid{k}": launcher.grid, f"known{k}": [(rows, launcher.grid(rows))]} if by_rows else {})


def _argument(argument: engine.Argument, place: Mapping[TensorId, str], part: FrozenPart) -> str:
    match argument:
        case engine.Address(tensor) | engine.HostScalar(tensor):
            return place[tensor]
        case engine.Scratch(offset):
            return f"workspace + {part.scratch + offset}"
        case engine.RowCount():
            return repr(part.frozen.rows) if part.rows is None else "rows"
        case engine.Constant(_, value):
            return f"float({str(value)!r})" if isinstance(value, float) else repr(value)
