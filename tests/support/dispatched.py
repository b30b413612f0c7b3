"""What a call runs."""

from torch.utils._python_dispatch import TorchDispatchMode


def operators(function):
    """The operators of graphfuse that a call runs."""
    found = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            found.append(str(operator))
            return operator(*args, **(kwargs or {}))

    with Seen():
        function()
    return [name.split(".")[1] for name in found if name.startswith("graphfuse.")]


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
