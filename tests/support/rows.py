"""Row problems as data: what stands around an RMSNorm, how the result is stored, what is an output beside it."""

import itertools
from dataclasses import dataclass, replace

import numpy as np
import torch

from graphfuse import data_type, norm_forward_phase, pygraph, reduction_mode
from support import graphs, oracle
from support.graphs import BF16, E4M3, FLOAT, FP4, HALF

PLAIN = {"bf16": BF16, "fp16": HALF, "fp32": FLOAT}
ENDS = (*PLAIN, "fp8", "fp8 per row", "mxfp8", "mxfp4", "nvfp4")
E8M0 = data_type.FP8_E8M0
BLOCKS = {"mxfp8": (32, E4M3, E8M0), "mxfp4": (32, FP4, E8M0), "nvfp4": (16, FP4, E4M3)}
"""Size, element and scale of a block, by end."""
TORCH = graphs.TORCH | {E8M0: torch.uint8}
EPS, FACTOR = 1e-5, 7.0


@dataclass(frozen=True)
class Case:
    """end(activation(rmsnorm(x + residual) * weight)) on rows x columns.

    weight: "none", "plain", "zero-centred". activation: "none", "silu", "gelu", "gate" (SiLU times a tensor).
    extras: outputs beside the result: "none", "some" (the sum), "all" (also inverse RMS, normalized value, amax).
    """

    residual: bool
    weight: str
    activation: str
    end: str
    extras: str
    rows: int = 5
    columns: int = 96

    def __str__(self) -> str:
        parts = ("residual" if self.residual else "", self.weight, self.activation, self.end, self.extras)
        return f"{' '.join(p for p in parts if p)} {self.rows}x{self.columns}"

    def graph(self, device: str) -> pygraph:
        g = graphs.new(device=device)
        shape = [self.rows, self.columns]

        def output(t, name, dtype):
            return t.set_output().set_name(name).set_data_type(dtype)

        x = g.tensor(shape, data_type=BF16, name="x")
        if self.residual:
            x = g.add(x, g.tensor(shape, data_type=BF16, name="residual"))
            if self.extras != "none":
                output(x, "sum", BF16)
        weight = None
        if self.weight != "none":
            weight = g.tensor([1, self.columns], data_type=BF16, name="weight")
        if self.weight == "zero-centred":
            weight = g.add(weight, 1.0)
        everything = self.extras == "all"
        phase = norm_forward_phase.TRAINING if everything else norm_forward_phase.INFERENCE
        y, inverse = g.rmsnorm(x, scale=weight, epsilon=EPS, norm_forward_phase=phase)
        if everything:
            output(inverse, "inverse_rms", FLOAT)
            output(g.identity(y), "normal", BF16)
        if self.activation in ("silu", "gate"):
            y = g.swish(y)
        if self.activation == "gelu":
            y = g.gelu(y)
        if self.activation == "gate":
            y = g.mul(y, g.tensor(shape, data_type=BF16, name="gate"))
        if self.end in PLAIN:
            output(g.identity(y), "out", PLAIN[self.end])
        elif self.end == "fp8":
            if everything:
                output(g.reduction(y, mode=reduction_mode.AMAX), "amax", FLOAT)
            output(g.mul(y, g.tensor([1, 1], data_type=FLOAT, name="factor")), "out", E4M3)
        elif self.end == "fp8 per row":
            amax = g.reduction(y, mode=reduction_mode.AMAX).set_dim([self.rows, 1])
            scale = output(g.max(g.mul(amax, 1 / 448), 1 / (448 * 512)), "scale", FLOAT)
            output(g.mul(y, g.reciprocal(scale)), "out", E4M3)
        else:
            block, element, scale = BLOCKS[self.end]
            y, scales = g.block_scale_quantize(y, block_size=block)
            output(scales, "scale", scale)
            output(y, "out", element)
        return g

    def inputs(self, device: str = "cpu", seed: int = 0) -> dict[str, torch.Tensor]:
        source = graphs.generator("cpu", seed)

        def values(rows):
            return torch.randn(rows, self.columns, generator=source).bfloat16().to(device)

        pack = {"x": values(self.rows), "residual": values(self.rows), "gate": values(self.rows), "weight": values(1)}
        absent = {"residual": not self.residual, "gate": self.activation != "gate", "weight": self.weight == "none"}
        pack = {name: t for name, t in pack.items() if not absent.get(name)}
        return pack | ({"factor": torch.full((1, 1), FACTOR, device=device)} if self.end == "fp8" else {})

    def outputs(self, device: str = "cpu") -> dict[str, torch.Tensor]:
        """Memory for all that is written, filled with a byte that no result is."""
        whole, row = (self.rows, self.columns), (self.rows, 1)
        everything = self.extras == "all"
        made = {"out": (whole, PLAIN.get(self.end, E4M3))}
        if self.residual and self.extras != "none":
            made["sum"] = (whole, BF16)
        if everything:
            made |= {"inverse_rms": (row, FLOAT), "normal": (whole, BF16)}
        if everything and self.end == "fp8":
            made["amax"] = ((1, 1), FLOAT)
        if self.end == "fp8 per row":
            made["scale"] = (row, FLOAT)
        if self.end in BLOCKS:
            block, element, scale = BLOCKS[self.end]
            made |= {"out": ((self.rows, self.columns * element.bits // 8), element)}
            made |= {"scale": ((self.rows, self.columns // block), scale)}
        pack = {name: torch.empty(shape, dtype=TORCH[dtype], device=device) for name, (shape, dtype) in made.items()}
        for t in pack.values():
            t.view(torch.uint8).fill_(0xA5)
        return pack

    def exact(self, pack: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """In float64, before anything is stored; a stored sum is read as it is stored."""
        x = pack["x"].double()
        if self.residual:
            x = x + pack["residual"].double()
            if self.extras != "none":
                x = x.bfloat16().double()
        weight = pack["weight"].double() if "weight" in pack else torch.ones(1, self.columns, device=x.device)
        y, inverse = oracle.rmsnorm(x, weight + (self.weight == "zero-centred"), EPS)
        made = {"sum": x, "inverse_rms": inverse, "normal": y}
        if self.activation in ("silu", "gate"):
            y = oracle.swish(y)
        if self.activation == "gelu":
            y = oracle.POINTWISE["gelu"](y)
        if self.activation == "gate":
            y = y * pack["gate"].double()
        return made | {"y": y, "amax": y.abs().max().reshape(1, 1)}


def hold(case: Case, pack: dict[str, torch.Tensor], outputs: dict[str, torch.Tensor], y: torch.Tensor) -> None:
    """Outputs against float64; quantized ones bit for bit, given `y`, the value before in float32."""
    exact = case.exact(pack)
    torch.testing.assert_close(y.double(), exact["y"], rtol=2e-5, atol=1e-6)
    for name in outputs.keys() & {"sum", "inverse_rms", "normal", "amax"}:
        spread = {"rtol": 8e-3, "atol": 1e-6} if outputs[name].dtype is torch.bfloat16 else {"rtol": 2e-5, "atol": 1e-6}
        torch.testing.assert_close(outputs[name].double(), exact[name], **spread)
    values, out = y.cpu().numpy(), outputs["out"].cpu()
    if case.end in PLAIN:
        assert torch.equal(out, y.cpu().to(out.dtype))
        return
    if case.end == "fp8":
        want = oracle.fp8(values * np.float32(FACTOR), "e4m3")
    elif case.end == "fp8 per row":
        amax = np.abs(values).max(axis=1, keepdims=True)
        scale = np.maximum(amax * np.float32(1 / 448), np.float32(1 / (448 * 512)))
        np.testing.assert_array_equal(outputs["scale"].cpu().numpy(), scale)
        want = oracle.fp8(values * (np.float32(1) / scale), "e4m3")
    else:
        quantizers = {"mxfp8": lambda y: oracle.mxfp8(y, "e4m3"), "mxfp4": oracle.mxfp4, "nvfp4": oracle.nvfp4}
        want, scales = quantizers[case.end](values)
        np.testing.assert_array_equal(outputs["scale"].cpu().view(torch.uint8).numpy(), scales)
    np.testing.assert_array_equal(out.view(torch.uint8).numpy(), want)


def check(case: Case, modes, device: str = "cpu", memory: str = "cpu") -> None:
    """Run, and run again storing the value before quantization, and hold both."""
    pack = case.inputs(memory)
    outputs = case.outputs(memory)
    graphs.run(case.graph(device), pack | outputs, modes, memory)
    float32 = replace(case, end="fp32")
    before = float32.outputs(memory)
    given = {name: t for name, t in pack.items() if name != "factor"}
    graphs.run(float32.graph(device), given | before, modes, memory)
    hold(case, pack, outputs, before["out"])


CASES = tuple(
    Case(*choice)
    for choice in itertools.product(
        (False, True),
        ("none", "plain", "zero-centred"),
        ("none", "silu", "gelu", "gate"),
        ENDS,
        ("none", "some", "all"),
    )
)
