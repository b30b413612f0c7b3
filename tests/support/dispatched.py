"""What a call runs."""

import torch


def operators(function):
    """The operators of graphfuse that a call runs."""
    found = []

    class Seen(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            found.append(str(operator))
            return operator(*args, **(kwargs or {}))

    with Seen():
        function()
    return [name.split(".")[1] for name in found if name.startswith("graphfuse.")]
