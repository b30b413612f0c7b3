"""RMSNorm problems over an axis that is not the innermost, as the channels of a contiguous video tensor are."""

from dataclasses import dataclass

import torch

import graphfuse
from graphfuse import data_type, norm_forward_phase
from support import graphs, oracle
from support.graphs import BF16, FLOAT, TORCH

EPS = 1e-5


@dataclass(frozen=True)
class Channels:
    """swish(rmsnorm(x over columns) + bias) on [rows, columns, positions], positions innermost.

    The strides are those of columns, in elements; None where these lie side by side. offset: elements into its memory
    at which each tensor begins. beta: None for no swish. residual: x is the sum of two tensors, which is an output.
    """

    rows: int = 2
    columns: int = 96
    positions: int = 64
    input: data_type = BF16
    weight: data_type = BF16
    output: data_type = BF16
    bias: data_type | None = None
    beta: float | None = 1.0
    training: bool = False
    residual: bool = False
    input_stride: int | None = None
    output_stride: int | None = None
    offset: int = 0
    alignment: int = 16

    @property
    def dim(self) -> list[int]:
        return [self.rows, self.columns, self.positions]

    def strides(self, apart: int | None) -> list[int]:
        apart = apart or self.positions
        return [self.columns * apart, apart, 1]

    def graph(self, device: str = "cpu") -> graphfuse.pygraph:
        """Its tensors are named x, residual, sum, weight, bias, out, inverse_rms."""
        g = graphs.new(device=device)

        def given(name, dim, strides, dtype):
            return g.tensor(dim, strides, dtype, byte_alignment=self.alignment, name=name)

        one = [1, self.columns, 1]
        x = given("x", self.dim, self.strides(self.input_stride), self.input)
        if self.residual:
            x = g.add(x, given("residual", self.dim, self.strides(self.input_stride), self.input))
            self._written(x, "sum", self.input, self.input_stride)
        weight = given("weight", one, None, self.weight)
        bias = self.bias and given("bias", one, None, self.bias)
        phase = norm_forward_phase.TRAINING if self.training else norm_forward_phase.INFERENCE
        y, inverse = g.rmsnorm(x, weight, EPS, bias or None, norm_forward_phase=phase)
        if self.training:
            inverse.set_output().set_name("inverse_rms")
        if self.beta is not None:
            y = g.swish(y, swish_beta=self.beta)
        self._written(y, "out", self.output, self.output_stride)
        return g

    def _written(self, t, name: str, dtype: data_type, apart: int | None) -> None:
        t.set_output().set_name(name).set_data_type(dtype).set_byte_alignment(self.alignment)
        t.set_dim(self.dim).set_stride(self.strides(apart))

    def placed(self, values: torch.Tensor, apart: int | None) -> torch.Tensor:
        """In memory whose gaps hold a byte that no result is."""
        strides = self.strides(apart)
        size = self.offset + 1 + sum((e - 1) * s for e, s in zip(self.dim, strides, strict=True) if e)
        memory = torch.empty(size, dtype=values.dtype, device=values.device)
        memory.view(torch.uint8).fill_(0x5A)
        return memory[self.offset :].as_strided(self.dim, strides).copy_(values)

    def inputs(self, device: str = "cpu", seed: int = 0) -> dict[str, torch.Tensor]:
        source = graphs.generator(device, seed)

        def values(dim, dtype, spread, middle):
            return (torch.randn(dim, generator=source, device=device) * spread + middle).to(TORCH[dtype])

        names = ("x", "residual") if self.residual else ("x",)
        pack = {name: self.placed(values(self.dim, self.input, 1, 0), self.input_stride) for name in names}
        for name, dtype, spread, middle in (("weight", self.weight, 0.25, 1), ("bias", self.bias, 0.5, 0)):
            if dtype:
                memory = values([self.offset + self.columns], dtype, spread, middle)
                pack[name] = memory[self.offset :].view(1, -1, 1)
        return pack

    def outputs(self, device: str = "cpu") -> dict[str, torch.Tensor]:
        """Memory for all that is written, filled with a byte that no result is."""

        def memory(dtype, apart):
            return self.placed(torch.zeros(self.dim, device=device).to(TORCH[dtype]), apart)

        pack = {"out": memory(self.output, self.output_stride)}
        if self.residual:
            pack["sum"] = memory(self.input, self.input_stride)
        if self.training:
            pack["inverse_rms"] = torch.full((self.rows, 1, self.positions), float("nan"), device=device)
        for name in pack.keys() - {"inverse_rms"}:
            pack[name].view(torch.uint8).fill_(0xA5)
        return pack

    def exact(self, pack: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """In float64, before anything is stored but the sum, which is read as it is stored."""
        x = pack["x"].double()
        if self.residual:
            x = (x + pack["residual"].double()).to(pack["x"].dtype).double()
        y, inverse = oracle.rmsnorm(x, pack["weight"], EPS, pack.get("bias"), axes=(1,))
        return {"sum": x, "inverse_rms": inverse, "out": y if self.beta is None else oracle.swish(y, self.beta)}

    def hold(self, pack: dict[str, torch.Tensor], outputs: dict[str, torch.Tensor]) -> None:
        """Results against float64: one representable value of slack, for FLOAT 1e-5. Between columns nothing is
        written."""
        exact = self.exact(pack)
        for name, got in outputs.items():
            difference = (got.double() - exact[name]).abs()
            close = difference <= 1e-5 * (exact[name].abs() + 1)
            if got.dtype is not torch.float32:
                close |= oracle.ulps(got, oracle.rounded(exact[name], got.dtype)) <= 1
            assert close.all(), f"{name}: {int((~close).sum())} elements are off, by up to {difference.max()}"
        for name, apart in (("out", self.output_stride), ("sum", self.input_stride)):
            if name in outputs and (self.offset or apart):
                memory = torch.empty(0, dtype=torch.uint8, device=outputs[name].device)
                memory.set_(outputs[name].untyped_storage())
                kept = outputs[name].clone()
                outputs[name].view(torch.uint8).fill_(0x5A)
                assert (memory == 0x5A).all(), f"memory beside the columns of {name} was written"
                outputs[name].copy_(kept)


FLOATS = (BF16, graphs.HALF, FLOAT)
