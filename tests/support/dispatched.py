"""What a call runs."""

from torch.utils._python_dispatch import TorchDispatchMode

from graphfuse.torch.regions.program import Program


def _calls(function):
    """The operators of graphfuse that a call runs, by name, and what they are given."""
    found = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            found.append((str(operator), args))
            return operator(*args, **(kwargs or {}))

    with Seen():
        function()
    return [(name.split(".")[1], args) for name, args in found if name.startswith("graphfuse.")]


def operators(function):
    """The operators of graphfuse that a call runs."""
    return [name for name, _ in _calls(function)]


def regions(function):
    """What the operators of graphfuse that a call runs compute: the names of a region's operations."""
    return [Program.read(args[1]).operations if name.startswith("region") else name for name, args in _calls(function)]


class Called(TorchDispatchMode):
    """What torch's attention operators are called with, by name."""

    def __init__(self):
        super().__init__()
        self.found = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "attention" in func.name():
            names = [a.name for a in func._schema.arguments]
            self.found[func.name()] = dict(zip(names, args, strict=False)) | (kwargs or {})
        return func(*args, **(kwargs or {}))
