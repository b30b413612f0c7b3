"""RMSNorm of each head of Q and of K, in place, in the packed output of an attention layer's projection."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphfuse.api import pygraph
from graphfuse.base.dtypes import data_type
from graphfuse.base.enums import norm_forward_phase
from graphfuse.benchmarks import judge, target
from graphfuse.benchmarks.bench import Bench
from graphfuse.benchmarks.judge import Accuracy, Tolerance
from graphfuse.benchmarks.peers import flashinfer, graphfuse, quack, stream, torch_compile, torch_eager
from graphfuse.benchmarks.results import MB

if TYPE_CHECKING:
    import torch

EPS = 1e-6
HEAD = 128
"""Elements of a head."""
HEADS = ((32, 8), (64, 8))
ROWS = (1, 16, 128, 4096, 32768)
ACCURACY = Accuracy(Tolerance(2**-7, 2**-20), Tolerance(2**-5, 2**-7))


@dataclass
class QkNormOperands:
    """One buffer set, all bfloat16. x (rows, all heads x HEAD): a token's heads of Q, of K, of V. q, k
    (rows, heads, HEAD) are views of it, joint of both; q_out, k_out are those views for who works in place. before: x
    as it was. q_weight, k_weight (HEAD); joint_weight (heads of Q and K, HEAD) has them for each head."""

    x: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    q_out: torch.Tensor
    k_out: torch.Tensor
    joint: torch.Tensor
    before: torch.Tensor
    q_weight: torch.Tensor
    k_weight: torch.Tensor
    joint_weight: torch.Tensor
    eps: float = EPS

    def pack(self) -> dict[str, torch.Tensor]:
        """By the names of the case's graph: outputs take the place of inputs."""
        weights = {"q_weight": self.q_weight.view(1, 1, -1), "k_weight": self.k_weight.view(1, 1, -1)}
        return weights | {"q": self.q, "k": self.k, "q_out": self.q_out, "k_out": self.k_out}

    def joint_pack(self) -> dict[str, torch.Tensor]:
        return {"joint": self.joint, "joint_weight": self.joint_weight[None], "joint_out": self.joint}


@dataclass(frozen=True)
class QkNormCase:
    """rows tokens. q_heads, k_heads: heads of Q, and of K, of which V has as many."""

    rows: int
    q_heads: int
    k_heads: int
    output: str = "bf16"

    def __str__(self) -> str:
        return f"{self.output} {self.rows}x{self.q_heads}x{self.k_heads}"

    @property
    def columns(self) -> int:
        """Elements of a token, V's among them."""
        return (self.q_heads + 2 * self.k_heads) * HEAD

    @property
    def moved(self) -> int:
        """Bytes: Q and K read and written, the weights."""
        return 2 * 2 * self.rows * (self.q_heads + self.k_heads) * HEAD + 2 * 2 * HEAD

    def graph(self, handle=None) -> pygraph:
        """A normalization of Q and one of K, each with one weight for all its heads."""
        graph = pygraph(intermediate_data_type=data_type.FLOAT, handle=handle)
        for name, heads in (("q", self.q_heads), ("k", self.k_heads)):
            x, weight = self._tensor(graph, name, heads), self._weight(graph, f"{name}_weight", 1)
            y, _ = graph.rmsnorm(x, weight, EPS, norm_forward_phase=norm_forward_phase.INFERENCE)
            self._store(y, f"{name}_out", heads)
        return graph

    def joint_graph(self, handle=None) -> pygraph:
        """One normalization of Q and K together, with a weight for each head."""
        graph = pygraph(intermediate_data_type=data_type.FLOAT, handle=handle)
        heads = self.q_heads + self.k_heads
        x, weight = self._tensor(graph, "joint", heads), self._weight(graph, "joint_weight", heads)
        y, _ = graph.rmsnorm(x, None, EPS, norm_forward_phase=norm_forward_phase.INFERENCE)
        self._store(graph.mul(y, weight), "joint_out", heads)
        return graph

    def _tensor(self, graph: pygraph, name: str, heads: int):
        return graph.tensor([self.rows, heads, HEAD], [self.columns, HEAD, 1], data_type.BFLOAT16, name=name)

    def _weight(self, graph: pygraph, name: str, heads: int):
        return graph.tensor([1, heads, HEAD], data_type=data_type.BFLOAT16, name=name)

    def _store(self, y, name: str, heads: int) -> None:
        y.set_output().set_name(name).set_data_type(data_type.BFLOAT16)
        y.set_dim([self.rows, heads, HEAD]).set_stride([self.columns, HEAD, 1])

    def sets(self, count: int, device: str) -> list[QkNormOperands]:
        """Sets of random numbers of their own, with the same weights: 1 and -1, as a row that is normalized again
        and again in place would else come to nothing but its largest weight's element."""
        import torch

        def signs() -> torch.Tensor:
            return (2 * torch.randint(0, 2, (HEAD,), device=device) - 1).to(torch.bfloat16)

        q_weight, k_weight = signs(), signs()
        heads = (self.q_heads, self.k_heads)
        joint_weight = torch.cat([w.expand(n, HEAD) for w, n in zip((q_weight, k_weight), heads, strict=True)])
        made = []
        for _ in range(count):
            before = 3 * torch.randn(self.rows, self.columns, dtype=torch.bfloat16, device=device)
            x = before.clone()
            q, k, _ = x.unflatten(1, (-1, HEAD)).split((*heads, self.k_heads), dim=1)
            joint = x.unflatten(1, (-1, HEAD))[:, : sum(heads)]
            made.append(QkNormOperands(x, q, k, q, k, joint, before, q_weight, k_weight, joint_weight))
        return made

    def tensors(self, device: str) -> dict[str, torch.Tensor]:
        return self.sets(1, device)[0].pack()

    def spoil(self, operands: QkNormOperands) -> None:
        """The inputs again, which are three times too large."""
        operands.x.copy_(operands.before)

    def wrong(self, operands: QkNormOperands, tight: bool) -> str | None:
        """Why the heads are wrong; V is to be as it was."""
        import torch

        rows = judge.checked_rows(self.rows, operands.x.device)
        before = operands.before[rows].double().unflatten(1, (-1, HEAD))
        normal = before * (before.square().mean(2, keepdim=True) + operands.eps).rsqrt()
        heads = self.q_heads + self.k_heads
        exact = (normal[:, :heads] * operands.joint_weight.double()).flatten(1)
        found = torch.cat((operands.q_out[rows], operands.k_out[rows]), dim=1).double().flatten(1)
        if complaint := judge.wrong(found, exact, ACCURACY.of(tight).around(exact), rows):
            return complaint
        width = heads * HEAD
        v = before.flatten(1)[:, width:]
        return judge.wrong(operands.x[rows, width:].double(), v, 0 * v, rows, "V")


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
