"""The calls whose cost on the host is measured: ours, torch's, and the bare launch below them all."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from graphfuse.api import pygraph
from graphfuse.base.dtypes import data_type
from graphfuse.base.enums import heur_mode, norm_forward_phase
from graphfuse.benchmarks.programs import bare, host_record
from graphfuse.benchmarks.programs.host_record import BACKWARD, KEPT, manner

if TYPE_CHECKING:
    import torch

ROWS, COLUMNS, EPS = 16, 1024, 1e-6
"""So small that the GPU waits for the host."""
RING = 64
"""How many outputs are kept alive, so that the next ones lie elsewhere."""
NORM, SILU = "norm", "SiLU of the norm"
ACCEPTED = 2**-5


@dataclass(frozen=True)
class Call:
    """call(*arguments[i]) works on address set i. gradients: whether autograd watches. makes: what it returns, or
    writes into the set's `out`; None where that is nothing to check."""

    name: str
    call: Callable[..., object]
    arguments: Sequence[tuple]
    gradients: bool = False
    makes: str | None = NORM


@dataclass(frozen=True)
class Sets:
    """Address sets of bfloat16: rows to be normalized, memory for results, gradients. One weight."""

    x: Sequence[torch.Tensor]
    out: Sequence[torch.Tensor]
    dy: Sequence[torch.Tensor]
    weight: torch.Tensor
    columns: int = COLUMNS
    eps: float = EPS

    @classmethod
    def make(cls, count: int, device: str, rows: int = ROWS, columns: int = COLUMNS) -> Sets:
        import torch

        def random() -> list[torch.Tensor]:
            return [torch.randn(rows, columns, dtype=torch.bfloat16, device=device) for _ in range(count)]

        x, weight = random(), (torch.rand(columns, device=device) + 0.5).to(torch.bfloat16)
        return cls(x, [torch.empty_like(each) for each in x], random(), weight, columns)

    @property
    def device(self) -> str:
        return str(self.weight.device)

    @cached_property
    def leaves(self) -> list[torch.Tensor]:
        """x as autograd wants it, the same memory."""
        return [each.detach().requires_grad_() for each in self.x]

    @cached_property
    def rows(self) -> list[tuple[torch.Tensor]]:
        """Arguments of what takes x alone."""
        return [(each,) for each in self.x]

    @cached_property
    def row(self) -> torch.Tensor:
        """The weight as graphs have it."""
        return self.weight[None]

    def pack(self, i: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[i], "weight": self.row, "out": self.out[i]}

    def packs(self) -> list[dict[str, torch.Tensor]]:
        return [self.pack(i) for i in range(len(self.x))]

    def wrong(self, call: Call) -> str | None:
        """Why the first call's result is wrong; None if it is not."""
        import torch

        self.out[0].fill_(float("nan"))
        with torch.set_grad_enabled(call.gradients):
            made = call.call(*call.arguments[0])
        if call.makes is None:
            return None
        made = made[0] if isinstance(made, tuple) else made
        found = (made if isinstance(made, torch.Tensor) else self.out[0]).detach().view(self.x[0].shape).double()
        x = self.x[0].double()
        exact = x * (x.square().mean(1, keepdim=True) + self.eps).rsqrt() * self.weight.double()
        if call.makes == SILU:
            exact = exact * exact.sigmoid()
        error = float((found - exact).norm() / exact.norm())
        return None if error <= ACCEPTED else f"wrong result: its error is {error:.3g} of its size"


def drawn(sets: Sets, handle=None) -> tuple[pygraph, dict[str, int]]:
    """The norm as a graph, and the uids of its tensors."""
    made = pygraph(intermediate_data_type=data_type.FLOAT, handle=handle)
    rows, columns = sets.x[0].shape
    tensors = {
        "x": made.tensor([rows, columns], data_type=data_type.BFLOAT16, name="x"),
        "weight": made.tensor([1, columns], data_type=data_type.BFLOAT16, name="weight"),
    }
    y, _ = made.rmsnorm(*tensors.values(), sets.eps, norm_forward_phase=norm_forward_phase.INFERENCE)
    tensors["out"] = y.set_output().set_name("out").set_data_type(data_type.BFLOAT16)
    return made, {name: t.get_uid() for name, t in tensors.items()}


def built(sets: Sets) -> tuple[pygraph, dict[str, int]]:
    """As ``drawn``. Without a handle of its own, as calls are cheapest; on the CPU by the reference engine."""
    from graphfuse.runtime.handle import create_handle

    reference = sets.device == "cpu"
    made, uids = drawn(sets, create_handle("cpu") if reference else None)
    made.build([heur_mode.FALLBACK if reference else heur_mode.OPENSOURCE])
    return made, uids


