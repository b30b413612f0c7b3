"""``TorchEngine``: checks which nodes torch can run, and calls torch with raw addresses on the caller's stream."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import ClassVar

from graphfuse.base.device import Device
from graphfuse.base.dtypes import data_type
from graphfuse.base.enums import heur_mode, numerical_note
from graphfuse.base.errors import DeviceError, GraphNotSupportedError
from graphfuse.contract import memory
from graphfuse.contract.engine import Address, Engine, FrozenCall, HostScalar, No, NoKnobs, Prepared, Site
from graphfuse.contract.served import Served
from graphfuse.engines.torch_calls.attention import attention
from graphfuse.engines.torch_calls.call import TorchCall, TorchView
from graphfuse.engines.torch_calls.convolutions import convolution
from graphfuse.engines.torch_calls.products import matmul
from graphfuse.engines.torch_calls.settings import TorchSetting, holding
from graphfuse.op_graph.ir import Node, Subgraph
from graphfuse.patterns.epilogues import ATTENTION, ProductFacts, core

CALLS: Mapping[str, Callable[[Subgraph], TorchCall | No]] = {
    "matmul": matmul,
    **dict.fromkeys(("conv_fprop", "conv_dgrad", "conv_wgrad"), convolution),
    **dict.fromkeys(ATTENTION, attention),
}
"""Functions that make torch's call, by the op of the product."""

FIRST_SM = 80
"""The oldest compute capability with kernels of attention."""

_KEPT = 64  # bound functions that are cached by their addresses


class TorchEngine(Engine[ProductFacts, NoKnobs]):
    """Products, convolutions and attention by one call of torch, which reads and writes tensors in place.

    Numerics: sums are in float32 for all settings of torch, and a result is rounded once. float32 operands are not
    rounded. Attention rounds exponentials to q's type before it multiplies them with v.
    """

    name: ClassVar[str] = "torch"
    facts: ClassVar[type] = ProductFacts
    modes: ClassVar[frozenset[heur_mode]] = frozenset({heur_mode.A, heur_mode.B, heur_mode.FALLBACK})
    serves: ClassVar[Served] = Served(
        frozenset({data_type.FLOAT}), rounding=True, layouts=True, by_value=True, ragged=True
    )

    def why_not(self, facts: ProductFacts, device: Device) -> No | None:
        if device.kind != "cuda":
            return No(f"torch's kernels for CUDA do not run on {device}")
        node = core(facts.subgraph)
        if node.op_name in ATTENTION and device.sm < FIRST_SM:
            return No(f"{node} needs SM{FIRST_SM} or newer; {device} is SM{device.sm}")
        found = torch_call(facts.subgraph)
        return found if isinstance(found, No) else None

    def notes(self, facts: ProductFacts, knobs: NoKnobs, device: Device) -> tuple[str, ...]:
        node = core(facts.subgraph)
        rounded = "; exponentials are rounded to q's type" if node.op_name in ATTENTION else ""
        return (f"torch: sums in FLOAT in an order of the kernel's own{rounded}",)

    def numerical_notes_of(self, facts: ProductFacts, knobs: NoKnobs, device: Device) -> frozenset[numerical_note]:
        node, tensors = core(facts.subgraph), facts.subgraph.graph.tensors
        narrow = tensors[node.inputs[0][1]].dtype is not data_type.FLOAT
        return frozenset({numerical_note.TENSOR_CORE} if narrow else ())

    def prepare(self, facts: ProductFacts, knobs: NoKnobs, device: Device, site: Site) -> Prepared:
        call = torch_call(facts.subgraph)
        assert isinstance(call, TorchCall)
        if device.here:
            _check_torch(core(facts.subgraph))
        arguments = (*(Address(view.tensor) for view in call.views), *map(HostScalar, call.numbers))
        frozen = FrozenCall(arguments, by_address(call, device, site.current_stream, site.torch_setting))
        return Prepared(lambda dependent: frozen, undependable="torch starts its kernels")


def _check_torch(node: Node) -> None:
    """Raises GraphNotSupportedError if this build of torch has no kernels for the node."""
    import torch

    if not torch.cuda.is_available():
        raise GraphNotSupportedError(f"{node}: torch {torch.__version__} sees no CUDA device")
    if node.op_name.startswith("conv") and not torch.backends.cudnn.is_available():
        raise GraphNotSupportedError(f"{node}: torch {torch.__version__} has no cuDNN")


def torch_call(facts: Subgraph) -> TorchCall | No:
    """Torch's call for a product and the nodes after it, or the first reason why there is none."""
    return CALLS[core(facts).op_name](facts)


def by_address(
    call: TorchCall, device: Device, current_stream: Callable[[Device], int], setting: TorchSetting
) -> Callable[..., None]:
    """Function that makes `call`, given a stream, the addresses of its tensors, and numbers.

    current_stream, setting: as in ``Site``."""
    ready: Ready | None = None
    known: dict[tuple[float, ...], Callable[..., object]] = {}
    count = len(call.views)

    def bound(addresses: tuple[float, ...]) -> Callable[..., object]:
        nonlocal ready
        # Torch is imported by the first call, as a process may plan without running graphs.
        ready = ready or Ready.of(call, setting)
        if len(known) >= _KEPT:
            known.clear()
        tensors = tensors_at(ready.torch, call.views, addresses, device)
        known[addresses] = run = ready.hold(call.bind(ready.torch, *tensors))
        return run

    def started(stream: int, *values: float) -> None:
        numbers = values[count:]
        addresses = values[:count] if numbers else values
        try:
            run = known.get(addresses) or bound(addresses)
            if current_stream(device) == stream:
                run(*numbers)
            else:
                with memory.on(ready.torch, device, stream):
                    run(*numbers)
        except RuntimeError as error:
            raise DeviceError(f"torch: {' '.join(str(error).split())}") from error

    return started


@dataclass(frozen=True, eq=False)
class Ready:
    """The imported module torch. hold: wraps a function, so that it runs with the settings of the call."""

    torch: ModuleType
    hold: Callable[[Callable[..., object]], Callable[..., object]]

    @staticmethod
    def of(call: TorchCall, setting: TorchSetting) -> "Ready":
        import torch

        return Ready(torch, holding(setting, call.settings))


def tensors_at(torch, found: tuple[TorchView, ...], addresses: tuple[float, ...], device: Device) -> list[object]:
    """Tensors on the memory at these addresses, which callers keep alive."""
    with torch.inference_mode(False):  # otherwise calls outside of that mode could not write to them
        return [_view(torch, view, int(address), device) for view, address in zip(found, addresses, strict=True)]


def _view(torch, view: TorchView, address: int, device: Device):
    dtype = getattr(torch, view.dtype.facts.torch)
    if not view.nbytes:
        return torch.empty(view.dim, dtype=dtype, device=device.memory)
    return memory.wrap(torch, address, view.nbytes, device).view(dtype).as_strided(view.dim, view.stride)
