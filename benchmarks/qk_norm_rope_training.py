"""RMSNorm and rotary position embedding of Q's and K's heads, and their gradients: a kernel forward, two backward."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from graphfuse.base.dtypes import data_type
from graphfuse.base.enums import norm_forward_phase
from graphfuse.benchmarks import qk_norm_rope, target
from graphfuse.benchmarks.bench import Bench
from graphfuse.benchmarks.judge import Accuracy, Tolerance
from graphfuse.benchmarks.peers import graphfuse, stream, torch_compile, torch_eager
from graphfuse.benchmarks.qk_norm import HEAD, normalized, weight
from graphfuse.benchmarks.row_case import Buffer, normal, unset

if TYPE_CHECKING:
    import torch

    from graphfuse.benchmarks.row_case import BufferSet, Exact, Terms

ROWS = (16, 64, 256, 1024, 4096, 32768)
HEADS = (32, 8)
"""Of Q and of K, as a layer of Qwen3 8B has them."""
_DX = Accuracy(Tolerance(2**-8 + 2**-12, 2**-14), Tolerance(2**-5, 2**-4))
# Relative to the root of the number of rows that are added.
_DWEIGHT = Accuracy(Tolerance(2**-8 + 2**-12, 2**-12), Tolerance(2**-6, 2**-4))


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

    def buffers(self) -> dict[str, Buffer | None]:
        named = super().buffers()
        for name, n in self.heads.items():
            named |= {f"d{name}_out": self.out(n, normal()), f"d{name}": self.out(n)}
            # The weight again, for all heads together.
            named[f"{name}_scale"] = replace(weight(unset), filled=True)
            named[f"d{name}_weight"] = replace(weight(unset), values=None, shared=False)
            named[f"{name}_inverse_rms"] = Buffer(data_type.FLOAT, (self.rows, n, 1), (n, 1, 1))
        return named

    def fill(self, operands: BufferSet) -> None:
        super().fill(operands)
        operands.q_scale, operands.k_scale = operands.q_weight, operands.k_weight

    def draw(self, graph, q, k, q_weight, k_weight, table, positions, **more):
        phase = norm_forward_phase.TRAINING
        y, inverse = graph.rmsnorm(graph.join(q, k, 1), None, self.eps, norm_forward_phase=phase)
        y = self.rotated(graph, graph.mul(y, graph.join(q_weight, k_weight, 1)), table, positions)
        made = {}
        for name, x in (("q", q), ("k", k)):
            made[f"{name}_out"] = self.of(graph, y, name)
            inverse_rms = made[f"{name}_inverse_rms"] = self.of(graph, inverse, name)
            back = self.rotated(graph, more[f"d{name}_out"], table, positions, inverse=True)
            dx, dweight, _ = graph.rmsnorm_backward(back, x, more[f"{name}_scale"], inverse_rms, has_dbias=False)
            made |= {f"d{name}": dx, f"d{name}_weight": dweight}
        return made

    def exact(self, operands: BufferSet, rows: torch.Tensor) -> Exact:
        yield from super().exact(operands, rows)
        for name in self.heads:
            exact, size, _ = self._gradients(operands, name, rows)
            yield f"d{name}", exact.flatten(1), _made_of(size.expand_as(exact).flatten(1))

    def terms(self, operands: BufferSet, rows: torch.Tensor) -> Terms:
        for name in self.heads:
            yield f"d{name}_weight", self._gradients(operands, name, rows)[2].flatten(0, 1), _DWEIGHT

    def _gradients(self, operands: BufferSet, name: str, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The gradient of some tokens' heads, the largest magnitudes that it is made of, and the terms of the weight's
        gradient: by torch.autograd, in float64."""
        import torch

        with torch.enable_grad():
            x = getattr(operands, name)[rows].double().requires_grad_()
            weight = getattr(operands, f"{name}_weight").double().expand_as(x).clone().requires_grad_()
            y = self.turned(operands, normalized(x, weight, operands.eps), rows)
            outer = getattr(operands, f"d{name}_out")[rows].double()
            dx, terms = torch.autograd.grad(y, (x, weight), outer)
        inverse = (x.detach().square().mean(2, keepdim=True) + operands.eps).rsqrt()
        return dx, inverse * (outer.abs().amax(2, keepdim=True) * weight.detach().abs().amax() + 1), terms


def _made_of(size: torch.Tensor):
    """What is accepted of gradients that are made of values so large."""

    def accepted(tight: bool, exact: torch.Tensor) -> torch.Tensor:
        tolerance = _DX.of(tight)
        return tolerance.relative * exact.abs() + tolerance.absolute * size

    return accepted


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
        target.least_of_stream("bf16", 32e6, 512e6, 0.85),
        target.least_of_stream("bf16", 512e6, math.inf, 0.85),
    ),
)
