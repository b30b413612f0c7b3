"""RMSNorm -> SiLU at the 120 problem sizes of the cuDNN frontend's engine."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphfuse.benchmarks import target
from graphfuse.benchmarks.bench import Bench
from graphfuse.benchmarks.peers import cudnn, flashinfer, graphfuse, stream, torch_compile, torch_eager
from graphfuse.benchmarks.results import MB

if TYPE_CHECKING:
    import torch

COLUMNS = (64, 128, 160, 256, 320, 512, 640, 1024)
ROWS = (1560, 6240, 24960, 99840, 399360)
EPS = 1e-6
BLOCK = 16
CHECKED_ROWS = 4096
CODES = (0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6)
"""What the sixteen E2M1 codes stand for."""


@dataclass(frozen=True)
class Tolerance:
    """Accepted errors, absolute and relative to the exact value; `steps` of a block scale for NVFP4."""

    relative: float = 0
    absolute: float = 0
    steps: float = 0


@dataclass(frozen=True)
class Output:
    """bits: of a value, packed in items of torch's type `storage`. tight: one rounding of the
    exact value. loose: for peers that round in between."""

    storage: str
    bits: int
    tight: Tolerance
    loose: Tolerance
    block_scales: bool = False


OUTPUTS = {
    "bf16": Output("bfloat16", 16, Tolerance(2**-7, 2**-20), Tolerance(2**-5, 2**-7)),
    "fp8_e4m3": Output("float8_e4m3fn", 8, Tolerance(2**-4 + 2**-10, 2**-9), Tolerance(2**-3, 2**-6)),
    "nvfp4": Output("uint8", 4, Tolerance(steps=1), Tolerance(steps=2), block_scales=True),
}


@dataclass
class Operands:
    """One buffer set. x (rows, columns) and weight (columns) bfloat16; scales float8_e4m3fn for NVFP4, else None."""

    x: torch.Tensor
    weight: torch.Tensor
    out: torch.Tensor
    scales: torch.Tensor | None
    eps: float = EPS


@dataclass(frozen=True)
class Case:
    rows: int
    columns: int
    output: str

    @property
    def label(self) -> str:
        return f"{self.output} {self.rows}x{self.columns}"

    @property
    def moved(self) -> int:
        """Input, weight, output and block scales in bytes."""
        form = OUTPUTS[self.output]
        values = self.rows * self.columns
        scales = values // BLOCK if form.block_scales else 0
        return 2 * (values + self.columns) + values * form.bits // 8 + scales

    def sets(self, count: int, device: str) -> list[Operands]:
        """Sets of random numbers of their own, with one weight."""
        import torch

        form, shape = OUTPUTS[self.output], (self.rows, self.columns)
        dtype = getattr(torch, form.storage)
        weight = (torch.rand(self.columns, device=device) + 0.5).to(torch.bfloat16)

        def empty(columns: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(self.rows, columns, dtype=dtype, device=device)

        return [
            Operands(
                x=torch.randn(shape, dtype=torch.bfloat16, device=device),
                weight=weight,
                out=empty(self.columns * form.bits // 8 // dtype.itemsize, dtype),
                scales=empty(self.columns // BLOCK, torch.float8_e4m3fn) if form.block_scales else None,
            )
            for _ in range(count)
        ]

    def spoil(self, operands: Operands) -> None:
        """NaN, which no result is."""
        import torch

        for tensor in (operands.out, operands.scales):
            if tensor is not None:
                tensor.view(torch.uint8).fill_(0xFF)

    def wrong(self, operands: Operands, tight: bool) -> str | None:
        """Why the outputs are wrong, judged in float64 on some thousands of rows, the last one among them."""
        import torch

        rows = torch.arange(0, self.rows, -(-self.rows // CHECKED_ROWS), device=operands.x.device)
        rows = torch.cat([rows, rows.new_tensor([self.rows - 1])]).unique()
        form = OUTPUTS[self.output]
        exact = _exact(operands, rows)
        limit = form.tight if tight else form.loose
        if form.block_scales:
            scales = _taken(operands.scales, rows).double().repeat_interleave(BLOCK, dim=1)
            found = _decode(_taken(operands.out, rows)) * scales
            # A block's largest value may be beyond 6 scales by the rounding of the scale.
            top = exact.abs().unflatten(1, (-1, BLOCK)).amax(2).repeat_interleave(BLOCK, dim=1)
            accepted = limit.steps * torch.maximum(scales, top - 6 * scales) * (1 + 2**-20)
        else:
            found = _taken(operands.out, rows).double()
            accepted = limit.relative * exact.abs() + limit.absolute
        bad = ~((found - exact).abs() <= accepted)  # NaN is bad
        if not bad.any():
            return None
        row, column = bad.nonzero()[0].tolist()
        return (
            f"wrong result: {int(bad.sum())} of {bad.numel()} values checked, first in row {int(rows[row])}, "
            f"column {column}: {found[row, column].item():.6g} for {exact[row, column].item():.6g}"
        )


def _exact(operands: Operands, rows: torch.Tensor) -> torch.Tensor:
    import torch

    x = operands.x[rows].double()
    y = x * torch.rsqrt(x.square().mean(1, keepdim=True) + operands.eps) * operands.weight.double()
    return y * torch.sigmoid(y)


def _taken(tensor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Rows of a tensor, as bytes: not every torch indexes every type."""
    import torch

    return tensor.view(torch.uint8)[rows].view(tensor.dtype)


