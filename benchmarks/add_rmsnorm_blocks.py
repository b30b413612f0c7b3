"""Residual add → RMSNorm → FP8 with a float32 scale for each 128 neighbours of a row, the sum written in bf16, and
the normalized rows in bf16 where who reads them wants both."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphfuse.benchmarks import judge, target
from graphfuse.benchmarks.bench import Bench
from graphfuse.benchmarks.judge import Accuracy, Tolerance
from graphfuse.benchmarks.peers import flashinfer, graphfuse, stream, torch_compile, torch_eager
from graphfuse.benchmarks.results import MB
from graphfuse.dtypes import data_type
from graphfuse.enums import norm_forward_phase
from graphfuse.user_graph import pygraph

if TYPE_CHECKING:
    import torch

EPS = 1e-6
BLOCK = 128
LARGEST = 448
"""Of FP8 E4M3."""
COLUMNS = 7168
ROWS = (1, 16, 128, 1024, 4096, 32768)
OUTPUTS = ("fp8_e4m3", "fp8_e4m3_bf16")
"""The second with the normalized rows in bf16 beside."""
# Ours normalizes the sum as it is stored; that is half a step of bf16 from the exact one.
SUM = Tolerance(2**-8)
NORM = Accuracy(Tolerance(2**-7 + 2**-12, 2**-20), Tolerance(2**-5, 2**-7))
# The largest value comes from a sum that was rounded and, where the rows are written in bf16, was rounded itself.
SCALE = Accuracy(Tolerance(2**-7 + 2**-12), Tolerance(2**-6))
# Of the value over the scale as it is stored.
ELEMENT = Accuracy(Tolerance(2**-4 + 2**-6, 2**-9), Tolerance(2**-3, 2**-6))


@dataclass
class Operands:
    """One buffer set. x, residual, sum (rows, columns) and weight (columns) bfloat16; normed, like x, or None; out like
    x, float8_e4m3fn. by_block (columns / 128, a multiple of four) float32: memory for the scales, those of one block of
    all rows side by side, as the products that read them want it."""

    x: torch.Tensor
    residual: torch.Tensor
    weight: torch.Tensor
    sum: torch.Tensor
    normed: torch.Tensor | None
    out: torch.Tensor
    by_block: torch.Tensor
    eps: float = EPS

    @property
    def scales(self) -> torch.Tensor:
        """(rows, columns / 128)."""
        return self.by_block.T[: self.x.shape[0]]

    def pack(self) -> dict[str, torch.Tensor]:
        """By the names of the case's graph."""
        named = {"x": self.x, "residual": self.residual, "weight": self.weight[None], "sum": self.sum}
        named |= {"out": self.out, "scales": self.scales}
        return named if self.normed is None else named | {"normed": self.normed}


