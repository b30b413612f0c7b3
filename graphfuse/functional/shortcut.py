"""The short way of a call: what is like a call that ran is compared, looked up and started.

Written out for the arguments of the function, as ``runtime.form`` does: loops take twice as long.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

from graphfuse.functional.layout import ALIGNMENT
from graphfuse.functional.problem import Problem
from graphfuse.functional.written import written
from graphfuse.ir import TensorId
from graphfuse.runtime.executable import Known
from graphfuse.runtime.form import Guard, guardable
from graphfuse.runtime.handle import stream_getter

if TYPE_CHECKING:
    from graphfuse.functional.function import Function

DECLINED = object()
"""The answer to a call unlike the one before: nothing has been done."""

Shortcut = Callable[..., object]


def shortcut(
    f: Function, values: Mapping[str, object], tensors: Mapping[str, torch.Tensor], problem: Problem, dependent: bool
) -> Shortcut | None:
    """What runs calls like one that has run, or answers DECLINED; None if such calls cannot be told.

    values: of the call's parameters. tensors: all that it used, those that it allocated among them.
    """
    given = [name for name in tensors if values.get(name) is not None]
    new = [name for name in tensors if name not in given]
    # Most begin at multiples of 16 bytes; the others keep to the long way.
    if not all(guardable(tensors[name]) and tensors[name].data_ptr() % ALIGNMENT == 0 for name in given):
        return None
    # A guard says no to one tensor given twice, which a call in place does.
    first = {name: next(n for n in given if tensors[n] is tensors[name]) for name in given}
    distinct = [name for name in given if first[name] == name]
    make = _made(
        f,
        tuple(first.items()),
        (*new, *["workspace"] * bool(problem.workspace_bytes)),
        tuple(problem.ids.items()),
    )
    makers = [_empty_like(tensors[name]) for name in new]
    if problem.workspace_bytes:
        makers.append(_empty_like(problem.new_workspace()))
    known = Known()
    return make(
        DECLINED,
        stream_getter(problem.graph.handle.device, None),
        Guard([tensors[name] for name in distinct]).alike,
        known.get,
        known.keep,
        problem.executable.at,
        dependent,
        *(type(values[name]) for name in f.options),
        *makers,
    )


_TEXT = """
def make(declined, stream, alike, get, keep, at, dependent{kinds}{makers}):
    def call({parameters}):
        try:
            if {unlike}:
                return declined
            if {nested}:  # to compare one would end the process
                return declined
            if not alike({distinct}):  # before addresses are asked for, which not every class of tensor has
                return declined
            {addresses}
        except (AttributeError, RuntimeError, TypeError):  # of no tensor, none with memory, another number of them
            return declined
        {made}
        key = (stream(), {all_addresses}{numbers})
        calls = get(key)
        if calls is None:
            if ({any_address}) % {alignment}:
                return declined
            calls = keep(key, at({{{ids}}}, {workspace}, key[0], dependent))
        for start in calls:
            start()
        return {results}

    return call
"""


@functools.cache
def _made(
    f: Function, first: tuple[tuple[str, str], ...], new: tuple[str, ...], ids: tuple[tuple[TensorId, str], ...]
) -> Callable[..., Shortcut]:
    """What makes shortcuts. first: of each tensor that is given, the first argument that is the same one. new: what is
    allocated, the workspace last if there is one."""
    distinct = [name for name, other in first if name == other]
    unlike = [f"type({name}) is not float" for name in f.numbers]
    unlike += [f"type({name}) is not {name}_kind" for name in f.options]
    unlike += [f"{name} is not {other}" for name, other in first if name != other]
    addressed = (*distinct, *new)
    at = {name: f"{other}_at" for name, other in first} | {name: f"{name}_at" for name in new}
    results = ", ".join(name if name in at else "None" for name in f.results if name in at or name in f.asked)
    text = _TEXT.format(
        kinds="".join(f", {name}_kind" for name in f.options),
        makers="".join(f", new_{name}" for name in new),
        parameters=", ".join(f.parameters),
        unlike=" or ".join(unlike) or "False",
        nested=" or ".join(f"{name}.is_nested" for name in distinct),
        addresses="; ".join(f"{name}_at = {name}.data_ptr()" for name in distinct),
        distinct=", ".join(distinct),
        made="; ".join(f"{name} = new_{name}(); {name}_at = {name}.data_ptr()" for name in new),
        all_addresses=", ".join(f"{name}_at" for name in addressed),
        numbers="".join(f", {name} or repr({name})" for name in f.numbers),  # 0.0 and -0.0 differ
        any_address=" | ".join(f"{name}_at" for name in addressed),
        alignment=ALIGNMENT,
        ids=", ".join(f"{i}: {at.get(name, name)}" for i, name in ids),
        workspace="workspace_at" if "workspace" in new else "0",
        results=f"({results})" if results else "None",
    )
    return written(f"shortcut to {f.name}", "make", text)


def _empty_like(model: torch.Tensor) -> Callable[[], torch.Tensor]:
    """What allocates tensors like `model`, faster on a GPU than `torch.empty`, whose dispatch costs half a launch."""
    shape, stride, dtype, device = tuple(model.shape), model.stride(), model.dtype, model.device
    general = functools.partial(torch.empty_strided, shape, stride, dtype=dtype, device=device)
    if device.type != "cuda":
        return general
    current, ordinal = torch._C._cuda_getDevice, device.index
    # As the code does that torch.compile generates; it allocates on the current device.
    fast = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
    if fast is None:  # torch does not promise it
        return general
    return lambda: fast(shape, stride, dtype) if current() == ordinal else general()
