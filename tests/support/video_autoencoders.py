"""Video autoencoders of diffusers, small and with random weights, and what is called of them."""

import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

CONFIGS = {
    "wan 2.1": {},
    "wan 2.2": {"is_residual": True, "patch_size": 2, "in_channels": 12, "out_channels": 12},
    "qwen-image": {"of": "AutoencoderKLQwenImage"},
}


def wan(of="AutoencoderKLWan", **more):
    """An autoencoder of diffusers in eval mode, its norms and biases away from ones and zeros."""
    import diffusers

    torch.manual_seed(0)
    small = {"base_dim": 8, "z_dim": 4, "num_res_blocks": 1, "latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}
    made = getattr(diffusers, of)(**small | more).eval()
    with torch.no_grad():
        for name, p in made.named_parameters():
            if name.endswith(("gamma", "bias")):
                p.add_(torch.randn_like(p) * 0.1)
    return made


def drawn(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def own(module, *given, **named):
    """What a module's class makes, where its own modules may be fused."""
    return type(module).forward(module, *given, **named)


def distance(made, wanted):
    """The largest difference, over the largest value."""
    assert made.shape == wanted.shape and made.dtype == wanted.dtype
    return ((made - wanted).abs().max() / wanted.abs().max()).item()


Given = tuple[tuple, dict]


@dataclass(frozen=True)
class Call:
    """A call of a module: what it is given, copied before and after, and what it makes."""

    module: torch.nn.Module
    given: Given
    left: Given
    made: torch.Tensor


class Calls:
    """Context in which calls of modules are recorded, those within others before these."""

    def __init__(self, modules: Iterable[torch.nn.Module]):
        self.modules = [*modules]
        self._calls, self._open, self._hooks = list[Call](), list[Given](), []

    def __iter__(self) -> Iterator[Call]:
        return iter(self._calls)

    def __enter__(self):
        for module in self.modules:
            self._hooks += (
                module.register_forward_pre_hook(lambda _, *given: self._open.append(_copied(given)), with_kwargs=True),
                module.register_forward_hook(self._close, with_kwargs=True),
            )
        return self

    def __exit__(self, *error):
        for hook in self._hooks:
            hook.remove()

    def _close(self, module, args, kwargs, made):
        self._calls.append(Call(module, self._open.pop(), _copied((args, kwargs)), made.clone()))


def _copied(given: Given) -> Given:
    return tree_map_only(torch.Tensor, torch.clone, given)


def lists(given: Given) -> list[list]:
    """Lists among arguments: frames that are kept, and the place of the next."""
    args, kwargs = given
    return [value for value in (*args, *kwargs.values()) if isinstance(value, list)]


class Copies(TorchDispatchMode):
    """Operators of aten that move whole activations, as often as they are called, beside what is within kernels.

    least: bytes of what is counted.
    """

    MOVES = ("cat", "constant_pad_nd", "clone", "copy_", "stack", "contiguous", "_to_copy")

    def __init__(self, least):
        super().__init__()
        self.least, self.found = least, Counter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        made = operator(*args, **(kwargs or {}))
        name = operator.name().partition("::")[2].partition(".")[0]
        if name in self.MOVES and made.nbytes >= self.least and not _in_a_kernel():
            self.found[name] += 1
        return made


def _in_a_kernel():
    """True where the reference engine computes what one kernel does on a GPU."""
    frame = sys._getframe(2)
    while frame is not None:
        if "/engines/" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False
