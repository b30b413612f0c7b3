"""Graphs that several tests build: one RMSNorm problem as data, and arbitrary graphs drawn by hypothesis."""

import functools
import operator
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

import graphfuse
from graphfuse import data_type, heur_mode, norm_forward_phase
from support import oracle

FLOAT, HALF, BF16 = data_type.FLOAT, data_type.HALF, data_type.BFLOAT16
E4M3, E5M2, FP4 = data_type.FP8_E4M3, data_type.FP8_E5M2, data_type.FP4_E2M1

TORCH = {
    FLOAT: torch.float32,
    HALF: torch.float16,
    BF16: torch.bfloat16,
    E4M3: torch.float8_e4m3fn,
    E5M2: torch.float8_e5m2,
    FP4: torch.uint8,
    data_type.INT8: torch.int8,
}


def new(name: str = "graph", device: str = "cpu", **types) -> graphfuse.pygraph:
    """An empty graph for one device; virtual tensors are float32 unless said otherwise.

    "cuda" is the current one, with torch's current stream; a handle would bring its own.
    """
    types = {"io_data_type": FLOAT, "intermediate_data_type": FLOAT} | types
    return graphfuse.pygraph(name, handle=None if device == "cuda" else graphfuse.create_handle(device), **types)


def generator(device: str, seed: int) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


# One RMSNorm problem


def placed(values: torch.Tensor, stride: int | None, offset: int) -> torch.Tensor:
    """`values` with this row stride, `offset` elements into an allocation; the gaps hold noise."""
    if not offset and stride in (None, values.shape[1]):
        return values
    stride = stride or values.shape[1]
    size = offset + stride * max(values.shape[0] - 1, 0) + values.shape[1]
    memory = torch.empty(size, dtype=values.dtype, device=values.device)
    memory.view(torch.uint8).fill_(0x5A)
    return memory[offset:].as_strided(values.shape, (stride, 1)).copy_(values)


