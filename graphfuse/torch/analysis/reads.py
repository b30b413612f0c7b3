"""Values that a function read of its module and of the world, and the check that it would read the same now."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

SELF = "self"
_NUMBERS = (int, float, str)
_ONE = (type(None), bool, torch.dtype, type(Ellipsis))


@dataclass(frozen=True, eq=False)
class Read:
    """A value that was read.

    root: where its path begins: SELF, the globals of a Python module, or an object. path: the attributes from there.
    """

    root: object = field(repr=False)
    path: tuple[str, ...]
    value: object


def is_plain(value: object) -> bool:
    """True if a value is a number, a string, None, a dtype, or a sequence of these: `watched` compares such values with
    what they were."""
    if isinstance(value, float) and value != value:
        return False
    if type(value) in (tuple, list, torch.Size):
        return all(map(is_plain, value))
    return type(value) in (*_NUMBERS, *_ONE)


def watched(reads: Iterable[Read]) -> Callable[[torch.nn.Module], bool]:
    """Function that returns whether a module, and the world, still have what was read, in the order of the reads.

    It looks up names of Python modules as the function that read them does: it has the same globals.
    """
    of: dict[int, list[Read]] = {}
    for read in reads:
        of.setdefault(id(read.root) if isinstance(read.root, dict) else 0, []).append(read)
    own, others = of.pop(0, []), list(of.values())
    first, checks = (others[0], [_check(other) for other in others[1:]]) if others else ([], [])
    return _check([*own, *first], *checks)


def hold(watches: Sequence[Callable[[torch.nn.Module], bool]], modules: Sequence[torch.nn.Module]) -> bool:
    """True if the values that were read of each module are unchanged."""
    try:
        return all(watch(module) for watch, module in zip(watches, modules, strict=True))
    except AttributeError:  # a read of another path through the forward
        return False


def _check(reads: list[Read], *more: Callable[..., bool]) -> Callable[..., bool]:
    """Function, compiled from generated Python, that compares values with what they were."""
    given: dict[str, object] = {}  # objects by their names in the source

    def name(value: object) -> str:
        given[found := f"_graphfuse_{len(given)}"] = value
        return found

    def compared(text: str, value: object) -> str:
        if isinstance(value, tuple | list):
            parts = f"{name(type)}({text}) is {name(type(value))}", f"{name(len)}({text}) == {len(value)}"
            return " and ".join((*parts, *(compared(f"{text}[{i}]", v) for i, v in enumerate(value))))
        if value is None or isinstance(value, bool):
            return f"{text} is {value}"
        if isinstance(value, _NUMBERS):
            # Not `__class__`: Dynamo of torch 2.10 does not support it on numbers.
            return f"{name(type)}({text}) is {name(type(value))} and {text} == {name(value)}"
        return f"{text} is {name(value)}"

    def way(read: Read) -> str:
        first = () if isinstance(read.root, dict) else ("_graphfuse_self" if read.root is SELF else name(read.root),)
        return ".".join((*first, *read.path))

    conditions = [compared(way(read), read.value) for read in reads]
    conditions += [f"{name(check)}(_graphfuse_self)" for check in more]
    names = next((read.root for read in reads if isinstance(read.root, dict)), {})
    source = (
        f"def make({', '.join(given)}):\n"
        f"    def watched(_graphfuse_self):\n        return {' and '.join(conditions) or True}\n    return watched\n"
    )
    made: dict[str, Callable[..., Callable[..., bool]]] = {}
    exec(compile(source, "<graphfuse watched>", "exec"), names, made)
    return made["make"](**given)
