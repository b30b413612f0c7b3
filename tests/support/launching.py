"""Kernels started by themselves, by the code that starts them as parts of plans."""

from collections.abc import Callable
from types import SimpleNamespace

from graphfuse.contract.engine import Address, Buffers, FrozenKernel, HostScalar, Launch
from graphfuse.runtime import fastcall


def run(kernel: object, launch: Launch, buffers: Buffers, scratch: int = 0, stream: int = 0, **options: object) -> None:
    """Once. scratch: the address that Scratch offsets count from. options: of ``kernel.launcher``."""
    start(kernel.launcher(launch, **options), launch, buffers, scratch, stream)


def start(launcher: object, launch: Launch, buffers: Buffers, scratch: int = 0, stream: int = 0) -> None:
    prepared(launcher, launch, buffers, scratch)(stream)


def prepared(launcher: object, launch: Launch, buffers: Buffers, scratch: int = 0) -> Callable[[int], None]:
    """Starts the kernel on a stream, with nothing left to generate."""
    given = {a.tensor: buffers.address(a.tensor) for a in launch.arguments if isinstance(a, Address)}
    given |= {a.tensor: buffers.scalar(a.tensor) for a in launch.arguments if isinstance(a, HostScalar)}
    given |= {t: buffers.address(t) for t in launch.cleared}
    bound = [SimpleNamespace(id=t) for t in given]
    begin = fastcall.start(bound, {}, {}, [fastcall.FrozenPart(FrozenKernel(launch, launcher))])
    return lambda stream: begin(stream, scratch, 0, *given.values())
