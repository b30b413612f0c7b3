"""The ways to run a model: as it is, compiled, with us, compiled with us."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphfuse.benchmarks.peer import Peer

if TYPE_CHECKING:
    import torch

EAGER, COMPILED, OURS, OURS_COMPILED = "eager", "torch_compile", "graphfuse", "graphfuse_compile"
BACKEND = "graphfuse"
"""The name of our backend of torch.compile."""


@dataclass(frozen=True)
class Running:
    """A model made to run in a way. call: with the inputs of the module. sites: how many places were replaced, and how
    many were found, where the way tells."""

    call: Callable[..., torch.Tensor]
    sites: tuple[int, int] | None = None


@dataclass(frozen=True)
class Way(Peer):
    """A peer whose make(case, module) -> Running, on a copy of the module that is its own. seconds: until it has run
    once, forward and backward; what takes longer has failed."""

    seconds: float = 30.0


def compiled(backend: str) -> Callable[[object, torch.nn.Module], Running]:
    """A way's `make`, by a backend of torch.compile."""

    def make(case: object, module: torch.nn.Module) -> Running:
        import torch

        return Running(torch.compile(module, backend=backend))

    return make


def _fused(case: object, module: torch.nn.Module) -> Running:
    from graphfuse.torch import fuse

    report = fuse(module)
    return Running(module, (len(report.replaced), len(report.entries)))


def _no_fuse(case: object, arch: int) -> str | None:
    import graphfuse.torch

    return None if hasattr(graphfuse.torch, "fuse") else "graphfuse.torch has no fuse"


def _no_backend(case: object, arch: int) -> str | None:
    import torch

    there = BACKEND in torch.compiler.list_backends(exclude_tags=None)
    return None if there else f"torch.compile has no backend {BACKEND!r}"


WAYS = (
    Way(EAGER, "eager", lambda case, module: Running(module), ("torch",)),
    Way(COMPILED, "torch.compile", compiled("inductor"), ("torch",), seconds=120.0),
    Way(OURS, "eager, fused", _fused, why_not=_no_fuse, own=True, seconds=60.0),
    Way(OURS_COMPILED, "torch.compile, our backend", compiled(BACKEND), why_not=_no_backend, own=True, seconds=120.0),
)
