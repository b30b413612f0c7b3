"""Generates the function that allocates tensors and launches several plans in turn, by addresses."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from graphfuse.runtime.fastcall.functions import ALIGNMENT, DECLINED
from graphfuse.runtime.fastcall.starts import Start
from graphfuse.runtime.fastcall.writing import misaligned, text, when, written


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
    plans: Sequence[LaunchedPlan],
    stream: Callable[[], int],
    empty: Callable[[tuple, tuple, object], object],
) -> Callable[..., object]:
    """Generated function of the tensors `given`, in order. It allocates `new`, launches the plans, and returns the
    first of `new`; DECLINED if an address is not a multiple of ALIGNMENT. It compares nothing else; its caller does.

    stream: returns the address of the current stream. empty: allocates, given shape, strides and data type. The plans
    share one workspace.
    """
    names: dict[str, object] = {"stream": stream, "empty": empty, "declined": DECLINED}
    names |= {"uint8": sys.modules["torch"].uint8, "nbytes": max(plan.workspace_bytes for plan in plans)}
    made: list[str] = []
    for name, t in new.items():
        names |= {f"{name}_shape": t.shape, f"{name}_strides": t.strides, f"{name}_type": t.dtype}
        made += [f"t_{name} = empty({name}_shape, {name}_strides, {name}_type)", f"at_{name} = t_{name}.data_ptr()"]
    has_workspace = any(plan.workspace_bytes for plan in plans)
    made += ["workspace = empty((nbytes,), (1,), uint8)", "space = workspace.data_ptr()"] if has_workspace else []
    launched: list[str] = []
    for n, plan in enumerate(plans):
        names |= {f"start{n}": plan.start, f"count{n}": plan.count}
        values = ["current", "space" if has_workspace else "0", f"count{n}"]
        for k, value in enumerate(plan.arguments):
            # Equal forms share one compiled text, as in ``CallForm``: numbers are names.
            names[f"v{n}_{k}"] = value.offset if isinstance(value, At) else value
            values.append(f"at_{value.tensor} + v{n}_{k}" if isinstance(value, At) else f"v{n}_{k}")
        launched.append(f"start{n}({', '.join(values)})")
    body = text(
        "call",
        [f"t_{name}" for name in given],
        [f"at_{name} = t_{name}.data_ptr()" for name in given],
        when([misaligned([f"at_{name}" for name in given], ALIGNMENT)], "return declined"),
        made,
        "current = stream()",
        launched,
        f"return t_{next(iter(new))}",
    )
    return written("sequence", "call", body, names)
