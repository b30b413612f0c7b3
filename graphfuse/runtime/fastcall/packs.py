"""Generates the fast path for variant packs that are like an accepted one."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from graphfuse.base.errors import VariantPackError
from graphfuse.op_graph.ir import FrozenTensor, TensorId
from graphfuse.op_graph.tensor import Tensor as GraphTensor
from graphfuse.runtime import torch_private
from graphfuse.runtime.buffers import number
from graphfuse.runtime.fastcall.starts import Start
from graphfuse.runtime.fastcall.writing import clashing, misaligned, text, trying, when, written
from graphfuse.runtime.overlaps import Conflict
from graphfuse.runtime.storage import storage

_KEYS = frozenset({str, int, GraphTensor, type(None)})

Execute = Callable[[object, object, int, bool], bool]
"""Function of variant pack, workspace, stream, and whether kernels may begin before the previous ones end. It returns
True if it ran the pack."""


@dataclass(frozen=True, eq=False)
class Space:
    """Size and alignment in bytes of the workspace that a plan needs; both are 0 if it needs none."""

    nbytes: int
    alignment: int


def execute(
    pack: object,
    workspace: object,
    tensors: Mapping[TensorId, tuple[object, FrozenTensor]],
    conflicts: Sequence[tuple[FrozenTensor, FrozenTensor, Conflict]],
    space: Space,
    starts: Mapping[bool, Start],
    count: int = 0,
) -> Execute | None:
    """Generated function that executes packs like an accepted one, and returns False for others.

    None if the pack, a key or a value has a type that the comparisons of generated code do not cover.

    tensors: the bound tensors in the order of the arguments of `starts`, each with its key in the pack. conflicts: an
    output, another tensor, and their conflict. starts: by whether kernels may begin early. count: the argument `count`
    of `starts`.
    """
    known = type(pack) is dict and all(type(key) in _KEYS for key in pack)  # other keys could change their meaning
    if not known or not (workspace is None or comparable(workspace)):
        return None
    kinds = {t: _kind(tensor, pack[key]) for t, (key, tensor) in tensors.items()}
    if None in kinds.values():
        return None
    models = {f"t{t}": pack[tensors[t][0]] for t, kind in kinds.items() if kind == "tensor"}
    models |= {"workspace": workspace} if workspace is not None else {}
    where = {t: f"a{t}" if kind == "tensor" else f"t{t}" for t, kind in kinds.items()}
    clashes = [
        clashing(n, f"{where[made.id]} - {where[other.id]}", conflict.near)
        for n, (made, other, conflict) in enumerate(conflicts)
    ]
    unlike = [f"type(t{t}) is not {kind}" for t, kind in kinds.items() if kind != "tensor"]
    unlike += [
        f"not 0 <= t{t} < {1 << 64}" for t, kind in kinds.items() if kind == "int" and not tensors[t][1].by_value
    ]
    unlike += ["workspace is not None"] if workspace is None else []
    if int in map(type, pack):  # True and 1.0 equal 1, but are no valid keys
        unlike.insert(0, "not set(map(type, pack)) <= keys")
    addresses = [f"{where[t]} = t{t}.data_ptr()" for t, kind in kinds.items() if kind == "tensor"]
    numbers = [f"t{t} = number(t{t}, type{t})" for t, (_, tensor) in tensors.items() if tensor.by_value]
    body = text(
        "execute",
        ("pack", "workspace", "stream", "dependent"),
        when(["type(pack) is not dict", f"len(pack) != {len(pack)}"], "return False"),
        trying(
            [
                *(f"t{t} = pack[k{t}]" for t in tensors),
                *when(unlike, "return False"),
                *when([f"{local}.is_nested" for local in models], "return False"),  # comparing one ends the process
                *when([f"not alike({', '.join(models)})"] if models else [], "return False"),
                *addresses,
                f"space = {'0' if workspace is None else 'workspace.data_ptr()'}",
                *numbers,
            ],
            # Raised for other keys, values that are no tensors, and values that are no numbers.
            "KeyError, AttributeError, RuntimeError, TypeError, VariantPackError",
            "return False",
        ),
        when(_misplaced({t: (where[t], tensors[t][1]) for t in tensors}, space) + clashes, "return False"),
        "run = start if dependent is False else starts.get(dependent)",
        when(["run is None"], "return False"),
        f"run({', '.join(('stream', 'space', str(count), *where.values()))})",
        "return True",
    )
    names = {"start": starts[False], "starts": starts, "number": number, "VariantPackError": VariantPackError}
    sizes, strides = [t.shape for t in models.values()], [t.stride() for t in models.values()]
    names |= {"keys": _KEYS, "alike": torch_private.guard([*models.values()], sizes, strides) if models else None}
    names |= {f"k{t}": key for t, (key, _) in tensors.items()} | {
        f"type{t}": t_.dtype for t, (_, t_) in tensors.items()
    }
    names |= {f"clash{n}": conflict.clash for n, (_, _, conflict) in enumerate(conflicts)}
    return written("execute", "execute", body, names)


def comparable(value: object) -> bool:
    """True if a guard can compare a value: a torch tensor or parameter that is not nested and of no subclass."""
    torch = sys.modules.get("torch")
    return torch is not None and type(value) in (torch.Tensor, torch.nn.Parameter) and not value.is_nested


def _kind(tensor: FrozenTensor, value: object) -> str | None:
    """Kind of comparison for a value: its type's name, or "tensor"; None if comparisons do not cover it."""
    if type(value) is int or tensor.by_value:
        return type(value).__name__ if type(value) in (int, float) else None
    return "tensor" if comparable(value) else None


def _misplaced(tensors: Mapping[TensorId, tuple[str, FrozenTensor]], space: Space) -> list[str]:
    """Python conditions under which an address is null or not aligned, or a tensor overlaps the workspace."""
    places = [(local, t) for local, t in tensors.values() if not t.by_value and t.elements]
    aligned: dict[int, list[str]] = {}
    for local, t in places:
        aligned.setdefault(t.alignment, []).append(local)
    found = []
    if space.nbytes:
        found = [f"-{space.nbytes} < space - {local} < {storage(t).nbytes}" for local, t in places]
        aligned.setdefault(space.alignment, []).append("space")
    for alignment, locals_ in aligned.items():
        found.append(f"not ({' and '.join(locals_)})")
        found += [misaligned(locals_, alignment)] if alignment > 1 else []
    return found
