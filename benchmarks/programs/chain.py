"""A stretch of a model: matrix product, residual add + RMSNorm, matrix product, again and again.

In it a norm finds its input in the L2, as the product before it left it, and its output is read at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphfuse.benchmarks import judge, session

if TYPE_CHECKING:
    import torch

    from graphfuse.benchmarks.peer import Norm

EPS = 1e-6
LAYERS = 12
LEAST_US = 4000.0
"""Of a sample: short chains are replayed so often."""
TOLERANCE = 2**-5
"""Error of a chain's results, relative to their RMS: some 60 roundings to bfloat16, one after another, make 2^-7."""


@dataclass(frozen=True)
class Layer:
    """before, after: (columns, columns). weight: (columns), of the norm. All bfloat16."""

    before: torch.Tensor
    weight: torch.Tensor
    after: torch.Tensor


@dataclass
class Chain:
    """The buffers of one chain, all (rows, columns) bfloat16. x, start: what goes in, and the residual at the start.

    hidden: what the norm is given. residual: of norms that add in place. out: what a layer makes. sum: the residual
    at the end, wherever the norm keeps it.
    """

    x: torch.Tensor
    start: torch.Tensor
    layers: Sequence[Layer]
    hidden: torch.Tensor
    residual: torch.Tensor
    out: torch.Tensor
    sum: torch.Tensor
    eps: float = EPS

    def reset(self) -> None:
        """Before each run, as a norm may add to the residual in place."""
        self.residual.copy_(self.start)

    def run(self, norm: Norm | None) -> None:
        """The chain with this norm; None for the matrix products alone."""
        import torch

        rows, residual = self.x, self.residual
        for layer in self.layers:
            torch.mm(rows, layer.before, out=self.hidden)
            normalized = self.hidden
            if norm is not None:
                normalized, residual = norm(self.hidden, residual, layer.weight, self.eps)
            torch.mm(normalized, layer.after, out=self.out)
            rows = self.out
        self.sum = residual


@dataclass(frozen=True)
class ChainCase:
    """rows x columns of bfloat16 through LAYERS layers."""

    rows: int
    columns: int
    output: str = "bf16"

    def __str__(self) -> str:
        return f"{self.output} {self.rows}x{self.columns}"

    @property
    def moved(self) -> int:
        """Bytes of one norm: x and residual read, sum and normalized rows written, the weight."""
        return 2 * self.columns * (4 * self.rows + 1)

    def sets(self, count: int, device: str) -> list[Chain]:
        """Chains of random numbers; matrices that keep the size of what they are multiplied with."""
        import torch

        def random(rows: int) -> torch.Tensor:
            return torch.randn(rows, self.columns, dtype=torch.bfloat16, device=device)

        def layer() -> Layer:
            weight = (torch.rand(self.columns, device=device) + 0.5).to(torch.bfloat16)
            before, after = (random(self.columns).div_(math.sqrt(self.columns)) for _ in range(2))
            return Layer(before, weight, after)

        def chain() -> Chain:
            x, start = random(self.rows), random(self.rows)
            residual = start.clone()
            hidden, out = torch.empty_like(x), torch.empty_like(x)
            return Chain(x, start, [layer() for _ in range(LAYERS)], hidden, residual, out, residual)

        return [chain() for _ in range(count)]

    def spoil(self, operands: Chain) -> None:
        """NaN, which no result is."""
        operands.reset()
        operands.hidden.fill_(math.nan)
        operands.out.fill_(math.nan)
        operands.sum = operands.hidden

    def wrong(self, operands: Chain, tight: bool) -> str | None:
        """Why the results of a chain are wrong, on some rows; all peers are held to one tolerance."""
        import torch

        rows = judge.checked_rows(self.rows, operands.x.device)[-64:]
        x, total = operands.x[rows].float(), operands.start[rows].float()
        for layer in operands.layers:
            total = total + x @ layer.before.float()
            normalized = total / torch.sqrt(torch.mean(total * total, dim=1, keepdim=True) + operands.eps)
            x = (normalized * layer.weight.float()) @ layer.after.float()
        for what, found, exact in (("sum", operands.sum, total), ("result", operands.out, x)):
            error = float((found[rows].float() - exact).norm() / exact.norm())
            if not error <= TOLERANCE:  # NaN is wrong
                return f"wrong {what}: its error is {error:.3g} of its size, accepted are {TOLERANCE:g}"
        return None


def sampler(chain: Chain, clock: session.Clock, calls: Sequence[Callable[[], object]]) -> Callable[[], float]:
    """What takes a sample, in microseconds of one chain, of the calls that run it."""
    captured = clock.capture(calls, least_us=LEAST_US, least_calls=1)

    def sample() -> float:
        chain.reset()  # not timed; while it runs, the replays are queued
        return captured.sample()

    return sample
