"""What a function read of its module and of the world, and the check that it would read the same now."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

SELF = "self"
_NUMBERS = (int, float, str)
_ONE = (type(None), bool, torch.dtype, type(Ellipsis))


@dataclass(frozen=True, eq=False)
class Read:
    """A value that was read.

    root: where the way to it begins: SELF, the names of a Python module, or an object; path: the attributes on it.
    """

    root: object = field(repr=False)
    path: tuple[str, ...]
    value: object


def is_plain(value: object) -> bool:
    """True if a value is a number, a text, None, a type of data, or a sequence of these: `watched` compares it with
    what it was."""
    if isinstance(value, float) and value != value:
        return False
    if type(value) in (tuple, list, torch.Size):
        return all(map(is_plain, value))
    return type(value) in (*_NUMBERS, *_ONE)


class _Text:
    """Python that compares values with what they were. given: objects that it names."""

    def __init__(self) -> None:
        self.given: dict[str, object] = {}

    def name(self, value: object) -> str:
        name = f"_graphfuse_{len(self.given)}"
        self.given[name] = value
        return name

    def of(self, read: Read) -> str:
        if isinstance(read.root, dict):
            return self.compared(".".join(read.path), read.value)
        first = "_graphfuse_self" if read.root is SELF else self.name(read.root)
        return self.compared(".".join((first, *read.path)), read.value)

    def compared(self, text: str, value: object) -> str:
        if isinstance(value, tuple | list):
            parts = [
                f"{self.name(type)}({text}) is {self.name(type(value))}",
                f"{self.name(len)}({text}) == {len(value)}",
            ]
            return " and ".join((*parts, *(self.compared(f"{text}[{i}]", v) for i, v in enumerate(value))))
        if value is None or isinstance(value, bool):
            return f"{text} is {value}"
        if isinstance(value, _NUMBERS):
            # Not `__class__`, which Dynamo of torch 2.10 does not know of numbers.
            return f"{self.name(type)}({text}) is {self.name(type(value))} and {text} == {self.name(value)}"
        return f"{text} is {self.name(value)}"


def watched(reads: Iterable[Read]) -> Callable[[torch.nn.Module], bool]:
    """Returns what tells whether a module, and the world, still have what was read, in the order of the reads.

    Names of Python modules are looked up as the function that read them does it: the check has the same globals.
    """
    of: dict[int, list[Read]] = {}
    for read in reads:
        of.setdefault(id(read.root) if isinstance(read.root, dict) else 0, []).append(read)
    own, others = of.pop(0, []), list(of.values())
    first, checks = (others[0], [_check(other) for other in others[1:]]) if others else ([], [])
    return _check([*own, *first], *checks)


def hold(watches: Sequence[Callable[[torch.nn.Module], bool]], modules: Sequence[torch.nn.Module]) -> bool:
    """True if what was read of each of some modules is as it was."""
    try:
        return all(watch(module) for watch, module in zip(watches, modules, strict=True))
    except AttributeError:  # of another way through a forward
        return False


def _check(reads: list[Read], *more: Callable[..., bool]) -> Callable[..., bool]:
    text = _Text()
    compared = [*(text.of(read) for read in reads), *(f"{text.name(check)}(_graphfuse_self)" for check in more)]
    names = next((read.root for read in reads if isinstance(read.root, dict)), {})
    source = (
        f"def make({', '.join(text.given)}):\n"
        f"    def watched(_graphfuse_self):\n        return {' and '.join(compared) or True}\n    return watched\n"
    )
    made: dict[str, Callable[..., Callable[..., bool]]] = {}
    exec(compile(source, "<graphfuse watched>", "exec"), names, made)
    return made["make"](**text.given)
