"""The ops of softmax: values on every engine, what becomes of infinities, gradients, the nodes that they stand for."""

import numpy as np
import pytest
import torch

from graphfuse import GraphTypeError, GraphValidationError, data_type, heur_mode, reduction_mode
from graphfuse.rows.steps import Reduce
from support import graphs
from support.emulation import Planned
from support.graphs import BF16, E4M3, FLOAT, HALF

OPS = ("softmax", "log_softmax", "logsumexp")
BACKWARD = ("softmax_backward", "log_softmax_backward")
INFINITY = float("inf")


def exact(op: str, x: torch.Tensor, axis: int = -1) -> torch.Tensor:
    """In float64 by numpy. log_softmax and logsumexp by logaddexp, which knows of no largest element."""
    x = x.double().numpy()
    with np.errstate(all="ignore"):
        total = np.logaddexp.reduce(x, axis, keepdims=True)
        made = {"softmax": np.exp(x - total), "log_softmax": x - total, "logsumexp": total}[op]
    return torch.from_numpy(made)


def run(op: str, given: dict[str, torch.Tensor], device: str, output=FLOAT, **attributes) -> torch.Tensor:
    """The only output of an op on these tensors, by port, as float64."""
    g = graphs.new(device=device)
    tensors = {name: g.tensor_like(t, name=name) for name, t in given.items()}
    made = getattr(g, op)(**tensors, **attributes).set_output().set_data_type(output).set_name("made")
    g.build([heur_mode.FALLBACK if device == "cpu" else heur_mode.OPENSOURCE])
    out = torch.empty_strided(made.get_dim(), made.get_stride(), dtype=graphs.TORCH[output])
    g.execute({tensors[name]: t for name, t in given.items()} | {made: out})
    return out.double()


def drawn(shape, seed: int = 0, dtype=BF16, spread: float = 4.0, middle: float = 30.0) -> torch.Tensor:
    """Far from zero: without the largest subtracted, e^x would overflow."""
    values = torch.randn(shape, generator=graphs.generator("cpu", seed)) * spread + middle
    return values.to(graphs.TORCH[dtype])