@dataclass(frozen=True)
class Case:
    """rows x columns of bfloat16, to one of OUTPUTS."""

    rows: int
    columns: int
    output: str

    def __str__(self) -> str:
        return f"{self.output} {self.rows}x{self.columns}"

    @property
    def both(self) -> bool:
        """Whether the normalized rows are written in bf16, too."""
        return self.output == OUTPUTS[1]

    @property
    def apart(self) -> int:
        """Scales from one block of a row to its next."""
        return -(-self.rows // 4) * 4

    @property
    def moved(self) -> int:
        """Bytes: x and residual read, all that is written, the weight."""
        whole = (2 * 2 + 2 + 2 * self.both + 1) * self.columns
        return self.rows * (whole + 4 * self.columns // BLOCK) + 2 * self.columns

    def graph(self, handle=None) -> pygraph:
        graph = pygraph(intermediate_data_type=data_type.FLOAT, io_data_type=data_type.BFLOAT16, handle=handle)
        shape = [self.rows, self.columns]
        total = graph.add(*(graph.tensor(shape, name=name) for name in ("x", "residual")))
        total.set_output().set_name("sum").set_data_type(data_type.BFLOAT16)
        weight = graph.tensor([1, self.columns], name="weight")
        y, _ = graph.rmsnorm(total, weight, EPS, norm_forward_phase=norm_forward_phase.INFERENCE)
        if self.both:
            y.set_output().set_name("normed").set_data_type(data_type.BFLOAT16)
        out, scales = graph.block_scale_quantize(y, block_size=BLOCK, axis=1)
        out.set_output().set_name("out").set_data_type(data_type.FP8_E4M3)
        scales.set_output().set_name("scales").set_data_type(data_type.FLOAT)
        scales.set_dim([self.rows, self.columns // BLOCK]).set_stride([1, self.apart])
        return graph

    def sets(self, count: int, device: str) -> list[Operands]:
        """Sets of random numbers of their own, with one weight."""
        import torch

        def random() -> torch.Tensor:
            return torch.randn(self.rows, self.columns, dtype=torch.bfloat16, device=device)

        weight = (torch.rand(self.columns, device=device) + 0.5).to(torch.bfloat16)

        def one() -> Operands:
            x, residual = random(), random()
            out = torch.empty(self.rows, self.columns, dtype=torch.float8_e4m3fn, device=device)
            by_block = torch.empty(self.columns // BLOCK, self.apart, device=device)
            normed = torch.empty_like(x) if self.both else None
            return Operands(x, residual, weight, torch.empty_like(x), normed, out, by_block)

        return [one() for _ in range(count)]

    def tensors(self, device: str) -> dict[str, torch.Tensor]:
        return self.sets(1, device)[0].pack()

    def spoil(self, operands: Operands) -> None:
        """NaN, which no result is."""
        import torch

        operands.out.view(torch.uint8).fill_(0xFF)
        for tensor in (operands.sum, operands.by_block, operands.normed):
            if tensor is not None:
                tensor.fill_(math.nan)

    def wrong(self, operands: Operands, tight: bool) -> str | None:
        """Why the outputs are wrong, on some rows."""
        rows = judge.checked_rows(self.rows, operands.x.device)
        total = operands.x[rows].double() + operands.residual[rows].double()
        if complaint := judge.wrong(operands.sum[rows].double(), total, SUM.around(total), rows, "sum"):
            return complaint
        exact = total * (total.square().mean(1, keepdim=True) + operands.eps).rsqrt() * operands.weight.double()
        if operands.normed is not None:
            found, accepted = operands.normed[rows].double(), NORM.of(tight).around(exact)
            if complaint := judge.wrong(found, exact, accepted, rows, "normalized row"):
                return complaint
        scales = exact.abs().unflatten(1, (-1, BLOCK)).amax(2) / LARGEST
        found = operands.scales[rows].double()
        if complaint := judge.wrong(found, scales, SCALE.of(tight).around(scales), rows, "scale"):
            return complaint
        exact = (exact / found.repeat_interleave(BLOCK, dim=1)).clamp(-LARGEST, LARGEST)
        accepted = ELEMENT.of(tight).around(exact)
        return judge.wrong(judge.taken(operands.out, rows).double(), exact, accepted, rows)


BENCH = Bench(
    name="add-rmsnorm-fp8-blocks",
    title="Residual add → RMSNorm → FP8 with a scale for each 1 × 128, sum written in bf16",
    cases=tuple(Case(r, COLUMNS, o) for o, r in itertools.product(OUTPUTS, ROWS)),
    quick=tuple(Case(r, COLUMNS, OUTPUTS[0]) for r in (1, 32768)),
    peers=(
        graphfuse.PEER,
        graphfuse.DEPENDENT,
        *flashinfer.ADD_RMSNORM_BLOCKS,
        torch_compile.ADD_RMSNORM_BLOCKS,
        torch_eager.ADD_RMSNORM_BLOCKS,
        stream.PEER,
    ),
    targets=tuple(
        one
        for output in OUTPUTS
        for one in (
            target.slowest_against_best((output,), 1 / 1.1),
            target.least_of_stream(output, 512 * MB, math.inf, 0.95),
        )
    ),
)
