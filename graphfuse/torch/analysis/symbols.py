"""Values that the interpreter computes with, in addition to numbers: symbols, whose meaning a domain defines, and
things that have a name or were looked up."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType

import torch

from graphfuse.torch.analysis.reads import Read


class ForwardDeclined(Exception):
    """Raised if a function may not do the same in every call. The message says why."""


@dataclass(frozen=True)
class Named:
    """A function, a class, a Python module, or the module itself, by the path along which it was read. is_method:
    whether it is a function that is called with the module first."""

    value: object
    root: object
    path: tuple[str, ...] = ()
    is_method: bool = False


@dataclass(frozen=True)
class TensorMethod:
    """A method of a symbol."""

    symbol: object
    name: str


@dataclass(frozen=True)
class Activation:
    """A module that is new in each call, of a class in transformers' table of activations."""

    cls: type


@dataclass(frozen=True)
class Child:
    """A submodule of the module, by its name."""

    name: str


class NewDict(dict):
    """A dictionary that the function has made, so that all of its content is known."""


UNTRACED = "its forward cannot be traced"
"""Beginning of the reason for a forward that raises an error of its own in a trace."""


def why_left(error: Exception) -> str:
    """Reason why a forward is not replaced, whose trace ended with an error. Any error may occur: forwards were written
    for other inputs."""
    if isinstance(error, ForwardDeclined):
        return f"its forward is not straight: {error}"
    said = str(error).splitlines()[0][:120] if str(error) else ""
    return f"{UNTRACED}: {type(error).__name__}: {said}"


class Domain:
    """Meaning of symbols, and of operations on them. reads: values that were read, in order."""

    symbols: type = object
    facts: type | tuple[type, ...] = ()
    """Types of values that are known of a symbol in this run alone. They may not decide or be computed with, unless
    `settled` allows it."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.reads: dict[tuple[object, ...], Read] = {}

    def record(self, root: object, path: tuple[str, ...], value: object) -> None:
        self.reads.setdefault((id(root), path), Read(root, path, value))

    def settled(self, value: object) -> object:
        """A value that decides something, or that is computed with. Raises ForwardDeclined if it may differ in another
        call."""
        if isinstance(value, self.symbols) or isinstance(value, self.facts):
            raise ForwardDeclined("depends on what differs from call to call")
        return value

    def is_none(self, symbol: object) -> bool:
        raise ForwardDeclined("depends on whether an argument is None")

    def member(self, name: str, tensor: torch.Tensor) -> object:
        """Symbol of a tensor of the module."""
        raise NotImplementedError

    def attribute(self, symbol: object, name: str) -> object:
        raise NotImplementedError

    def compute(
        self, function: Callable[..., object] | TensorMethod, args: Sequence[object], named: Mapping[str, object]
    ) -> object:
        raise NotImplementedError

    def computes(self, function: object) -> bool:
        """True if a function is an operation of torch that accepts symbols."""
        raise NotImplementedError

    def unpack(self, symbol: object, count: int) -> Sequence[object]:
        raise ForwardDeclined("unpacks a symbol")

    def spread(self, value: object) -> Mapping[str, object]:
        """Named arguments that a mapping holds, which a call passes on."""
        if value != {}:
            raise ForwardDeclined("passes on a mapping")
        return {}

    def passed_on(self, function: FunctionType, named: Mapping[str, object]) -> Mapping[str, object]:
        """Named arguments as a function takes them."""
        return named

    def store(self, symbol: object, index: object, value: object) -> bool:
        """True if a value was written to a part of a symbol, which then has another value."""
        return False

    def change(self, function: Callable[..., object], symbol: object, value: object) -> object:
        """Symbol of what an operation in place returns."""
        raise ForwardDeclined("is AugAssign")

    def item(self, child: Child, index: int) -> Child:
        """Module at an index of a list of modules."""
        raise ForwardDeclined("reads a module of several")

    def call_plain(
        self, function: FunctionType, args: Sequence[object], named: Mapping[str, object], run: Callable[[], object]
    ) -> object:
        """Result of a plain function. run: runs it in the interpreter, and raises an error if that is not possible."""
        return run()

    def bound(self, value: object) -> object:
        """A value as a variable holds it."""
        return value

    def may_assume_rank(self, value: object) -> bool:
        """True for a symbol whose rank a run may assume."""
        return False

    def attempt(self, run: Callable[..., object], *args: object) -> object:
        """Result of a function of the interpreter. If it raises an error, nothing that it did is recorded."""
        return run(*args)

    def branch(self, function: FunctionType, args: Sequence[object], count: int) -> Sequence[object] | None:
        """Results of a function that decides in each call, `count` of them; None if it cannot be recorded."""
        return None

    def call_child(self, child: Child, args: Sequence[object], named: Mapping[str, object]) -> object:
        raise ForwardDeclined(f"calls self.{child.name}")