@pytest.mark.emulate
@pytest.mark.parametrize("device", ["cpu", "emulator"])
@pytest.mark.parametrize("shape", [(5, 96), (1, 1000), (7, 1), (2, 3, 4, 33), (40,), (0, 8)], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_values(op, shape, device):
    x = drawn(shape, len(shape), middle=90.0)
    torch.testing.assert_close(run(op, {"input": x}, device), exact(op, x), rtol=2e-6, atol=3e-6)


@pytest.mark.emulate
@pytest.mark.parametrize("dtype", [BF16, HALF, FLOAT])
@pytest.mark.parametrize("output", [BF16, HALF, FLOAT, E4M3])
def test_types(dtype, output):
    x = drawn((3, 64), 1, dtype)
    made, wanted = run("softmax", {"input": x}, "emulator", output), exact("softmax", x)
    digits = {FLOAT: 2e-6, HALF: 2.0**-11, BF16: 2.0**-8, E4M3: 2.0**-4}[output]
    torch.testing.assert_close(made, wanted, rtol=digits * 1.01, atol=2.0**-10 if output is E4M3 else 2.0**-25)


@pytest.mark.emulate
@pytest.mark.parametrize("axis", [0, 1, -3, -1])
@pytest.mark.parametrize("op", OPS)
def test_any_axis(op, axis):
    x = drawn((3, 5, 4), 3)
    torch.testing.assert_close(run(op, {"input": x}, "cpu", axis=axis), exact(op, x, axis), rtol=2e-6, atol=3e-6)
    last = x.movedim(axis, -1).contiguous().movedim(-1, axis)  # of packed elements, wherever the axis stands
    torch.testing.assert_close(
        run(op, {"input": last}, "emulator", axis=axis), exact(op, x, axis), rtol=2e-6, atol=3e-6
    )


SPECIAL = {
    "some -infinity": ((1.0, -INFINITY, 2.0), False),
    "all -infinity": ((-INFINITY,) * 3, True),
    "infinity": ((1.0, INFINITY, 2.0), True),
    "both": ((-INFINITY, INFINITY, 2.0), True),
    "NaN": ((1.0, float("nan"), -INFINITY), True),
    "the largest numbers": ((3e38, 3.4e38, 0.0), False),
}
"""A row, and whether its softmax is NaN, as torch's is."""


@pytest.mark.emulate
@pytest.mark.parametrize("device", ["cpu", "emulator"])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("case", SPECIAL.values(), ids=SPECIAL)
def test_infinities_are_as_of_torch_and_stay_in_their_row(case, op, device):
    row, is_nan = case
    x = torch.zeros(3, 3)
    x[1] = torch.tensor(row)
    made = run(op, {"input": x}, device)
    of = {"softmax": torch.softmax, "log_softmax": torch.log_softmax, "logsumexp": torch.logsumexp}[op]
    wanted = of(x.double(), 1, **({"keepdim": True} if op == "logsumexp" else {}))
    torch.testing.assert_close(made, wanted, rtol=1e-6, atol=1e-6, equal_nan=True)
    assert op == "logsumexp" or bool(made[1].isnan().all()) == is_nan
    assert not made[::2].isnan().any()


def test_in_float64_the_largest_numbers_are_those_of_float64():
    x = torch.tensor([[1e300, 1e300]], dtype=torch.float64)
    g = graphs.new(io_data_type=data_type.DOUBLE, compute_data_type=data_type.DOUBLE)
    X = g.tensor_like(x, name="x")
    y = g.logsumexp(X).set_output().set_data_type(data_type.DOUBLE)
    g.build([heur_mode.FALLBACK])
    out = torch.empty(1, 1, dtype=torch.float64)
    g.execute({X: x, y: out})
    assert out.item() == 1e300


# Gradients


def gradient(op: str, x: torch.Tensor, grad: torch.Tensor, axis: int = -1) -> tuple[torch.Tensor, torch.Tensor]:
    """(forward, gradient) in float64 by torch.autograd."""
    x = x.double().requires_grad_()
    y = getattr(torch, op.removesuffix("_backward"))(x, axis)
    return y.detach(), torch.autograd.grad(y, x, grad.double())[0]


@pytest.mark.emulate
@pytest.mark.parametrize("device", ["cpu", "emulator"])
@pytest.mark.parametrize("shape", [(5, 96), (1, 1000), (7, 1), (2, 3, 4, 33), (0, 8)], ids=str)
@pytest.mark.parametrize("op", BACKWARD)
def test_gradients(op, shape, device):
    x, grad = drawn(shape, 1, spread=1.0), drawn(shape, 2, spread=1.0, middle=0.0)
    y, wanted = gradient(op, x, grad)
    made = run(op, {"grad": grad, "output": y.float()}, device)
    size = grad.double().abs().sum(-1, keepdim=True)
    assert ((made - wanted).abs() <= 1e-6 * size).all()


@pytest.mark.parametrize("op", BACKWARD)
def test_gradients_along_any_axis(op):
    x, grad = drawn((3, 5, 4), 1, spread=1.0), drawn((3, 5, 4), 2, spread=1.0, middle=0.0)
    for axis in (0, 1, -1):
        y, wanted = gradient(op, x, grad, axis)
        made = run(op, {"grad": grad, "output": y.float()}, "cpu", axis=axis)
        torch.testing.assert_close(made, wanted, rtol=1e-5, atol=1e-6)


# The same as nodes


class Nodes:
    """What the ops stand for, on tensors of rows. Each takes what the op takes."""

    def __init__(self, g, rows: int):
        self.g, self.rows = g, rows

    def over(self, value, mode):
        return self.g.reduction(value, mode=mode).set_dim([self.rows, 1])

    def softmax(self, x):
        powers = self.g.exp(self.g.sub(x, self.over(x, reduction_mode.MAX)))
        return self.g.div(powers, self.over(powers, reduction_mode.ADD))

    def log_softmax(self, x):
        apart = self.g.sub(x, self.over(x, reduction_mode.MAX))
        return self.g.sub(apart, self.g.log(self.over(self.g.exp(apart), reduction_mode.ADD)))

    def logsumexp(self, x):
        most = torch.finfo(torch.float32).max
        largest = self.g.relu(self.over(x, reduction_mode.MAX), lower_clip=-most, upper_clip=most)
        total = self.over(self.g.exp(self.g.sub(x, largest)), reduction_mode.ADD)
        return self.g.add(self.g.log(total), largest)

    def softmax_backward(self, grad, y):
        total = self.over(self.g.mul(grad, y), reduction_mode.ADD)
        return self.g.mul(self.g.sub(grad, total), y)

    def log_softmax_backward(self, grad, y):
        total = self.over(grad, reduction_mode.ADD)
        return self.g.sub(grad, self.g.mul(self.g.exp(y), total))


@pytest.mark.parametrize("op", OPS + BACKWARD)
@pytest.mark.parametrize("rows, columns", [(5, 96), (1, 1000), (2, 40000)])
def test_an_op_is_the_kernel_of_its_nodes(op, rows, columns):
    """One kernel, of the same reductions. The ops know that what they raise e to is not above zero, and divide by what
    is a row's; gradients have the steps of their nodes, and the text to its last letter."""
    found = []
    for spelled in ("op", "nodes"):
        g = graphs.new(device="emulator")
        names = ("grad", "y") if op in BACKWARD else ("x",)
        given = [g.tensor([rows, columns], data_type=BF16, name=name) for name in names]
        y = getattr(g if spelled == "op" else Nodes(g, rows), op)(*given).set_output().set_name("made")
        y.set_data_type(FLOAT)
        found.append(Planned(g, {}))
    programs = [planned.part.facts.program for planned in found]
    reductions = [[(s.join, p.earliest[k]) for k, s in enumerate(p.steps) if isinstance(s, Reduce)] for p in programs]
    assert reductions[0] == reductions[1]
    if op in BACKWARD:
        by_op, by_nodes = found
        assert programs[0].steps == programs[1].steps and by_op.source == by_nodes.source


def test_what_stands_around_is_in_the_same_kernel():
    g = graphs.new(device="emulator")
    x, mask = g.tensor([6, 64], data_type=BF16, name="x"), g.tensor([6, 64], data_type=BF16, name="mask")
    y = g.softmax(g.add(g.mul(x, 0.125), mask))
    values, scales = g.block_scale_quantize(g.mul(y, 2.0), block_size=16)
    values.set_output().set_name("values").set_data_type(data_type.FP4_E2M1)
    scales.set_output().set_name("scales")
    program = Planned(g, {}).part.facts.program
    assert [view.name for view in program.inputs] == ["x", "mask"] and len(program.stores) == 1


# What is refused


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    "shape, axis, said",
    [([4, 8], 2, "axis 2 is outside the input's rank 2"), ([4, 8], -3, "axis -3"), ([4, 0], -1, "no elements")],
)
def test_refused_axes(op, shape, axis, said):
    g = graphs.new()
    getattr(g, op)(g.tensor(shape, data_type=BF16), axis=axis).set_output()
    with pytest.raises(GraphValidationError, match=said):
        g.validate()


