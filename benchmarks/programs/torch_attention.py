"""Attention beside torch's plain calls: masks, a bias, statistics, gradients, and sequences one behind another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from graphfuse.benchmarks.programs import torch_problem
from graphfuse.benchmarks.programs.torch_problem import ROUNDED_INSIDE, Problem, drawn, named

if TYPE_CHECKING:
    import torch

GRADIENTS = {"dQ": "q", "dK": "k", "dV": "v", "dBias": "bias"}
"""Each with what it is of."""


def attention(shape: tuple[int, ...], causal: bool, dtype: str = "bfloat16", **asked) -> Problem:
    """asked: fields of `Attention`."""
    made = Attention(shape, causal, **asked)
    read = made.read(dtype)
    return Problem(f"sdpa {made.name(dtype)}", made.draw, made.plain, read, made.out(read), ROUNDED_INSIDE)


@dataclass(frozen=True)
class Attention:
    """Options of a problem.

    shape: (batch, heads, rows, columns).
    causal: whether rows attend to no later ones.
    heads: of k and v, if not as many as of q.
    window: how many rows of k each row attends to; 0 for all.
    makes: what is looked at: O, Stats, or a gradient, which forward and backward make together.
    beside: bias, padding of k and v, ragged for sequences one behind another, or nothing.
    """

    shape: tuple[int, ...]
    causal: bool
    heads: int = 0
    window: int = 0
    makes: str = "O"
    beside: str = ""

    @property
    def ragged(self) -> bool:
        return self.beside == "ragged"

    @property
    def lengths(self) -> list[int]:
        batch, _, rows, _ = self.shape
        return [rows - b * rows // batch for b in range(batch)]

    @property
    def starts(self) -> list[int]:
        return [sum(self.lengths[:b]) for b in range(len(self.lengths) + 1)]

    def name(self, dtype: str) -> str:
        parts = (
            "x".join(map(str, self.shape)),
            dtype,
            "causal" if self.causal else "",
            f"{self.heads} heads of k" if self.heads else "",
            f"window {self.window}" if self.window else "",
            "statistics" if self.makes == "Stats" else "",
            self.beside,
            f"with gradients, {self.makes}" if self.makes in GRADIENTS else "",
        )
        return " ".join(filter(None, parts))

    # What is read and written.

    def read(self, dtype: str) -> dict[str, torch.Tensor]:
        batch, count, rows, columns = self.shape
        found = {}
        for seed, name in enumerate(("q", "k", "v", *(["dO"] if self.makes in GRADIENTS else []))):
            of = (self.heads or count) if name in "kv" else count
            dim = (sum(self.lengths), of, columns) if self.ragged else (batch, of, rows, columns)
            found[name] = drawn(*dim, dtype=dtype, seed=seed)
        if self.beside == "bias":
            found["bias"] = drawn(1, count, rows, rows, dtype=dtype, seed=4)
        if self.beside in ("padding", "ragged"):
            found["seq_len_q"] = _numbers(self.lengths if self.ragged else [rows] * batch)
            found["seq_len_kv"] = _numbers(self.lengths)
        if self.ragged:
            found["starts"] = _numbers(self.starts)
        return found

    def out(self, read: dict[str, torch.Tensor]) -> torch.Tensor:
        import torch

        if self.makes == "Stats":
            return torch.empty(*self.shape[:3], 1, device=torch_problem.DEVICE)
        return torch.empty_like(read[GRADIENTS.get(self.makes, "q")])

    # The graph.

    def draw(self, g, q, k, v, dO=None, starts=None, **options):
        import torch

        made = {}

        def keep(name, t, columns=self.shape[3]):
            """Makes a tensor an output."""
            made[name] = t.set_output().set_data_type(named(torch.float32) if name == "Stats" else q.get_data_type())
            self.place(t, starts, columns)

        for t in (q, k, v, *([dO] if dO else [])):
            self.place(t, starts)
        options |= {"attn_scale": self.shape[3] ** -0.5, "use_padding_mask": "seq_len_q" in options}
        options |= {"use_causal_mask": self.causal, "sliding_window_length": self.window or None}
        o, stats = g.sdpa(q, k, v, generate_stats=self.makes != "O", **options)
        keep("O", o)
        if stats is not None:
            keep("Stats", stats, 1)
        if dO is not None:
            of_bias = {"dBias": g.tensor_like(options["bias"])} if self.makes == "dBias" else {}
            found = g.sdpa_backward(q, k, v, o, dO, stats, **options, **of_bias)
            for name, t in (*zip(GRADIENTS, found, strict=False), *of_bias.items()):
                keep(name, t)
        return made[self.makes]

    def place(self, t, starts, columns: int = 0) -> None:
        """Sets a tensor of the graph to rows of all sequences, where they lie one behind another."""
        if starts is not None:
            batch, count, rows, wide = self.shape
            wide = columns or wide
            t.set_dim([batch, count, rows, wide]).set_stride([rows * count * wide, wide, count * wide, 1])
            t.set_ragged_offset(starts).set_ragged_offset_multiplier(count * wide)

    # The same by torch.

    def plain(self, q, k, v, dO=None, bias=None, **_):
        import torch

        if self.makes == "Stats":
            return self._log_sums(q, k)
        if dO is None:
            return self._attended(q, k, v, bias)
        leaves = {"q": q, "k": k, "v": v} | ({"bias": bias} if self.makes == "dBias" else {})
        leaves = {name: t.detach().requires_grad_() for name, t in leaves.items()}
        o = self._attended(**({"bias": bias} | leaves))
        found = torch.autograd.grad(o, [*leaves.values()], dO)
        return dict(zip(leaves, found, strict=True))[GRADIENTS[self.makes]]

    def _attended(self, q, k, v, bias):
        import torch

        mask = self.mask if bias is None else bias
        options = {"attn_mask": mask, "is_causal": self.causal and mask is None}
        options["enable_gqa"] = q.shape[1] != k.shape[1]
        if not self.ragged:
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)
        if q.dtype is not torch.float64:
            from torch.nn.attention.varlen import varlen_attn

            ahead, rows = 0 if self.causal else -1, self.shape[2]
            return varlen_attn(q, k, v, self.places, self.places, rows, rows, window_size=(-1, ahead))
        # No kernel of torch's has them in float64: one after the other.
        each = zip(*(t.transpose(0, 1).split(self.lengths, dim=1) for t in (q, k, v)), strict=True)
        found = [torch.nn.functional.scaled_dot_product_attention(*one, **options) for one in each]
        return torch.cat(found, dim=1).transpose(0, 1)

    def _log_sums(self, q, k):
        import torch

        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        scores = q @ k.transpose(-1, -2) * self.shape[3] ** -0.5
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -float("inf")) if self.causal else scores
        return scores.logsumexp(-1, keepdim=True)

    @cached_property
    def places(self) -> torch.Tensor:
        return _numbers(self.starts).flatten()

    @cached_property
    def mask(self) -> torch.Tensor | None:
        """Scores that are seen, where it takes more to say than causal; made once, as models do."""
        import torch

        if not self.window and self.beside != "padding":
            return None
        rows = self.shape[2]
        seen = torch.ones(rows, rows, dtype=torch.bool, device=torch_problem.DEVICE)
        seen = seen.triu(1 - self.window) if self.window else seen
        seen = seen.tril() if self.causal else seen
        if self.beside != "padding":
            return seen
        within = torch.arange(rows, device=seen.device) < _numbers(self.lengths)
        return seen & within if self.window or self.causal else within


def _numbers(values: list[int]) -> torch.Tensor:
    """Lengths or offsets, [n, 1, 1, 1]."""
    import torch

    return torch.tensor(values, dtype=torch.int32, device=torch_problem.DEVICE).reshape(-1, 1, 1, 1)


def checks() -> Iterator[Problem]:
    """Small problems of all kinds."""
    small, ways = (2, 8, 200, 64), (True, False)
    for causal in ways:
        for heads in (0, 2):
            for dtype in ("bfloat16", "float16"):
                for makes in ("Stats", "O"):
                    yield attention(small, causal, dtype, heads=heads, makes=makes)
    yield attention(small, True, window=17)
    yield attention((2, 8, 200, 128), False, window=33)
    for beside, causal in (("bias", False), ("padding", False), ("padding", True), ("ragged", False), ("ragged", True)):
        yield attention(small, causal, beside=beside)
    for beside, causal in (("", True), ("bias", False), ("padding", True), ("ragged", True)):
        for makes in GRADIENTS:
            if makes != "dBias" or beside == "bias":
                yield attention(small, causal, makes=makes, beside=beside)


def measured() -> Iterator[Problem]:
    """Problems that are timed."""
    yield attention((2, 16, 4096, 128), True)
    yield attention((2, 16, 4096, 128), False)
    yield attention((2, 32, 4096, 128), True, heads=8)
    yield attention((2, 16, 4096, 128), False, beside="bias")
    yield attention((8, 16, 2048, 128), False, beside="padding")
    yield attention((8, 16, 2048, 128), True, beside="ragged")
    yield attention((2, 16, 4096, 128), True, makes="dQ")
    yield attention((2, 16, 2048, 128), False, makes="dBias", beside="bias")
    yield attention((8, 16, 2048, 128), False, makes="dQ", beside="padding")
    yield attention((8, 16, 2048, 128), True, makes="dQ", beside="ragged")
