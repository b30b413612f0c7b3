"""RMSNorm and rotary position embedding of Q's and K's heads, and their gradients: a kernel forward, two backward."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphfuse.api import pygraph
from graphfuse.base.dtypes import data_type
from graphfuse.base.enums import norm_forward_phase
from graphfuse.benchmarks import judge, qk_norm_rope, target
from graphfuse.benchmarks.bench import Bench
from graphfuse.benchmarks.judge import Accuracy, Tolerance
from graphfuse.benchmarks.peers import graphfuse, stream, torch_compile, torch_eager
from graphfuse.benchmarks.qk_norm import HEAD
from graphfuse.benchmarks.qk_norm_rope import EPS, joined

if TYPE_CHECKING:
    import torch

ROWS = (16, 64, 256, 1024, 4096, 32768)
HEADS = (32, 8)
"""Of Q and of K, as a layer of Qwen3 8B has them."""
_DX = Accuracy(Tolerance(2**-8 + 2**-12, 2**-14), Tolerance(2**-5, 2**-4))
# Relative to the root of the number of rows that are added.
_DWEIGHT = Accuracy(Tolerance(2**-8 + 2**-12, 2**-12), Tolerance(2**-6, 2**-4))
_SUMMED = 256  # tokens whose exact gradients are in memory at the same time


@dataclass(kw_only=True)
class QkNormRopeTrainingOperands(qk_norm_rope.QkNormRopeOperands):
    """One buffer set: beside the heads dq_out, dk_out, dq, dk (rows, heads, HEAD), dq_weight, dk_weight (HEAD),
    bfloat16; q_inverse_rms, k_inverse_rms (rows, heads, 1), float32."""

    dq_out: torch.Tensor
    dk_out: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dq_weight: torch.Tensor
    dk_weight: torch.Tensor
    q_inverse_rms: torch.Tensor
    k_inverse_rms: torch.Tensor

    def pack(self) -> dict[str, torch.Tensor]:
        rows = ("dq_out", "dk_out", "dq", "dk", "q_inverse_rms", "k_inverse_rms")
        more = {name: getattr(self, name) for name in rows}
        for name in "qk":
            more[f"d{name}_weight"] = getattr(self, f"d{name}_weight")[None, None]
            more[f"{name}_scale"] = getattr(self, f"{name}_weight")[None, None]
        return super().pack() | more


@dataclass(frozen=True)
class QkNormRopeTrainingCase(qk_norm_rope.QkNormRopeCase):
    """A case with the gradients of both results given."""

    @property
    def moved(self) -> int:
        """Bytes: forward as without gradients and the inverse RMS; backward heads and gradients read, gradients
        written, all else read again."""
        inverse_rms = 4 * self.rows * (self.q_heads + self.k_heads)
        forward = super().moved + inverse_rms
        return forward + 3 * self.head_bytes + 2 * self.angle_bytes + inverse_rms + 2 * 2 * 2 * HEAD

    def graph(self, handle=None) -> pygraph:
        graph = pygraph(intermediate_data_type=data_type.FLOAT, handle=handle)
        given = self.given(graph)
        y, inverse = graph.rmsnorm(joined(graph, given, ""), None, EPS, norm_forward_phase=norm_forward_phase.TRAINING)
        y = self.rotated(graph, graph.mul(y, joined(graph, given, "_weight")), given)
        for name in self.heads:
            self.store(graph, y, name)
            inverse_rms = self.part(graph, inverse, name).set_output().set_name(f"{name}_inverse_rms")
            inverse_rms.set_data_type(data_type.FLOAT).set_stride([self.heads[name], 1, 1])
            out = graph.tensor([self.rows, self.heads[name], HEAD], data_type=data_type.BFLOAT16, name=f"d{name}_out")
            weight = graph.tensor([1, 1, HEAD], data_type=data_type.BFLOAT16, name=f"{name}_scale")
            back = self.rotated(graph, out, given, inverse=True)
            dx, dweight, _ = graph.rmsnorm_backward(back, given[name], weight, inverse_rms, has_dbias=False)
            for made, of in ((dx, f"d{name}"), (dweight, f"d{name}_weight")):
                made.set_output().set_name(of).set_data_type(data_type.BFLOAT16)
            dx.set_stride([self.heads[name] * HEAD, HEAD, 1])
        return graph

    def sets(self, count: int, device: str) -> list[QkNormRopeTrainingOperands]:
        import torch

        made = []
        for plain in super().sets(count, device):
            more: dict[str, torch.Tensor] = {}
            for name in "qk":
                out = getattr(plain, f"{name}_out")
                more |= {f"d{name}_out": torch.randn_like(out), f"d{name}": torch.empty_like(out)}
                more[f"d{name}_weight"] = torch.empty_like(plain.q_weight)
                more[f"{name}_inverse_rms"] = torch.empty(*out.shape[:2], 1, device=device)
            made.append(QkNormRopeTrainingOperands(**vars(plain), **more))
        return made

    def spoil(self, operands: QkNormRopeTrainingOperands) -> None:
        super().spoil(operands)
        for name in "qk":
            for made in (f"d{name}", f"d{name}_weight", f"{name}_inverse_rms"):
                getattr(operands, made).fill_(math.nan)

    def wrong(self, operands: QkNormRopeTrainingOperands, tight: bool) -> str | None:
        return super().wrong(operands, tight) or self._wrong_gradients(operands, tight)

    def _wrong_gradients(self, operands: QkNormRopeTrainingOperands, tight: bool) -> str | None:
        """Those of heads on some tokens, those of weights over all."""
        import torch

        device = operands.x.device
        some = judge.checked_rows(self.rows, device)
        for name in "qk":
            for rows in some.split(_SUMMED):
                exact, size, _ = self._exact(operands, name, rows)
                found, tolerance = getattr(operands, f"d{name}")[rows].double(), _DX.of(tight)
                accepted = tolerance.relative * exact.abs() + tolerance.absolute * size
                flat = (t.flatten(1) for t in (found, exact, accepted))
                if complaint := judge.wrong(*flat, rows, f"d{name}"):
                    return complaint
            total = torch.zeros(1, HEAD, dtype=torch.float64, device=device)
            for rows in torch.arange(self.rows, device=device).split(_SUMMED):
                total += self._exact(operands, name, rows)[2].sum((0, 1))
            tolerance = _DWEIGHT.of(tight)
            terms = self.rows * self.heads[name]
            accepted = Tolerance(tolerance.relative, tolerance.absolute * math.sqrt(terms)).around(total)
            found = getattr(operands, f"d{name}_weight")[None].double()
            if complaint := judge.wrong(found, total, accepted, some[:1], f"d{name}_weight"):
                return complaint
        return None

    def _exact(self, operands: QkNormRopeTrainingOperands, name: str, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The gradient of some tokens' heads, the largest magnitudes that it is made of, and the terms of the weight's
        gradient: by torch.autograd, in float64."""
        import torch

        with torch.enable_grad():
            x = getattr(operands, name)[rows].double().requires_grad_()
            weight = getattr(operands, f"{name}_weight").double().expand_as(x).clone().requires_grad_()
            y = self.turned(operands, qk_norm_rope.normalized(x, weight, operands.eps), rows)
            outer = getattr(operands, f"d{name}_out")[rows].double()
            dx, terms = torch.autograd.grad(y, (x, weight), outer)
        inverse = (x.detach().square().mean(2, keepdim=True) + operands.eps).rsqrt()
        return dx, inverse * (outer.abs().amax(2, keepdim=True) * weight.detach().abs().amax() + 1), terms


BENCH = Bench(
    name="qk-norm-rope-training",
    title="RMSNorm and rotary position embedding of Q's and K's heads, forward and backward, bf16",
    cases=(
        *(QkNormRopeTrainingCase(r, *HEADS) for r in ROWS),
        *(QkNormRopeTrainingCase(r, *HEADS, interleaved=True) for r in ROWS),
    ),
    quick=tuple(QkNormRopeTrainingCase(r, *HEADS) for r in (16, 1024)),
    peers=(
        graphfuse.PEER,
        torch_compile.QK_NORM_ROPE_TRAINING,
        torch_eager.QK_NORM_ROPE_TRAINING,
        stream.PEER,
    ),
    targets=(
        target.slowest_against_best(("bf16",), 1.02),
        target.mean_speedup("torch_compile", "torch.compile", ("bf16",), 1.3),
        target.least_of_stream("bf16", 512e6, math.inf, 0.85),
    ),
)
