"""How a bench's outputs are judged: against float64, on some thousands of rows, the last one among them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

CHECKED_ROWS = 4096


@dataclass(frozen=True)
class Tolerance:
    """Accepted errors, absolute and relative to the exact value."""

    relative: float = 0
    absolute: float = 0

    def around(self, exact: torch.Tensor) -> torch.Tensor:
        return self.relative * exact.abs() + self.absolute


@dataclass(frozen=True)
class Accuracy:
    """tight: one rounding of the exact value. loose: for peers that round in between. Called, it is what is accepted
    around exact values."""

    tight: Tolerance
    loose: Tolerance

    def __call__(self, tight: bool, exact: torch.Tensor) -> torch.Tensor:
        return self.of(tight).around(exact)

    def of(self, tight: bool) -> Tolerance:
        return self.tight if tight else self.loose


@dataclass(frozen=True)
class Around:
    """What is accepted of values that are made of larger ones, which may cancel. size: magnitudes of these."""

    accuracy: Accuracy
    size: torch.Tensor

    def __call__(self, tight: bool, exact: torch.Tensor) -> torch.Tensor:
        return self.accuracy(tight, self.size)


def checked_rows(rows: int, device: torch.device) -> torch.Tensor:
    """The numbers of the rows that are judged."""
    import torch

    some = torch.arange(0, rows, -(-rows // CHECKED_ROWS), device=device)
    return torch.cat([some, some.new_tensor([rows - 1])]).unique()


def taken(tensor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Rows of a tensor, as bytes: not every torch indexes every type."""
    import torch

    return tensor.view(torch.uint8)[rows].view(tensor.dtype)


def wrong(
    found: torch.Tensor, exact: torch.Tensor, accepted: torch.Tensor, rows: torch.Tensor, what: str = "result"
) -> str | None:
    """Where the values found are farther from the exact ones than accepted; all of them float64, one row for each
    of `rows`."""
    bad = ~((found - exact).abs() <= accepted)  # NaN is bad
    if not bad.any():
        return None
    row, column = bad.nonzero()[0].tolist()
    return (
        f"wrong {what}: {int(bad.sum())} of {bad.numel()} values checked, first in row {int(rows[row])}, "
        f"column {column}: {found[row, column].item():.6g} for {exact[row, column].item():.6g}"
    )
