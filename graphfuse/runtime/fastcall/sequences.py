"""Generates the function that allocates tensors and launches several plans in turn, by addresses."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from graphfuse.runtime.fastcall.functions import ALIGNMENT, DECLINED
from graphfuse.runtime.fastcall.starts import Start
from graphfuse.runtime.fastcall.writing import Lines, misaligned, text, when, written


@dataclass(frozen=True)
class At:
    """An address: of a tensor, by its name, and bytes after its first element."""

    tensor: str
    offset: int = 0


@dataclass(frozen=True, eq=False)
class LaunchedPlan:
    """A plan. count: argument of its `start`. arguments: addresses and numbers, in the order of `start`."""

    start: Start
    count: int
    arguments: tuple[At | float, ...]
    workspace_bytes: int = 0


@dataclass(frozen=True, eq=False)
class NewTensor:
    """A tensor that a call allocates. dtype: torch's."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: object


def sequence(
    given: Sequence[str],
    new: Mapping[str, NewTensor],
    steps: Sequence[LaunchedPlan],
    stream: Callable[[], int],
    empty: Callable[[tuple, tuple, object], object],
) -> Callable[..., object]:
    """Generated function of the tensors `given`, in order. It allocates `new`, launches the steps, and returns the
    first of `new`; DECLINED if an address is not a multiple of ALIGNMENT. It checks nothing else.

    stream: returns the address of the current stream. empty: allocates, given shape, strides and data type. The
    steps share one workspace.
    """
    names: dict[str, object] = {"stream": stream, "empty": empty, "declined": DECLINED}
    names["byte"] = sys.modules["torch"].uint8
    made: list[str] = []
    for name, t in new.items():
        names |= {f"{name}_shape": t.shape, f"{name}_strides": t.strides, f"{name}_type": t.dtype}
        made += [f"{name} = empty({name}_shape, {name}_strides, {name}_type)", f"{name}_at = {name}.data_ptr()"]
    nbytes = max(step.workspace_bytes for step in steps)
    made += [f"workspace = empty(({nbytes},), (1,), byte)", "space = workspace.data_ptr()"] if nbytes else ["space = 0"]
    launched: Lines = []
    for n, step in enumerate(steps):
        names |= {f"start{n}": step.start}
        launched = [*launched, f"start{n}({', '.join(('current', 'space', str(step.count), *_values(step)))})"]
    body = text(
        "call",
        given,
        [f"{name}_at = {name}.data_ptr()" for name in given],
        when([misaligned([f"{name}_at" for name in given], ALIGNMENT)], "return declined"),
        made,
        "current = stream()",
        launched,
        f"return {next(iter(new))}",
    )
    return written("sequence", "call", body, names)


def _values(step: LaunchedPlan) -> list[str]:
    return [f"{a.tensor}_at + {a.offset}" if isinstance(a, At) else f"float({str(a)!r})" for a in step.arguments]
