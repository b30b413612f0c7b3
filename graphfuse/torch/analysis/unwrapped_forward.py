"""The forward of a class as it was written, without its wrappers."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType

import torch

from graphfuse.torch.analysis.symbols import ForwardDeclined

_CHECKPOINTING = "transformers.modeling_layers"
_DEPRECATION = "transformers.utils.deprecation"


@dataclass(frozen=True)
class UnwrappedForward:
    """A class's forward as it was written, and what its wrappers do in addition. checkpoints: whether a wrapper does
    gradient checkpointing. renamed: arguments that wrappers warn about, or pass under another name."""

    function: FunctionType
    checkpoints: bool
    renamed: tuple[str, ...]

    def is_changed(self, module: torch.nn.Module, named: Mapping[str, object]) -> bool:
        """True if the wrappers do more than pass on a call with these named arguments."""
        if self.checkpoints and module.gradient_checkpointing and module.training:
            return True
        return any(name in named for name in self.renamed)

    def replaced(self, function: Callable[..., object], holds: Callable[[torch.nn.Module], bool]) -> FunctionType:
        """Function that replaces the class's forward. It calls the class's forward if a wrapper does more than pass the
        call on, or if `holds` is False for the module."""

        def forward(self_, *given, **named):
            if self.is_changed(self_, named) or not holds(self_):
                return type(self_).forward(self_, *given, **named)
            return function(self_, *given, **named)

        return forward


def unwrapped_forward(cls: type) -> UnwrappedForward:
    """The class's forward without its wrappers. Raises ForwardDeclined if a wrapper is not known."""
    found, checkpoints, renamed = cls.forward, False, list[str]()
    while hasattr(found, "__wrapped__"):
        owner = found.__globals__.get("__name__")
        names = inspect.getclosurevars(found).nonlocals if owner == _DEPRECATION else {}
        if owner == _CHECKPOINTING:
            checkpoints = True
        elif names.get("func") is found.__wrapped__ and "old_name" in names:
            renamed.append(names["old_name"])
        else:
            raise ForwardDeclined(f"its forward is wrapped by {owner}.{found.__code__.co_name}")
        found = found.__wrapped__
    return UnwrappedForward(found, checkpoints, tuple(renamed))