@dataclass(frozen=True)
class Norm:
    """chain(swish(rmsnorm(x) + bias) * factor), quantized if asked, on [rows, columns].

    beta: None for no swish. eps: None leaves epsilon to execute (by value), "device" to
    device memory. factor: None, "value" or "device". scalars: type of epsilon and factor in
    device memory. chain: ops whose operand 0 is the result so far and -1 the factor.
    blocks: block_scale_quantize to NVFP4. The strides are those of rows, in elements;
    offset is how many elements into its memory each tensor begins.
    """

    rows: int = 12
    columns: int = 64
    input: data_type = BF16
    weight: data_type = BF16
    output: data_type = BF16
    bias: data_type | None = None
    beta: float | None = 1.0
    eps: float | str | None = 1e-5
    training: bool = False
    factor: str | None = None
    blocks: bool = False
    input_stride: int | None = None
    output_stride: int | None = None
    offset: int = 0
    alignment: int = 16
    scalars: data_type = FLOAT
    chain: "tuple[Op, ...]" = ()

    EPS, FACTOR = 1e-5, 0.75  # what execute is given for epsilon and factor

    def graph(self, device: str = "cpu", **settings) -> graphfuse.pygraph:
        """The graph, its tensors named x, weight, bias, epsilon, factor, out, inverse_rms, block_scale. settings: of
        ``pygraph``."""
        g = new(device=device, **settings)
        row = dict(byte_alignment=self.alignment)
        x = g.tensor([self.rows, self.columns], [self.input_stride or self.columns, 1], self.input, name="x", **row)
        weight = g.tensor([1, self.columns], data_type=self.weight, name="weight", **row)
        bias = self.bias and g.tensor([1, self.columns], data_type=self.bias, name="bias", **row)
        epsilon, factor = self.eps, None
        if epsilon is None:
            epsilon = g.tensor([1, 1], data_type=FLOAT, is_pass_by_value=True, name="epsilon")
        elif epsilon == "device":
            epsilon = g.tensor([1, 1], data_type=self.scalars, byte_alignment=4, name="epsilon")
        phase = norm_forward_phase.TRAINING if self.training else norm_forward_phase.INFERENCE
        y, inverse = g.rmsnorm(x, weight, epsilon, bias or None, norm_forward_phase=phase)
        if self.training:
            inverse.set_output().set_name("inverse_rms")
        if self.beta is not None:
            y = g.swish(y, swish_beta=self.beta)
        if self.factor is not None:
            by_value = self.factor == "value"
            kind = FLOAT if by_value else self.scalars
            factor = g.tensor([1, 1], data_type=kind, is_pass_by_value=by_value, byte_alignment=4, name="factor")
            y = g.mul(y, factor)
        for op in self.chain:
            y = getattr(g, op.name)(*(factor if o < 0 else y for o in op.operands), **dict(op.attributes))
        if self.blocks:
            y, scales = g.block_scale_quantize(y, block_size=16)
            scales.set_output().set_name("block_scale").set_byte_alignment(1)
        y.set_output().set_name("out").set_data_type(self.output).set_byte_alignment(self.alignment)
        y.set_dim([self.rows, self.columns]).set_stride([self.output_stride or self.columns, 1])
        return g

    def inputs(self, device: str = "cpu", seed: int = 0, amplitude: float = 1.0) -> dict[str, object]:
        """Random values for everything the graph reads."""
        source = generator(device, seed)

        def values(rows, stride, dtype, spread, middle):
            t = torch.randn(rows, self.columns, generator=source, device=device) * spread + middle
            return placed(t.to(TORCH[dtype]), stride, self.offset)

        pack = {
            "x": values(self.rows, self.input_stride, self.input, amplitude, 0),
            "weight": values(1, None, self.weight, 0.25, 1),
        }
        if self.bias:
            pack["bias"] = values(1, None, self.bias, 0.5, 0)

        def scalar(number):
            return torch.full((1, 1), number, dtype=TORCH[self.scalars], device=device)

        if self.eps in (None, "device"):
            pack["epsilon"] = self.EPS if self.eps is None else scalar(self.EPS)
        if self.factor:
            pack["factor"] = self.FACTOR if self.factor == "value" else scalar(self.FACTOR)
        return pack

    def outputs(self, device: str = "cpu") -> dict[str, torch.Tensor]:
        """Memory for everything the graph writes, filled with a byte that no result is."""
        per_byte = 2 if self.output is FP4 else 1
        shape, stride = (self.rows, self.columns // per_byte), (self.output_stride or self.columns) // per_byte
        out = torch.empty(shape, dtype=torch.uint8, device=device) if per_byte == 2 else None
        out = torch.empty(shape, dtype=TORCH[self.output], device=device) if out is None else out
        out.view(torch.uint8).fill_(0xA5)
        pack = {"out": placed(out, stride, self.offset)}
        if self.training:
            pack["inverse_rms"] = torch.full((self.rows, 1), float("nan"), device=device)
        if self.blocks:
            pack["block_scale"] = torch.full((self.rows, self.columns // 16), 0xA5, dtype=torch.uint8, device=device)
        return pack

    def exact(self, pack: dict[str, object]) -> dict[str, torch.Tensor]:
        """ "out" before quantization and "inverse_rms", in float64."""
        eps = torch.as_tensor(pack.get("epsilon", self.eps)).item()
        y, inverse = oracle.rmsnorm(pack["x"], pack["weight"], eps, pack.get("bias"))
        if self.beta is not None:
            y = oracle.swish(y, self.beta)
        if self.factor:
            y = y * self.FACTOR
        for op in self.chain:
            factor = torch.full_like(y, self.FACTOR)
            y = oracle.POINTWISE[op.name](*(factor if o < 0 else y for o in op.operands), **dict(op.attributes))
        return {"out": y, "inverse_rms": inverse}


def run(graph: graphfuse.pygraph, pack: dict, modes=(heur_mode.FALLBACK,), device: str = "cpu") -> None:
    """Build and execute with the workspace that is asked for."""
    graph.build(list(modes))
    graph.execute(pack, workspace(graph.get_workspace_size(), device))


def fused(case: Norm, device: str = "cuda") -> graphfuse.pygraph:
    """The graph built as one generated kernel."""
    graph = case.graph(device)
    graph.build([heur_mode.OPENSOURCE])
    assert graph.get_engine_and_knobs_at_index(0)[0] == "rows"  # a name, not a tuple of them: one part
    return graph


def workspace(size: int, device: str = "cpu") -> torch.Tensor:
    """`size` bytes at an address that is a multiple of 256."""
    memory = torch.full((size + 256,), 0xEE, dtype=torch.uint8, device=device)
    start = -memory.data_ptr() % 256
    return memory[start : start + size]


NORMS = {
    "plain": Norm(beta=None),
    "swish": Norm(),
    "beta": Norm(beta=1.702),
    "bias": Norm(bias=FLOAT),
    "training": Norm(training=True),
    "by-value": Norm(eps=None, factor="value"),
    "device factor": Norm(factor="device", output=E4M3),
    "one column": Norm(columns=1),
    "one row": Norm(rows=1),
    "no rows": Norm(rows=0, training=True),
    "odd": Norm(rows=7, columns=33, input=HALF, output=FLOAT),
    "rows apart": Norm(input_stride=72, output_stride=80),
    "wide weight": Norm(input=BF16, weight=FLOAT),
    "fp8": Norm(output=E4M3),
    "e5m2": Norm(output=E5M2),
    "fp8 in": Norm(input=E4M3, weight=E5M2),
}


def check(case: Norm, modes=(heur_mode.FALLBACK,), device: str = "cpu", seed: int = 0) -> None:
    """Run and hold against float64."""
    pack, outputs = case.inputs(device, seed), case.outputs(device)
    run(case.graph(device), pack | outputs, modes, device)
    hold(case, pack, outputs)


def hold(case: Norm, pack: dict, outputs: dict[str, torch.Tensor]) -> None:
    """Results against float64: one representable value of slack, for FLOAT a relative 1e-5, for blocks
    half the widest gap of E2M1 (4 to 6) or what saturation cuts off.

    And between the rows, and before the first, nothing may be written.
    """
    exact, device = case.exact(pack), outputs["out"].device
    if case.blocks:
        scale = outputs["block_scale"].view(torch.float8_e4m3fn).double()
        amax = exact["out"].unflatten(1, (-1, 16)).abs().amax(-1)
        error = (oracle.from_nvfp4(outputs["out"], outputs["block_scale"]) - exact["out"]).abs()
        bound = torch.maximum(scale, amax - 6 * scale) * (1 + 1e-5)
        assert (error.unflatten(1, (-1, 16)).amax(-1) <= bound).all(), f"out: off by up to {error.max()}"
    for name in exact.keys() & outputs.keys() - ({"out"} if case.blocks else set()):
        got = outputs[name]
        want = oracle.rounded(exact[name], got.dtype)
        # A bias can cancel the product: there float32's absolute error counts.
        difference = (got.double() - exact[name]).abs()
        close = difference <= 1e-5 * (exact[name].abs() + 1)
        if got.dtype is not torch.float32:
            close |= oracle.ulps(got, want) <= 1
        elif case.bias is None:
            close = difference <= 1e-5 * exact[name].abs()
        assert close.all(), f"{name}: {int((~close).sum())} elements are off, by up to {difference.max()}"
    memory = torch.empty(0, dtype=torch.uint8, device=device).set_(outputs["out"].untyped_storage())
    if case.offset or case.output_stride not in (None, case.columns):
        outputs["out"].view(torch.uint8).fill_(0x5A)
        assert (memory == 0x5A).all(), "memory beside the rows was written"


# A row of 64 equal x: the sum of squares 64 x^2 leaves float32 at |x| = 2.3e18, and inverse RMS is 0 beyond.
OVERFLOW = (torch.finfo(torch.float32).max / 64) ** 0.5

EXTREMES = {
    "zeros": (0.0, 0.0),
    "denormals": (2.0**-136, 2.0**-136 / 1e-5**0.5),
    "small": (1e-20, 1e-20 / 1e-5**0.5),
    "large": (1e17, 1.0),
    "before overflow": (OVERFLOW * 0.99, 1.0),
    "beyond overflow": (OVERFLOW * 1.01, 0.0),
    "infinity": (float("inf"), float("nan")),
    "nan": (float("nan"), float("nan")),
}
"""Value of all elements of a row -> its normalized value (epsilon 1e-5, weight 1)."""


def check_extreme(value: float, want: float, modes=(heur_mode.FALLBACK,), device: str = "cpu") -> None:
    """One row of equal elements among others, which do not see it."""
    case = Norm(rows=3, input=FLOAT, weight=FLOAT, output=FLOAT, beta=None)
    pack, outputs = case.inputs(device), case.outputs(device)
    pack["weight"].fill_(1)
    pack["x"][1] = value
    run(case.graph(device), pack | outputs, modes, device)
    row = torch.full((64,), want, device=device)
    torch.testing.assert_close(outputs["out"][1], row, rtol=1e-6, atol=0, equal_nan=True)
    torch.testing.assert_close(outputs["out"][::2].double(), case.exact(pack)["out"][::2], rtol=1e-5, atol=1e-7)


# Arbitrary graphs

UNARY = ("identity", "abs", "neg", "relu", "sigmoid", "tanh", "swish", "gelu", "gelu_approx_tanh")
BINARY = ("add", "sub", "mul", "scale", "max", "min")
SHAPE = (3, 16)


@dataclass(frozen=True)
class Op:
    """A node over values: negative numbers are leaves (-1 the first), others the nodes before it."""

    name: str
    operands: tuple[int, ...]
    attributes: tuple[tuple[str, object], ...] = ()


@dataclass(frozen=True)
class Drawn:
    """A graph as data: shapes of its leaves, nodes in an order that works, which results are outputs."""

    leaves: tuple[tuple[int, ...], ...]
    ops: tuple[Op, ...]
    outputs: frozenset[int]

    def build(self, order=None, prefix: str = "", device: str = "cpu", **types) -> graphfuse.pygraph:
        """The graph, nodes added in `order`; leaves are named l1, l2, ..., results n0, n1, ... after `prefix`."""
        g = new(device=device, **types)
        values = {
            -1 - i: g.tensor(shape, name=f"{prefix}l{i + 1}")
            for i, shape in enumerate(self.leaves)
            if self.reads(-1 - i)
        }
        for index in range(len(self.ops)) if order is None else order:
            op = self.ops[index]
            operands = [values[v] for v in op.operands]
            made = self.add(g, op, operands, f"{prefix}node{index}")
            values[index] = made.set_output(index in self.outputs).set_name(f"{prefix}n{index}")
        return g

    def add(self, g: graphfuse.pygraph, op: Op, operands: list[graphfuse.Tensor], name: str) -> graphfuse.Tensor:
        if op.name == "rmsnorm":
            return g.rmsnorm(*operands, 1e-3, norm_forward_phase=norm_forward_phase.INFERENCE, name=name)[0]
        return getattr(g, op.name)(*operands, **dict(op.attributes), name=name)

    def reads(self, value: int) -> bool:
        return any(value in op.operands for op in self.ops)

    def inputs(self, device: str = "cpu", prefix: str = "") -> dict[str, torch.Tensor]:
        source = generator(device, len(self.ops))
        return {
            f"{prefix}l{i + 1}": torch.randn(shape, generator=source, device=device)
            for i, shape in enumerate(self.leaves)
            if self.reads(-1 - i)
        }

    def exact(self, pack: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Every output by name, in float64."""
        values = self.results(pack)
        return {f"n{i}": values[i] for i in self.outputs}

    def results(self, pack: dict[str, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Every leaf that is read and every node's result, in float64."""
        values = {-1 - i: pack.get(f"l{i + 1}") for i in range(len(self.leaves))}
        for index, op in enumerate(self.ops):
            values[index] = self.compute(op, [values[v] for v in op.operands])
        return values

    def compute(self, op: Op, operands: list[torch.Tensor]) -> torch.Tensor:
        if op.name == "rmsnorm":
            return oracle.rmsnorm(*operands, 1e-3)[0]
        return oracle.POINTWISE[op.name](*operands, **dict(op.attributes))


@st.composite
def drawn(draw, max_ops: int = 7) -> Drawn:
    """Graphs of pointwise and rmsnorm nodes in which every result is read or an output."""
    leaves = (SHAPE, (1, SHAPE[1]), *draw(st.lists(st.sampled_from((SHAPE, (1, SHAPE[1]), (1, 1))), max_size=3)))
    shapes = {-1 - i: shape for i, shape in enumerate(leaves)}
    ops: list[Op] = []
    for index in range(draw(st.integers(1, max_ops))):
        anything = st.sampled_from(sorted(shapes))
        kind = draw(st.sampled_from(("unary", "unary", "binary", "binary", "rmsnorm")))
        if kind == "unary":
            name = draw(st.sampled_from(UNARY))
            attributes = ()
            if name == "swish":
                attributes = (("swish_beta", draw(st.sampled_from((1.0, 0.5, 1.702)))),)
            if name == "relu" and draw(st.booleans()):
                attributes = (("negative_slope", 0.25), ("lower_clip", 0.0), ("upper_clip", 2.0))
            op = Op(name, (draw(anything),), attributes)
        elif kind == "binary":
            op = Op(draw(st.sampled_from(BINARY)), (draw(anything), draw(anything)))
        else:
            op = Op("rmsnorm", (draw(st.sampled_from([v for v in shapes if shapes[v][1] == SHAPE[1]])), -2))
        ops.append(op)
        shapes[index] = (
            tuple(map(max, *(shapes[v] for v in op.operands))) if len(op.operands) > 1 else shapes[op.operands[0]]
        )
    read = set(functools.reduce(operator.add, (op.operands for op in ops)))
    extra = draw(st.frozensets(st.integers(0, len(ops) - 1)))
    return Drawn(leaves, tuple(ops), frozenset(i for i in range(len(ops)) if i not in read) | extra)


@st.composite
def reorderings(draw, graph: Drawn) -> list[int]:
    """Another order of the nodes in which each comes after what it reads."""
    left, order = set(range(len(graph.ops))), []
    while left:
        ready = sorted(i for i in left if not left.intersection(graph.ops[i].operands))
        order.append(draw(st.sampled_from(ready)))
        left.remove(order[-1])
    return order


def check_drawn(graph: Drawn, modes, device: str = "cpu") -> None:
    """Run and hold every output against float64."""
    memory = "cuda" if device == "cuda" else "cpu"
    pack = graph.inputs(memory)
    exact = graph.exact({name: value.cpu() for name, value in pack.items()})
    g = graph.build(device=device)
    g.validate()
    outputs = {t.name: torch.empty_strided(t.dim, t.stride, device=memory).fill_(float("nan")) for t in g._ir.outputs}
    run(g, pack | outputs, modes, memory)
    for name, want in exact.items():
        torch.testing.assert_close(outputs[name].double().cpu(), want, rtol=2e-4, atol=2e-4)