def test_an_axis_is_an_int():
    g = graphs.new()
    with pytest.raises(GraphTypeError, match="axis must be int, got True"):
        g.softmax(g.tensor([4, 8], data_type=BF16), axis=True)


@pytest.mark.parametrize("op", BACKWARD)
def test_refused_gradients(op):
    g = graphs.new()
    getattr(g, op)(g.tensor([4, 8], data_type=BF16), g.tensor([4, 1], data_type=BF16)).set_output()
    with pytest.raises(GraphValidationError, match=r"grad must have output's shape \[4, 1\], got \[4, 8\]"):
        g.validate()


@pytest.mark.emulate
@pytest.mark.parametrize("op", OPS)
def test_along_an_axis_whose_elements_lie_apart(op):
    made = {}
    for device, mode in (("emulator", heur_mode.OPENSOURCE), ("cpu", heur_mode.FALLBACK)):
        g = graphs.new(device=device)
        y = getattr(g, op)(g.tensor([4, 3, 8], data_type=BF16, name="x"), axis=0).set_output().set_name("y")
        y.set_data_type(FLOAT)
        g.build([mode])
        x = torch.randn(4, 3, 8, generator=graphs.generator("cpu", 4)).bfloat16()
        made[device] = torch.empty(y.get_dim())
        g.execute({"x": x, "y": made[device]}, None)
    torch.testing.assert_close(made["emulator"], made["cpu"], rtol=3e-6, atol=3e-6)
