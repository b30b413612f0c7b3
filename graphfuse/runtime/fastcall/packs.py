"""Runs variant packs that are like an accepted one."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from graphfuse.errors import VariantPackError
from graphfuse.ir import Tensor, TensorId
from graphfuse.runtime.buffers import number
from graphfuse.runtime.fastcall.guards import comparable, guard
from graphfuse.runtime.fastcall.starts import Start
from graphfuse.runtime.fastcall.writing import written
from graphfuse.runtime.overlaps import Conflict
from graphfuse.runtime.storage import storage
from graphfuse.tensor import Tensor as GraphTensor

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
        if {differ}:
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
        differ=f"not alike({', '.join(models)})" if models else "False",
        addresses="; ".join(addresses),
        numbers="; ".join(numbers) or "pass",
        misplaced=" or ".join(misplaced) or "False",
        given=", ".join(where.values()),
    )
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
