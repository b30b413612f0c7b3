"""Backward problems as data: what stands around an rmsnorm_backward, and what is held of it against float64."""

import itertools
from dataclasses import dataclass

import torch

from graphfuse import data_type, heur_mode, pygraph
from support import graphs, oracle
from support.graphs import BF16, FLOAT, HALF, TORCH

EPS = 1e-5
WEIGHTS = ("none", "plain", "zero-centred", "other type")
ACTIVATIONS = ("none", "silu", "gelu", "gate")
TYPES = (BF16, HALF, FLOAT)


@dataclass(frozen=True)
class Gradient:
    """The gradients of activation(rmsnorm(x) * weight + bias) on rows x columns, the normal value worked out again.

    dtype: of x and of all gradients of rows. weight: "none", "plain", "zero-centred" (1 + w), "other type" than x.
    activation: "none", "silu", "gelu", "gate" (SiLU times a tensor, whose gradient is an output, too). residual: the
    gradient of a branch beside is added. dbias: that of a bias of zeros, where there is a weight. The strides are those
    of rows, in elements; offset is how many elements into its memory each tensor begins.
    """

    rows: int = 5
    columns: int = 96
    dtype: data_type = BF16
    weight: str = "plain"
    activation: str = "none"
    residual: bool = False
    dbias: bool = False
    x_stride: int | None = None
    grad_stride: int | None = None
    dx_stride: int | None = None
    offset: int = 0
    alignment: int = 16

    def __str__(self) -> str:
        parts = (self.dtype.name, f"weight {self.weight}", self.activation, "residual" * self.residual)
        return " ".join([*(p for p in parts if p), *["dbias"] * self.dbias, f"{self.rows}x{self.columns}"])

    @property
    def weight_type(self) -> data_type:
        other = BF16 if self.dtype is FLOAT else FLOAT
        return other if self.weight == "other type" else self.dtype

    def graph(self, device: str = "cpu") -> pygraph:
        g = graphs.new(device=device)

        def rows(name, stride=None):
            return g.tensor(
                [self.rows, self.columns],
                [stride or self.columns, 1],
                self.dtype,
                name=name,
                byte_alignment=self.alignment,
            )

        def output(t, name, dtype, stride=None):
            alignment = max(4, self.alignment) if name == "dbias" else self.alignment
            t.set_output().set_name(name).set_data_type(dtype).set_byte_alignment(alignment)
            if stride:
                t.set_dim([self.rows, self.columns]).set_stride([stride, 1])

        x, grad = rows("x", self.x_stride), rows("grad", self.grad_stride)
        inverse = g.tensor([self.rows, 1], data_type=FLOAT, name="inverse_rms")
        weight = None
        if self.weight != "none":
            weight = g.tensor(
                [1, self.columns], data_type=self.weight_type, name="weight", byte_alignment=self.alignment
            )
        if self.weight == "zero-centred":
            weight = g.add(weight, 1.0)
        if self.activation != "none":
            normal = g.mul(x, inverse)
            y = normal if weight is None else g.mul(normal, weight)
            if self.activation == "gate":
                output(g.mul(grad, g.swish(y)), "dgate", self.dtype)
                grad = g.mul(grad, rows("gate"))
            grad = g.gelu_backward(grad, y) if self.activation == "gelu" else g.swish_backward(grad, y)
        dbias = self.dbias and weight is not None
        dx, dscale, dbias = g.rmsnorm_backward(grad, x, weight, inverse, has_dbias=dbias)
        if self.residual:
            dx = g.add(dx, rows("residual"))
        output(dx, "dx", self.dtype, self.dx_stride)
        if dscale is not None:
            output(dscale, "dscale", self.weight_type)
        if dbias is not None:
            output(dbias, "dbias", FLOAT)
        return g

    def inputs(self, device: str = "cpu", seed: int = 0) -> dict[str, torch.Tensor]:
        """Random values for everything the graph reads."""
        source = graphs.generator(device, seed)

        def values(rows, dtype=self.dtype, stride=None, spread=1.0, middle=0.0):
            t = torch.randn(rows, self.columns, generator=source, device=device) * spread + middle
            return graphs.placed(t.to(TORCH[dtype]), stride, self.offset)

        middle = 0.0 if self.weight == "zero-centred" else 1.0
        pack = {"x": values(self.rows, stride=self.x_stride), "grad": values(self.rows, stride=self.grad_stride)}
        pack["inverse_rms"] = oracle.rmsnorm(pack["x"], None, EPS)[1].float()
        if self.weight != "none":
            pack["weight"] = values(1, self.weight_type, spread=0.25, middle=middle)
        if self.activation == "gate":
            pack["gate"] = values(self.rows)
        if self.residual:
            pack["residual"] = values(self.rows)
        return pack

    def outputs(self, device: str = "cpu") -> dict[str, torch.Tensor]:
        """Memory for everything the graph writes, filled with a byte that no result is."""
        made = {"dx": (self.rows, self.dtype)}
        if self.activation == "gate":
            made["dgate"] = (self.rows, self.dtype)
        if self.weight != "none":
            made["dscale"] = (1, self.weight_type)
            if self.dbias:
                made["dbias"] = (1, FLOAT)
        pack = {}
        for name, (rows, dtype) in made.items():
            memory = torch.empty(rows, self.columns, dtype=TORCH[dtype], device=device)
            memory.view(torch.uint8).fill_(0xA5)
            pack[name] = graphs.placed(memory, self.dx_stride if name == "dx" else None, self.offset)
        return pack

    def hold(self, pack: dict, outputs: dict[str, torch.Tensor]) -> None:
        """Against float64: one representable value of slack, or 2e-5 of the magnitudes that a result is made of."""
        for name, (exact, size) in self.exact(pack).items():
            got = outputs[name]
            difference = (got.double() - exact).abs()
            close = difference <= 2e-5 * size
            if got.dtype is not torch.float32:
                close |= oracle.ulps(got, oracle.rounded(exact, got.dtype)) <= 1
            assert close.all(), f"{name}: {int((~close).sum())} elements are off, by up to {difference.max()}"
        memory = torch.empty(0, dtype=torch.uint8, device=outputs["dx"].device).set_(outputs["dx"].untyped_storage())
        if self.offset or self.dx_stride not in (None, self.columns):
            outputs["dx"].view(torch.uint8).fill_(0x5A)
            assert (memory == 0x5A).all(), "memory beside the rows was written"

    def exact(self, pack: dict) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Every output in float64 by torch.autograd, and the magnitudes it is made of."""
        x = pack["x"].double().requires_grad_()
        shape = (1, self.columns)
        weight = pack["weight"].double() if "weight" in pack else torch.ones(shape, device=x.device).double()
        weight = (weight + (self.weight == "zero-centred")).requires_grad_()
        bias = torch.zeros(shape, device=x.device, dtype=torch.float64, requires_grad=True)
        gate = pack["gate"].double() if "gate" in pack else torch.ones_like(x)
        gate = gate.detach().requires_grad_()
        inverse = torch.rsqrt((x * x).mean(-1, keepdim=True) + EPS)
        y = x * inverse * weight + bias
        y.retain_grad()
        kinds = {"none": lambda t: t, "gelu": torch.nn.functional.gelu}
        out = kinds.get(self.activation, torch.nn.functional.silu)(y) * gate
        out.backward(pack["grad"].double())
        with torch.no_grad():
            # Where an activation's slope vanishes, it is the difference of larger numbers.
            incoming = (pack["grad"].double() * gate).abs()
            normal, scaled = (x * inverse).abs(), (incoming * weight).abs()
            residual = pack["residual"].double() if "residual" in pack else torch.zeros_like(x)
            size = inverse * (scaled + normal * (scaled * normal).mean(-1, keepdim=True)) + residual.abs()
            made = {"dx": (x.grad + residual, size)}
            if self.activation == "gate":
                made["dgate"] = (gate.grad, pack["grad"].double().abs() * (1 + y.abs()))
            if self.weight != "none":
                made["dscale"] = (weight.grad, (incoming * normal).sum(0, keepdim=True))
                if self.dbias:
                    made["dbias"] = (bias.grad, incoming.sum(0, keepdim=True))
        return made


def fused(case: Gradient, device: str) -> pygraph:
    """The graph built as one generated kernel."""
    graph = case.graph(device)
    graph.build([heur_mode.OPENSOURCE])
    assert graph.get_engine_and_knobs_at_index(0)[0] == "rows"  # a name, not a tuple of them: one part
    return graph


def run(graph: pygraph, pack: dict, memory: str = "cpu") -> None:
    """With the workspace that is asked for, full of garbage."""
    graph.execute(pack, graphs.workspace(graph.get_workspace_size(), memory))


def check(case: Gradient, device: str = "cpu", memory: str = "cpu") -> None:
    """Run as one kernel and hold against float64."""
    pack, outputs = case.inputs(memory), case.outputs(memory)
    run(fused(case, device), pack | outputs, memory)
    case.hold(pack, outputs)


CASES = tuple(
    Gradient(dtype=dtype, weight=weight, activation=activation, residual=residual, dbias=dbias)
    for weight, activation, residual, dtype, dbias in itertools.product(
        WEIGHTS, ACTIVATIONS, (False, True), TYPES, (False, True)
    )
    if weight != "none" or not dbias
)