def launches(sets: Sets) -> list[Call]:
    """Bare, and by cuda.core: without this project's code at the time of a call."""
    import torch

    made, _ = built(sets)
    kernel = bare.started(made, sets.packs())
    launch, addresses = bare.bare(kernel, torch.cuda.current_stream().cuda_stream)
    core, numbers = bare.cuda_core(kernel)
    return [Call(host_record.BARE, launch, [(a,) for a in addresses]), Call("cuda.core.launch", core, numbers)]


def graphs(sets: Sets) -> list[Call]:
    """The graph API."""
    import torch

    from graphfuse.runtime.handle import create_handle, set_stream

    made, uids = built(sets)
    packs = sets.packs()
    handle = create_handle(sets.device)
    if sets.device != "cpu":
        set_stream(handle, torch.cuda.current_stream())
    bounds = [made.bind(pack) for pack in packs]

    def new_dict(x, out):
        made.execute({"x": x, "weight": sets.row, "out": out})

    by_uid: list[Mapping] = [{uids[name]: t for name, t in pack.items()} for pack in packs]
    name = host_record.EXECUTE
    return [
        Call("graph.bind", type(bounds[0]).__call__, [(bound,) for bound in bounds]),
        Call(name, made.execute, [(pack,) for pack in packs]),
        Call(f"{name}, handle", made.execute, [(pack, None, handle) for pack in packs]),
        Call(f"{name}, uids", made.execute, [(pack,) for pack in by_uid]),
        Call(f"{name}, new dict", new_dict, [*zip(sets.x, sets.out, strict=True)]),
    ]


def functions(sets: Sets) -> list[Call]:
    """The ready-made calls."""
    import torch

    from graphfuse.functional import fused_rmsnorm_silu, rmsnorm

    given = [(x, sets.weight, sets.eps) for x in sets.x]
    into = [(*each, out) for each, out in zip(given, sets.out, strict=True)]
    name = host_record.FUNCTIONAL
    return [
        Call(name, rmsnorm, given),
        Call(f"{name}, out=", rmsnorm, into),
        Call("functional.fused_rmsnorm_silu", fused_rmsnorm_silu, given, makes=SILU),
        Call("torch.empty_like", torch.empty_like, sets.rows, makes=None),
    ]


def manners(name: str, norm: Callable, weight: torch.Tensor, sets: Sets) -> list[Call]:
    """norm(x) forward alone, with outputs kept for a while, and with backward, for which `weight` is a leaf."""
    ring: deque = deque(maxlen=RING)

    def kept(x):
        y = norm(x)
        ring.append(y)
        return y

    return [
        Call(name, norm, sets.rows),
        Call(manner(name, KEPT), kept, sets.rows),
        backward(name, norm, weight, sets),
    ]


def backward(name: str, norm: Callable, weight: torch.Tensor, sets: Sets) -> Call:
    def both(x, dy):
        y = norm(x)
        y.backward(dy)
        x.grad = weight.grad = None
        return y

    return Call(manner(name, BACKWARD), both, [*zip(sets.leaves, sets.dy, strict=True)], gradients=True)


def norms(sets: Sets) -> list[Call]:
    """Modules and functions that take the same place in a model: ours and torch's."""
    import torch

    import graphfuse.torch as ours

    like = {"device": sets.device, "dtype": torch.bfloat16}
    modules = {
        host_record.MODULE: ours.RMSNorm(sets.columns, sets.eps, **like),
        host_record.TORCH: torch.nn.RMSNorm(sets.columns, sets.eps, **like),
        host_record.LLAMA: llama_norm(sets.columns, sets.eps, **like),
    }
    with torch.no_grad():
        for module in modules.values():
            module.weight.copy_(sets.weight)
    calls = [call for name, module in modules.items() for call in manners(name, module, module.weight, sets)]
    weight, shape = torch.nn.Parameter(sets.weight.clone()), (sets.columns,)

    def function(x):
        return torch.nn.functional.rms_norm(x, shape, weight, sets.eps)

    return calls + manners("F.rms_norm", function, weight, sets)


def llama_norm(columns: int, eps: float, **like) -> torch.nn.Module:
    """The norm of transformers' LlamaRMSNorm, one operation of torch after another."""
    import torch

    class LlamaNorm(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(columns, **like))

        def forward(self, x):
            wide = x.to(torch.float32)
            wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
            return self.weight * wide.to(x.dtype)

    return LlamaNorm()


LAUNCHES = "launches"
OURS = {LAUNCHES: launches, "graph API": graphs, "functional": functions, "norms": norms}
"""What makes calls, by what they are together."""
