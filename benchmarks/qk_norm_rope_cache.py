"""RMSNorm and rotary position embedding of Q's and K's heads, K and V written to a paged cache by slots."""

from __future__ import annotations

import itertools
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
from graphfuse.benchmarks.qk_norm_rope_training import HEADS

if TYPE_CHECKING:
    import torch

ROWS = (1, 16, 64, 1024, 4096, 32768)
TYPES = {"bf16": data_type.BFLOAT16, "fp8_e4m3": data_type.FP8_E4M3}
"""Of the cache, by output."""
PAGE = 16
_SCALES = 0.03, 0.02
_STORED = {
    "bf16": Accuracy(Tolerance(2**-7, 2**-18), Tolerance(2**-5, 2**-7)),
    # A value beside a midpoint may be rounded to either side. In units of the scale.
    "fp8_e4m3": Accuracy(Tolerance(2**-4 + 2**-7, 2**-9), Tolerance(2**-3, 2**-4)),
}


@dataclass(kw_only=True)
class QkNormRopeCacheOperands(qk_norm_rope.QkNormRopeOperands):
    """One buffer set: beside the heads v, a view of x like k; k_cache, v_cache (slots, heads, HEAD), pages of PAGE
    slots one after another; slots (rows), int64; scales: of K and V, float32 (1), None for caches in bfloat16."""

    v: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    slots: torch.Tensor
    scales: tuple[torch.Tensor, torch.Tensor] | None

    def pack(self) -> dict[str, torch.Tensor]:
        named = super().pack()
        del named["k_out"]
        named |= {"v": self.v, "k_cache": self.k_cache, "v_cache": self.v_cache, "slots": self.slots[:, None, None]}
        for name, scale in zip("kv", self.scales or (), strict=False):
            named[f"{name}_scale"] = scale[:, None, None]
        return named


@dataclass(frozen=True)
class QkNormRopeCacheCase(qk_norm_rope.QkNormRopeCase):
    """A case whose keys, and values beside them, go to caches of one of TYPES."""

    @property
    def moved(self) -> int:
        """Bytes: Q read and written, K and V read and written to the caches, slots, and what is read beside them."""
        each = TYPES[self.output].nbytes(1) + 2
        of_cache = 2 * each * self.rows * self.k_heads * HEAD
        return 2 * 2 * self.rows * self.q_heads * HEAD + of_cache + self.angle_bytes + 8 * self.rows + 2 * 2 * HEAD

    @property
    def slots(self) -> int:
        """Of a cache that is half full, in whole pages."""
        return -(-2 * self.rows // PAGE) * PAGE

    def graph(self, handle=None) -> pygraph:
        graph = pygraph(intermediate_data_type=data_type.FLOAT, handle=handle)
        given = self.given(graph)
        wide = (self.q_heads + 2 * self.k_heads) * HEAD
        shape, stride = [self.rows, self.k_heads, HEAD], [wide, HEAD, 1]
        v = graph.tensor(shape, stride, data_type.BFLOAT16, name="v")
        slots = graph.tensor([self.rows, 1, 1], data_type=data_type.INT64, name="slots")
        y, _ = graph.rmsnorm(joined(graph, given, ""), None, EPS, norm_forward_phase=norm_forward_phase.INFERENCE)
        y = self.rotated(graph, graph.mul(y, joined(graph, given, "_weight")), given)
        self.store(graph, y, "q")
        k = self.part(graph, self._scaled(graph, y, "k"), "k")
        for name, made in (("k", k), ("v", self._scaled(graph, v, "v"))):
            cache = graph.scatter_rows(made, slots).set_output().set_name(f"{name}_cache")
            cache.set_data_type(TYPES[self.output]).set_dim([self.slots, *shape[1:]])
        return graph

    def _scaled(self, graph: pygraph, t, name: str):
        if self.output == "bf16":
            return t
        scale = graph.tensor([1, 1, 1], data_type=data_type.FLOAT, byte_alignment=4, name=f"{name}_scale")
        return graph.mul(t, graph.reciprocal(scale))

    def sets(self, count: int, device: str) -> list[QkNormRopeCacheOperands]:
        import torch

        dtype = getattr(torch, TYPES[self.output].facts.torch)
        scales = None if self.output == "bf16" else tuple(torch.tensor([s], device=device) for s in _SCALES)
        made = []
        for plain in super().sets(count, device):
            v = plain.x.unflatten(1, (-1, HEAD))[:, -self.k_heads :]
            caches = (torch.zeros(self.slots, self.k_heads, HEAD, device=device).to(dtype) for _ in "kv")
            slots = torch.randperm(self.slots, device=device)[: self.rows]
            made.append(
                QkNormRopeCacheOperands(
                    **vars(plain), v=v, k_cache=next(caches), v_cache=next(caches), slots=slots, scales=scales
                )
            )
        return made

    def spoil(self, operands: QkNormRopeCacheOperands) -> None:
        import torch

        operands.q_out.fill_(99.0)
        for cache in (operands.k_cache, operands.v_cache):
            cache.view(torch.uint8).fill_(0x7A)

    def wrong(self, operands: QkNormRopeCacheOperands, tight: bool) -> str | None:
        rows = judge.checked_rows(self.rows, operands.x.device)
        for name in "qk":
            y = qk_norm_rope.normalized(
                getattr(operands, name)[rows].double(), getattr(operands, f"{name}_weight"), operands.eps
            )
            exact, size = self.turned(operands, y, rows), y.abs().amax(2, keepdim=True).expand_as(y)
            if complaint := self._complaint(operands, name, exact, size, rows, tight):
                return complaint
        v = operands.v[rows].double()
        return self._complaint(operands, "v", v, v.abs(), rows, tight)

    def _complaint(self, operands, name, exact, size, rows, tight) -> str | None:
        output, scale = self.output, 1.0
        if name == "q":
            output, found = "bf16", operands.q_out[rows]
        else:
            found = judge.taken(getattr(operands, f"{name}_cache"), operands.slots[rows])
            scale = 1.0 if operands.scales is None else operands.scales["kv".index(name)].double()
        size = size.maximum(exact.abs())  # a rotated value may be larger than the largest of its head
        accepted = _STORED[output].of(tight).around(size / scale)
        flat = (t.flatten(1) for t in (found.double(), exact / scale, accepted))
        return judge.wrong(*flat, rows, name.upper())


BENCH = Bench(
    name="qk-norm-rope-cache",
    title="RMSNorm and rotary position embedding of Q's and K's heads, K and V to a paged cache, bf16",
    cases=tuple(QkNormRopeCacheCase(r, *HEADS, output=output) for output, r in itertools.product(TYPES, ROWS)),
    quick=tuple(QkNormRopeCacheCase(r, *HEADS, output=output) for output in TYPES for r in (16, 4096)),
    peers=(
        graphfuse.PEER,
        graphfuse.DEPENDENT,
        torch_compile.QK_NORM_ROPE_CACHE,
        torch_eager.QK_NORM_ROPE_CACHE,
        stream.PEER,
    ),
    targets=(
        target.slowest_against_best(tuple(TYPES), 1.02),
        *(target.least_of_stream(output, 16e6, math.inf, 1 / 1.1) for output in TYPES),
    ),
)
