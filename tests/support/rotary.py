"""Queries and keys, normalized and rotated, as data, with float64 results."""

from dataclasses import dataclass

import torch

from graphfuse import data_type, norm_forward_phase, pygraph
from support import graphs, oracle
from support.graphs import BF16, FLOAT, TORCH
from support.losses import INT64, INTEGERS

EPS = 1e-5


@dataclass(frozen=True)
class Rotary:
    """Heads of `columns` elements, `rotary` of which are in pairs.

    norm: whether they are normalized and have weights. keys: of how many heads; 0 for queries alone. positions: of the
    table, of which the first two tokens ask for a number beyond either end, if `beyond`. stride: elements between
    tokens, None for those without gaps. slots: of a cache that keys are written to by number instead, 0 for none; the
    numbers of the first two tokens are of none.
    """

    tokens: int = 5
    queries: int = 3
    keys: int = 2
    columns: int = 64
    rotary: int = 64
    interleaved: bool = False
    inverse: bool = False
    norm: bool = True
    dtype: data_type = BF16
    out: data_type = BF16
    table: data_type = FLOAT
    index: data_type = INT64
    slots: int = 0
    positions: int = 11
    beyond: bool = False
    stride: int | None = None

    @property
    def heads(self) -> dict[str, int]:
        return {"q": self.queries} | ({"k": self.keys} if self.keys else {})

    def _strides(self, heads: int) -> list[int]:
        return [self.stride or heads * self.columns, self.columns, 1]

    def graph(self, device: str = "cpu") -> pygraph:
        g = graphs.new(device=device)
        parts, weights = [], []
        for name, heads in self.heads.items():
            shape = [self.tokens, heads, self.columns]
            parts.append(g.tensor(shape, self._strides(heads), self.dtype, name=name))
            if self.norm:
                weights.append(g.tensor([1, *shape[1:]], [0, 0, 1], self.dtype, name=f"{name}_weight"))
        x, *more = parts
        if more:
            x = g.join(x, more[0], -2)
        if self.norm:
            x = g.rmsnorm(x, None, EPS, norm_forward_phase=norm_forward_phase.INFERENCE)[0]
            x = g.mul(x, g.join(*weights, 1) if more else weights[0])
        table = g.tensor([self.positions, 1, self.rotary], data_type=self.table, name="table")
        index = g.tensor([self.tokens, 1, 1], data_type=self.index, name="index")
        half, all_ = self.rotary // 2, slice(None)
        cos, sin = (
            g.gather_rows(g.slice(table, [all_, all_, part]), index) for part in (slice(half), slice(half, None))
        )
        y = g.rotate_pairs(x, cos, sin, interleaved=self.interleaved, inverse=self.inverse)
        first = 0
        for name, heads in self.heads.items():
            out = g.slice(y, [all_, slice(first, first + heads), all_]) if more else y
            first += heads
            if name == "k" and self.slots:
                out = g.scatter_rows(out, g.tensor([self.tokens, 1, 1], data_type=INT64, name="slot"))
                out.set_dim([self.slots, heads, self.columns]).set_stride([2 * heads * self.columns, self.columns, 1])
                out.set_output().set_name("k_out").set_data_type(self.out)
                continue
            out.set_dim([self.tokens, heads, self.columns]).set_stride(self._strides(heads))
            out.set_output().set_name(f"{name}_out").set_data_type(self.out)
        return g

    def inputs(self, seed: int = 0) -> dict[str, torch.Tensor]:
        source = graphs.generator("cpu", seed)
        pack = {}
        for name, heads in self.heads.items():
            pack[name] = self._empty(heads, self.dtype).copy_(
                torch.randn(self.tokens, heads, self.columns, generator=source)
            )
            if self.norm:
                weight = torch.randn(self.columns, generator=source).to(TORCH[self.dtype])
                pack[f"{name}_weight"] = weight.expand(1, heads, self.columns)
        table = torch.randn(self.positions, 1, self.rotary, generator=source)
        index = torch.randint(self.positions, (self.tokens, 1, 1), generator=source)
        if self.beyond:
            index[0], index[1] = -1, self.positions
        if self.slots:
            slot = torch.randperm(self.slots, generator=source)[: self.tokens].view(-1, 1, 1)
            slot[0], slot[1] = -1, self.slots
            pack["slot"] = slot
        return pack | {"table": table.to(TORCH[self.table]), "index": index.to(INTEGERS[self.index])}

    def outputs(self) -> dict[str, torch.Tensor]:
        """Memory for what the graph writes, filled with a number that no result is."""
        made = {f"{name}_out": self._empty(heads, self.out) for name, heads in self.heads.items()}
        if self.slots:  # every second row of a larger tensor
            rows = torch.full((self.slots, 2, self.keys, self.columns), 99.0)
            made["k_out"] = rows.to(TORCH[self.out])[:, 0]
        return made

    def _empty(self, heads: int, dtype: data_type) -> torch.Tensor:
        shape, stride = (self.tokens, heads, self.columns), self._strides(heads)
        memory = torch.full((max(self.tokens, 1) * stride[0],), 99.0).to(TORCH[dtype])
        return memory.as_strided(shape, stride)

    def exact(self, pack) -> dict[str, torch.Tensor]:
        """By output, token by token."""
        made = {}
        for name, heads in self.heads.items():
            x = pack[name].double()
            if self.norm:
                x = oracle.rmsnorm(x, pack[f"{name}_weight"], EPS, axes=(-1,))[0]
            rows = [x.new_empty(0, heads, self.columns)]
            for token, position in enumerate(pack["index"].flatten().tolist()):
                row = (
                    pack["table"][position, 0]
                    if 0 <= position < self.positions
                    else torch.full((self.rotary,), torch.nan)
                )
                cos, sin = row.double().expand(heads, -1).chunk(2, -1)
                rows.append(oracle.rotated(x[token], cos, -sin if self.inverse else sin, self.interleaved)[None])
            made[f"{name}_out"] = torch.cat(rows)
        if self.slots:
            cache = torch.full((self.slots, self.keys, self.columns), 99.0).double()
            for token, slot in enumerate(pack["slot"].flatten().tolist()):
                if 0 <= slot < self.slots:
                    cache[slot] = made["k_out"][token]
            made["k_out"] = cache
        return made

    def hold(self, pack) -> None:
        for name, want in self.exact(pack).items():
            got = pack[name]
            assert torch.equal(got.isnan(), want.isnan()), name
            want, got = want.nan_to_num(), got.double().nan_to_num()
            if self.out is FLOAT:
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
            else:
                near = oracle.rounded(want, TORCH[self.out]).double()
                apart = (got - near).abs() > 1e-5 + want.abs() * 2**-7
                assert not apart.any() and int((got != near).sum()) <= got.numel() * 0.05, name
