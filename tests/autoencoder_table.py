"""The table of autoencoders in docs/models.md: what ``fuse`` reports of each, small. Run it to write the table anew."""

import sys
from collections import Counter
from pathlib import Path

import torch

from graphfuse.torch import fuse
from graphfuse.torch.analysis.report import Entry, FuseReport
from support import autoencoders

PATH = Path(__file__).resolve().parents[1] / "docs" / "models.md"
COMMAND = "python tests/autoencoder_table.py"
BEGIN, END = "<!-- autoencoders -->\n", "<!-- /autoencoders -->\n"
HEAD = "| class | norms | of these with SiLU | left |\n|---|---|--:|---|\n"

_OMITTED = ("the returned sum", "residual sums", "its layout")
"""How reasons begin that are not about norms: of sums before them, and of layouts that only 16 bits have."""
_NO_NORMS = ("frames", "edges", "contiguous")
"""How it begins what modules became that are no norms."""
_LEFT = "convolutions with their padding, upsampling"


def row(of: str, vae: torch.nn.Module, report: FuseReport) -> str:
    """Line of the table for a model that was fused."""
    whole = any(e.became.startswith("frames") and e.name == "decoder" for e in report.replaced)
    leaves = Counter(e.kind for e in report.replaced if _is_leaf(vae, e) and not e.became.startswith(_NO_NORMS))
    norms = [f"{count} `{kind}`, {_kernels(kind)}" for kind, count in leaves.items()]
    within = Counter(e.kind for e in report.replaced if e.became.startswith("frames (norm"))
    norms += [f"those of {count} `{kind}`, as WAN's" for kind, count in within.items()]
    left = [] if whole else [_LEFT]
    left += dict.fromkeys(f"{e.kind}: {e.why}" for e in report.left if not e.why.startswith(_OMITTED))
    pairs = "all" if whole else str(sum(_pairs(vae, e) for e in report.replaced))
    cells = f"`{of}`", "; ".join(norms) or "none", pairs, "; ".join(left) or "-"
    return f"| {' | '.join(cells)} |\n"


def _is_leaf(vae: torch.nn.Module, entry: Entry) -> bool:
    return next(vae.get_submodule(entry.name).children(), None) is None


def _kernels(kind: str) -> str:
    return "three kernels each" if kind == "GroupNorm" else "one kernel each"


def _pairs(vae: torch.nn.Module, entry: Entry) -> int:
    """Norms that an entry has in one call with the SiLU behind them."""
    if _is_leaf(vae, entry) or entry.became.startswith("frames"):
        return 0
    names = [name for name, m in vae.get_submodule(entry.name).named_children() if type(m) is torch.nn.SiLU]
    if entry.became in ("group_norm", "spatial_norm"):
        return sum(" and " in pair for pair in entry.why.split("; "))
    return int("swish" in entry.why or any(f"and {name}" in entry.why for name in names))


def table() -> str:
    rows = []
    for of in autoencoders.SMALL:
        vae = autoencoders.made(of)
        rows.append(row(of, vae, fuse(vae)))
    return HEAD + "".join(rows)


def written(text: str) -> str:
    """Text of the page with the table anew."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    sys.stdout.write(f"{PATH.name}\n")
    PATH.write_text(written(PATH.read_text()))