def _decode(pairs: torch.Tensor) -> torch.Tensor:
    """The values of packed E2M1 pairs, low nibble first."""
    import torch

    codes = torch.stack((pairs & 15, pairs >> 4), dim=2).flatten(1)
    return torch.tensor(CODES, dtype=torch.float64, device=pairs.device)[codes.long()]


TARGETS = (
    target.slowest_against_best(("bf16", "fp8_e4m3"), 1.02),
    target.slowest_against_best(
        ("bf16", "fp8_e4m3"), 1.02, graphfuse.RMSNORM_SILU_DEPENDENT.name, " with dependent launch"
    ),
    target.mean_speedup("torch_compile", "torch.compile", ("bf16", "fp8_e4m3"), 1.12),
    target.mean_speedup("cudnn_oss", "the cuDNN frontend's open-source engine", ("bf16", "fp8_e4m3"), 9),
    *(
        target.least_of_stream(output, low * MB, high * MB, limit)
        for output, limits in {"bf16": (0.97, 0.95, 0.90), "fp8_e4m3": (0.95, 0.93, 0.88)}.items()
        for (low, high), limit in zip(((512, math.inf), (128, 512), (32, 128)), limits, strict=True)
    ),
    target.least_of_stream("nvfp4", 128 * MB, math.inf, 0.85),
    target.slowest_against_output("nvfp4", "fp8_e4m3", 1.15),
    target.slowest_against_stream(2 * MB, 1.15),
)

BENCH = Bench(
    name="rmsnorm-silu",
    title="RMSNorm → SiLU, bf16 input",
    cases=tuple(Case(r, c, o) for o, c, r in itertools.product(OUTPUTS, COLUMNS, ROWS)),
    quick=tuple(Case(r, c, o) for o, c, r in itertools.product(OUTPUTS, (64, 1024), (1560, 399360))),
    peers=(
        graphfuse.RMSNORM_SILU,
        graphfuse.RMSNORM_SILU_DEPENDENT,
        cudnn.RMSNORM_SILU_OSS,
        cudnn.RMSNORM_SILU_A,
        flashinfer.RMSNORM_SILU,
        torch_compile.RMSNORM_SILU,
        torch_eager.RMSNORM_SILU,
        stream.PEER,
    ),
    targets=TARGETS,
)
