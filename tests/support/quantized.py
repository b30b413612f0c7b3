"""Row problems that end in FP8, or INT8, with scales of their own: of a norm, of SiLU times a tensor, or of what is
read."""

from dataclasses import dataclass, replace

import numpy as np
import torch

import graphfuse
from graphfuse import data_type, heur_mode, norm_forward_phase, reduction_mode
from support import graphs, oracle
from support.graphs import BF16, E4M3, E5M2, FLOAT

E8M0 = data_type.FP8_E8M0
INT8 = data_type.INT8
NAMES = {E4M3: "e4m3", E5M2: "e5m2"}
EPS, SMALLEST = 1e-5, 1 / (448 * 512)


@dataclass(frozen=True)
class Quantized:
    """of(x) as FP8 on [rows, columns], or as INT8 with a scale for a row.

    of: "norm" (RMSNorm of x + up, times weight), "silu" (SiLU of x times up, the two halves of rows twice as long) or
    "x". size: elements that share a scale, None for a row. scale: its type. by_columns: whether scales of a block are
    neighbours, columns being `apart` rows apart, as tensor map descriptors want them. beside: the type as which what is
    quantized is written too, unless that is what is read.
    """

    rows: int = 3
    columns: int = 256
    of: str = "x"
    size: int | None = 128
    input: data_type = BF16
    element: data_type = E4M3
    scale: data_type = FLOAT
    by_columns: bool = False
    beside: data_type | None = None

    @property
    def largest(self) -> float:
        """What elements are scaled to, of a row."""
        return 127.0 if self.element is INT8 else 448.0

    @property
    def apart(self) -> int:
        """A multiple of 16 bytes."""
        return -(-self.rows // 4) * 4

    def graph(self, device: str = "cpu") -> graphfuse.pygraph:
        """Its tensors named x, up, weight, out, scale and beside."""
        g = graphs.new(device=device)
        y = self.drawn(g)
        if self.beside:
            g.identity(y).set_output().set_name("beside").set_data_type(self.beside)
        if self.size is None:
            amax = g.reduction(y, mode=reduction_mode.AMAX).set_dim([self.rows, 1])
            scale = g.max(g.mul(amax, 1 / self.largest), SMALLEST)
            codes = g.mul(y, g.reciprocal(scale))
        else:
            codes, scale = g.block_scale_quantize(y, block_size=self.size, axis=1)
            if self.by_columns:
                scale.set_dim([self.rows, self.columns // self.size]).set_stride([1, self.apart])
        codes.set_output().set_name("out").set_data_type(self.element)
        scale.set_output().set_name("scale").set_data_type(self.scale)
        return g

    def drawn(self, g: graphfuse.pygraph) -> graphfuse.Tensor:
        """What is quantized."""
        row = 2 * self.columns if self.of == "silu" else self.columns
        x = g.tensor([self.rows, self.columns], [row, 1], self.input, name="x")
        if self.of == "x":
            return x
        up = g.tensor([self.rows, self.columns], [row, 1], self.input, name="up")
        if self.of == "silu":
            return g.mul(g.swish(x), up)
        weight = g.tensor([1, self.columns], data_type=FLOAT, name="weight")
        return g.rmsnorm(g.add(x, up), weight, EPS, norm_forward_phase=norm_forward_phase.INFERENCE)[0]

    def inputs(self, device: str = "cpu", seed: int = 0) -> dict[str, torch.Tensor]:
        """With a row of zeros, where there are several, and one with a block of zeros; magnitudes grow by columns."""
        source = graphs.generator("cpu", seed + self.columns)
        rows = torch.randn(self.rows, 2 * self.columns, generator=source)
        rows *= torch.logspace(-3, 3, self.columns).repeat(2)
        rows[1:2] = 0
        rows[-1, : self.columns // 2] = 0
        x, up = rows.to(device, graphs.TORCH[self.input]).chunk(2, 1)
        pack = {"x": x, "up": up} if self.of == "silu" else {"x": x.contiguous(), "up": up.contiguous()}
        if self.of == "norm":
            pack["weight"] = torch.rand(1, self.columns, generator=source).to(device) + 0.5
        return pack if self.of != "x" else {"x": pack["x"]}

    def outputs(self, device: str = "cpu") -> dict[str, torch.Tensor]:
        """Memory for all that is written, filled with a byte that no result is."""
        blocks = 1 if self.size is None else self.columns // self.size
        scale = torch.uint8 if self.scale is E8M0 else torch.float32
        shape = (blocks, self.apart) if self.by_columns else (self.rows, blocks)
        pack = {
            "out": torch.empty(self.rows, self.columns, dtype=graphs.TORCH[self.element], device=device),
            "scale": torch.empty(shape, dtype=scale, device=device),
        }
        if self.beside:
            pack["beside"] = torch.empty(self.rows, self.columns, dtype=graphs.TORCH[self.beside], device=device)
        for t in pack.values():
            t.view(torch.uint8).fill_(0xA5)
        if self.by_columns:
            pack["scale"] = pack["scale"][:, : self.rows].t()
        return pack

    def exact(self, pack: dict[str, torch.Tensor]) -> torch.Tensor:
        """What is quantized, in float64."""
        x = pack["x"].double()
        if self.of == "silu":
            return oracle.swish(x) * pack["up"].double()
        return x if self.of == "x" else oracle.rmsnorm(x + pack["up"].double(), pack["weight"], EPS)[0]

    def values(self, pack: dict[str, torch.Tensor], modes, device: str) -> np.ndarray:
        """What is quantized, in float32, by the same engines: what they write beside it."""
        if self.of == "x":
            return pack["x"].float().cpu().numpy()
        case = replace(self, beside=FLOAT)
        outputs = case.outputs(str(pack["x"].device))
        graphs.run(case.graph(device), pack | outputs, modes)
        torch.testing.assert_close(outputs["beside"].double(), self.exact(pack), rtol=3e-5, atol=1e-5)
        return outputs["beside"].cpu().numpy()

    def quantized(self, values: np.ndarray) -> dict[str, np.ndarray]:
        """The bytes of elements, and scales, of these values."""
        if self.element is INT8:
            codes, scale = oracle.int8_by_rows(values, SMALLEST)
        elif self.size is None:
            codes, scale = oracle.fp8_by_rows(values, NAMES[self.element], SMALLEST)
        elif self.scale is E8M0:
            codes, scale = oracle.mxfp8(values, NAMES[self.element], self.size)
        else:
            codes, scale = oracle.fp8_by_groups(values, NAMES[self.element], self.size)
        return {"out": codes, "scale": scale}

    def hold(self, pack: dict[str, torch.Tensor], outputs: dict[str, torch.Tensor]) -> None:
        """Results against float64: what a reader gets is half a step from the value, and scales are what the
        largest magnitude of their elements says. What lies between columns of scales is left alone."""
        exact = self.exact(pack).cpu()
        size = self.size or self.columns
        scale = outputs["scale"].cpu()
        scale = torch.exp2(scale.double() - 127) if self.scale is E8M0 else scale.double()
        amax = exact.unflatten(1, (-1, size)).abs().amax(-1)
        largest = self.largest if self.element is not E5M2 or self.size is None else 57344
        if self.scale is E8M0:
            assert (
                (scale >= amax / largest * (1 - 1e-5)) & (scale <= 2 * amax / largest * (1 + 1e-5)) | (amax == 0)
            ).all()
        else:
            least = SMALLEST if self.size is None else 2.0**-126
            torch.testing.assert_close(scale, (amax / largest).clamp(min=least), rtol=3e-5, atol=0)
        stored = outputs["out"].cpu().double().unflatten(1, (-1, size)) * scale.unsqueeze(-1)
        places, finest = {E4M3: (2.0**-4, 2.0**-10), E5M2: (2.0**-3, 2.0**-17), INT8: (0.0, 0.5)}[self.element]
        error = (stored - exact.unflatten(1, (-1, size))).abs()
        within = torch.maximum(exact.unflatten(1, (-1, size)).abs() * places, finest * scale.unsqueeze(-1))
        assert (error <= within * (1 + 1e-4) + 1e-5 * amax.unsqueeze(-1)).all(), float((error - within).max())
        if self.beside:
            spread = {"rtol": 8e-3, "atol": 1e-5} if self.beside is not FLOAT else {"rtol": 3e-5, "atol": 1e-5}
            torch.testing.assert_close(outputs["beside"].cpu().double(), exact, **spread)
        if self.by_columns:
            memory = outputs["scale"].cpu().as_strided((scale.shape[1], self.apart), (self.apart, 1))
            assert (memory[:, self.rows :].contiguous().view(torch.uint8) == 0xA5).all(), "between columns of scales"


def check(case: Quantized, modes=(heur_mode.OPENSOURCE,), device: str = "emulator", memory: str = "cpu") -> None:
    """Run and hold against float64; bit for bit, given the value before in float32."""
    pack, outputs = case.inputs(memory), case.outputs(memory)
    g = case.graph(device)
    graphs.run(g, pack | outputs, modes)
    assert isinstance(g.get_engine_and_knobs_at_index(0)[0], str), "several kernels"
    case.hold(pack, outputs)
    for name, want in case.quantized(case.values(pack, modes, device)).items():
        found = outputs[name].cpu()
        found = found if found.dtype is torch.float32 else found.view(torch.uint8)
        np.testing.assert_array_equal(found.numpy(), want, err_msg=f"{name} of {case}")
