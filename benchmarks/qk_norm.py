"""RMSNorm of each head of Q and of K, in place, in the packed output of an attention layer's projection."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphfuse.api import pygraph
from graphfuse.base.dtypes import data_type
from graphfuse.base.enums import norm_forward_phase
from graphfuse.benchmarks import target
from graphfuse.benchmarks.bench import Bench
from graphfuse.benchmarks.judge import Accuracy, Tolerance
from graphfuse.benchmarks.peers import flashinfer, graphfuse, quack, stream, torch_compile, torch_eager
from graphfuse.benchmarks.results import MB
from graphfuse.benchmarks.row_case import Buffer, BufferCase, normal, unset

if TYPE_CHECKING:
    import torch

    from graphfuse.benchmarks.row_case import BufferSet, Exact, Values

HEAD = 128
"""Elements of a head."""
HEADS = ((32, 8), (64, 8))
ROWS = (1, 16, 128, 4096, 32768)
ACCURACY = Accuracy(Tolerance(2**-7, 2**-20), Tolerance(2**-5, 2**-7))


def _signs(*shape: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """1 and -1, as a row that is normalized again and again in place would else come to nothing but its largest
    weight's element."""
    import torch

    return (2 * torch.randint(0, 2, shape, device=device) - 1).to(dtype)


def weight(values: Values, heads: int = 1, stride: tuple[int, ...] | None = None) -> Buffer:
    """The weight of a head, one for all of them."""
    return Buffer(data_type.BFLOAT16, (1, heads, HEAD), stride, values=values, shared=True, own=(HEAD,))


@dataclass(frozen=True)
class HeadsCase(BufferCase):
    """rows tokens. q_heads, k_heads: heads of Q, and of K, of which V has as many. Their memory is x (rows, columns): a
    token's heads of Q, of K, of V."""

    rows: int
    q_heads: int
    k_heads: int

    def __str__(self) -> str:
        return f"{self.output} {self.rows}x{self.q_heads}x{self.k_heads}"

    @property
    def columns(self) -> int:
        """Elements of a token, V's among them."""
        return (self.q_heads + 2 * self.k_heads) * HEAD

    @property
    def heads(self) -> dict[str, int]:
        return {"q": self.q_heads, "k": self.k_heads}

    def packed(self, values: Values) -> Buffer:
        return Buffer(data_type.BFLOAT16, (self.rows, self.columns), values=values, drawn=False)

    def part(self, heads: int, values: Values | None = unset) -> Buffer:
        """Heads where they are in x."""
        return Buffer(data_type.BFLOAT16, (self.rows, heads, HEAD), (self.columns, HEAD, 1), values=values, filled=True)

    def fill(self, operands: BufferSet) -> None:
        x = operands.x.unflatten(1, (-1, HEAD))
        operands.q, operands.k, operands.v = x.split((self.q_heads, self.k_heads, self.k_heads), dim=1)


@dataclass(frozen=True)
class QkNormCase(HeadsCase):
    """In place: q_out, k_out are q and k. before: x as it was. joint: Q and K together, joint_weight (heads of both,
    HEAD) has their weights for each head."""

    output: str = "bf16"

    def buffers(self) -> dict[str, Buffer]:
        named = {"before": self.packed(normal(3)), "x": self.packed(unset)}
        for name, heads in self.heads.items():
            named |= {name: self.part(heads), f"{name}_weight": weight(_signs), f"{name}_out": self.part(heads, None)}
        return named

    def draw(self, graph, q, q_weight, k, k_weight):
        """A normalization of Q and one of K, each with one weight for all its heads."""
        given = {"q_out": (q, q_weight), "k_out": (k, k_weight)}
        phase = norm_forward_phase.INFERENCE
        return {name: graph.rmsnorm(*t, self.eps, norm_forward_phase=phase)[0] for name, t in given.items()}

    def joint_graph(self, handle=None) -> pygraph:
        """One normalization of Q and K together, with a weight for each head."""
        graph = pygraph(intermediate_data_type=data_type.FLOAT, handle=handle)
        dim, stride = [self.rows, self.q_heads + self.k_heads, HEAD], [self.columns, HEAD, 1]
        x = graph.tensor(dim, stride, data_type.BFLOAT16, name="joint")
        weights = graph.tensor([1, *dim[1:]], data_type=data_type.BFLOAT16, name="joint_weight")
        y, _ = graph.rmsnorm(x, None, self.eps, norm_forward_phase=norm_forward_phase.INFERENCE)
        out = graph.mul(y, weights).set_output().set_name("joint_out").set_data_type(data_type.BFLOAT16)
        out.set_dim(dim).set_stride(stride)
        return graph

    def joint_pack(self, operands: BufferSet) -> dict[str, torch.Tensor]:
        joint = operands.joint
        return {"joint": joint, "joint_weight": operands.joint_weight[None], "joint_out": joint}

    def fill(self, operands: BufferSet) -> None:
        import torch

        super().fill(operands)
        operands.x.copy_(operands.before)
        operands.q_out, operands.k_out = operands.q, operands.k
        operands.joint = operands.x.unflatten(1, (-1, HEAD))[:, : self.q_heads + self.k_heads]
        weights = (getattr(operands, f"{name}_weight").expand(n, HEAD) for name, n in self.heads.items())
        operands.joint_weight = torch.cat([*weights])

    def spoil(self, operands: BufferSet) -> None:
        """The inputs again, which are three times too large."""
        operands.x.copy_(operands.before)

    def exact(self, operands: BufferSet, rows: torch.Tensor) -> Exact:
        before = operands.before[rows].double().unflatten(1, (-1, HEAD))
        *heads, v = before.split((self.q_heads, self.k_heads, self.k_heads), dim=1)
        for name, x in zip(self.heads, heads, strict=True):
            exact = normalized(x, getattr(operands, f"{name}_weight"), operands.eps)
            yield f"{name}_out", exact.flatten(1), ACCURACY
        yield "v", v.flatten(1), lambda tight, exact: 0 * exact  # as it was


def normalized(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * (x.square().mean(2, keepdim=True) + eps).rsqrt() * weight.to(x.dtype)


BENCH = Bench(
    name="qk-norm",
    title="RMSNorm of Q's and K's heads in packed QKV, bf16",
    cases=tuple(QkNormCase(r, *heads) for heads, r in itertools.product(HEADS, ROWS)),
    quick=tuple(QkNormCase(r, 32, 8) for r in (1, 128, 32768)),
    peers=(
        graphfuse.PEER,
        graphfuse.DEPENDENT,
        graphfuse.ONE_KERNEL,
        *flashinfer.QK_NORM,
        *quack.QK_NORM,
        torch_compile.QK_NORM,
        torch_eager.QK_NORM,
        stream.PEER,
    ),
    targets=(
        target.slowest_against_best(("bf16",), 1.02),
        target.slowest_against_best(("bf16",), 1.02, graphfuse.DEPENDENT.name, " with dependent launch"),
        target.slowest_against_best(("bf16",), 1.02, graphfuse.ONE_KERNEL.name, " in one kernel"),
        target.least_of_stream("bf16", 512 * MB, math.inf, 0.97),
        target.least_of_stream("bf16", 512 * MB, math.inf, 0.97, graphfuse.ONE_KERNEL.name, " in one kernel"),
    ),
)
