"""The gradients of normalized and rotated heads, as data, with float64 results."""

from dataclasses import dataclass

import torch

from graphfuse import data_type, pygraph
from support import graphs, oracle
from support.graphs import BF16, FLOAT, TORCH
from support.losses import INT64, INTEGERS

EPS = 1e-5


@dataclass(frozen=True)
class RotaryGradient:
    """Those of `heads` heads of `columns` elements of each token, `rotary` of which are in pairs, and of their weight.

    weight: whether there is one. beyond: whether the first two tokens ask for a number beyond either end of the table.
    stride: elements between tokens of x, None for those without gaps.
    """

    tokens: int = 5
    heads: int = 3
    columns: int = 64
    rotary: int = 64
    interleaved: bool = False
    weight: bool = True
    dtype: data_type = BF16
    table: data_type = FLOAT
    index: data_type = INT64
    positions: int = 11
    beyond: bool = False
    stride: int | None = None

    @property
    def shape(self) -> list[int]:
        return [self.tokens, self.heads, self.columns]

    @property
    def _strides(self) -> list[int]:
        return [self.stride or self.heads * self.columns, self.columns, 1]

    def graph(self, device: str = "cpu") -> pygraph:
        g, whole = graphs.new(device=device), slice(None)
        grad = g.tensor(self.shape, data_type=self.dtype, name="grad")
        x = g.tensor(self.shape, self._strides, self.dtype, name="x")
        inverse = g.tensor([*self.shape[:2], 1], data_type=FLOAT, name="inverse_rms", byte_alignment=4)
        weight = g.tensor([1, 1, self.columns], data_type=self.dtype, name="weight") if self.weight else None
        table = g.tensor([self.positions, 1, self.rotary], data_type=self.table, name="table")
        index = g.tensor([self.tokens, 1, 1], data_type=self.index, name="index")
        halves = slice(self.rotary // 2), slice(self.rotary // 2, None)
        cos, sin = (g.gather_rows(g.slice(table, [whole, whole, part]), index) for part in halves)
        back = g.rotate_pairs(grad, cos, sin, interleaved=self.interleaved, inverse=True)
        dx, dweight, _ = g.rmsnorm_backward(back, x, weight, inverse, has_dbias=False)
        dx.set_output().set_name("dx").set_data_type(self.dtype)
        if dweight is not None:
            dweight.set_output().set_name("dweight").set_data_type(FLOAT)
        return g

    def inputs(self, seed: int = 0) -> dict[str, torch.Tensor]:
        source = graphs.generator("cpu", seed)
        memory = torch.full((max(self.tokens, 1) * self._strides[0],), 99.0).to(TORCH[self.dtype])
        x = memory.as_strided(self.shape, self._strides).copy_(torch.randn(self.shape, generator=source))
        index = torch.randint(self.positions, (self.tokens, 1, 1), generator=source)
        if self.beyond:
            index[0], index[1] = -1, self.positions
        pack = {"x": x, "grad": torch.randn(self.shape, generator=source).to(x.dtype)}
        pack["inverse_rms"] = oracle.rmsnorm(x, None, EPS)[1].float()
        if self.weight:
            pack["weight"] = torch.randn(1, 1, self.columns, generator=source).to(x.dtype)
        pack["table"] = torch.randn(self.positions, 1, self.rotary, generator=source).to(TORCH[self.table])
        return pack | {"index": index.to(INTEGERS[self.index])}

    def outputs(self) -> dict[str, torch.Tensor]:
        """Memory for what the graph writes, filled with a number that no result is."""
        made = {"dx": torch.full(self.shape, 99.0).to(TORCH[self.dtype])}
        return made | ({"dweight": torch.full((1, 1, self.columns), 99.0)} if self.weight else {})

    def exact(self, pack) -> dict[str, torch.Tensor]:
        """By torch.autograd, in float64; of a token without a row of the table NaN."""
        x = pack["x"].double().requires_grad_()
        weight = pack["weight"].double().requires_grad_() if self.weight else torch.ones(1, 1, self.columns)
        y = oracle.rmsnorm(x, weight, EPS)[0]
        numbers = pack["index"].long().flatten()
        inside = (numbers >= 0) & (numbers < self.positions)
        rows = pack["table"].double()[torch.where(inside, numbers, 0)]
        rows[~inside] = torch.nan
        cos, sin = rows.expand(-1, self.heads, -1).chunk(2, -1)
        oracle.rotated(y, cos, sin, self.interleaved).backward(pack["grad"].double())
        return {"dx": x.grad} | ({"dweight": weight.grad} if self.weight else {})

    def hold(self, pack) -> None:
        for name, want in self.exact(pack).items():
            got = pack[name]
            assert torch.equal(got.isnan(), want.isnan()), name
            want, got = want.nan_to_num(), got.double().nan_to_num()
            unit = 0.0 if pack[name].dtype is torch.float32 else 2**-8
            size = max(1.0, want.abs().max().item()) if want.numel() else 1.0
            torch.testing.assert_close(got, want, rtol=unit + 1e-6, atol=1e-5 * size, msg=lambda m, n=name: f"{n}: {m}")
