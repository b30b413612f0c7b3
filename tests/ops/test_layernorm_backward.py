"""The ops layernorm_backward, adalayernorm and adalayernorm_backward: values, programs, what is refused."""

import numpy as np
import pytest
import torch

from graphfuse import (
    GraphNotSupportedError,
    GraphValidationError,
    data_type,
    heur_mode,
    norm_forward_phase,
    reduction_mode,
)
from graphfuse.contract import match
from graphfuse.contract.engine import KernelEngine
from graphfuse.op_graph.freeze import freeze
from graphfuse.op_graph.lower import lower
from graphfuse.patterns.rows import PATTERN, RowFacts
from graphfuse.rows.steps import Join, Reduce
from support import graphs
from support.emulation import Planned
from support.graphs import BF16, FLOAT, HALF, TORCH

EPS = 1e-5
TRAINING, INFERENCE = norm_forward_phase.TRAINING, norm_forward_phase.INFERENCE
GRADIENTS = ("DX", "DScale", "DBias")


def normal(x: np.ndarray, axes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(x without its mean and spread, mean, inverse standard deviation)."""
    mean = np.mean(x, axes, keepdims=True)
    inverse = 1 / np.sqrt(np.var(x, axes, keepdims=True) + EPS)
    return (x - mean) * inverse, mean, inverse


def autograd(grad, x, scale, axes):
    """(DX, DScale, DBias) in float64. scale: None for 1."""
    leaves = [t.double().detach().clone().requires_grad_() for t in (x, scale) if t is not None]
    if scale is not None:
        leaves.append(torch.zeros_like(leaves[1], requires_grad=True))
    apart = leaves[0] - leaves[0].mean(axes, keepdim=True)
    y = apart / (apart.square().mean(axes, keepdim=True) + EPS) ** 0.5
    y = y if scale is None else y * leaves[1] + leaves[2]
    return torch.autograd.grad(y, leaves, grad.double())


def backward(op, grad, x, scale, axes, device="cpu", compute=FLOAT, wanted=GRADIENTS, modes=(heur_mode.FALLBACK,)):
    """What an op makes of these tensors, by port, in the compute type."""
    g = graphs.new(device=device, compute_data_type=compute)
    _, mean, inverse = (torch.from_numpy(a) for a in normal(x.double().numpy(), axes))
    kind = torch.float64 if compute is data_type.DOUBLE else torch.float32
    given = {"grad": grad, "input": x, "scale": scale, "mean": mean.to(kind), "inv_variance": inverse.to(kind)}
    tensors = {
        name: g.tensor(list(t.shape), list(t.stride()), type_of(t), name=name)
        for name, t in given.items()
        if t is not None
    }
    made = dict(zip(GRADIENTS, getattr(g, op)(**tensors), strict=True))
    outputs = {}
    for name in wanted:
        if made[name] is not None:
            made[name].set_output().set_name(name).set_data_type(compute)
    g.validate()
    for name in wanted:
        if made[name] is not None:
            outputs[name] = torch.full(made[name].get_dim(), float("nan"), dtype=kind)
            made[name].set_stride(outputs[name].stride())
    graphs.run(g, {name: given[name] for name in tensors} | outputs, modes)
    return outputs


def type_of(t: torch.Tensor) -> data_type:
    return next((ours for ours, kind in TORCH.items() if kind is t.dtype), data_type.DOUBLE)


def drawn(shape, seed: int, dtype=BF16, spread=1.0, middle=0.0) -> torch.Tensor:
    values = torch.randn(shape, generator=graphs.generator("cpu", seed), dtype=torch.float64) * spread + middle
    return values if dtype is data_type.DOUBLE else values.to(TORCH[dtype])


def hold(got: dict, grad, x, scale, axes, unit: float) -> None:
    """Against float64; a sum's error is relative to the magnitudes that it adds."""
    exact = dict(zip(GRADIENTS, autograd(grad, x, scale, axes), strict=False))
    n, _, inverse = (torch.from_numpy(np.abs(a)) for a in normal(x.double().numpy(), axes))
    g = grad.double().abs() * (1 if scale is None else scale.double().abs())
    size = {"DX": inverse * (g + g.mean(axes, keepdim=True) + n * (g * n).mean(axes, keepdim=True))}
    size["DX"] = size["DX"] + inverse * 40  # the mean of x is rounded, too
    if scale is not None:
        aligned = (*(1,) * (x.dim() - scale.dim()), *scale.shape)
        rows = [a for a, e in enumerate(aligned) if e == 1 and a not in axes]

        def summed(t):
            return (t.sum(rows, keepdim=True) if rows else t).reshape(scale.shape)

        size |= {"DScale": summed(grad.double().abs() * (n + 40)), "DBias": summed(grad.double().abs())}
    assert got.keys() <= exact.keys()
    for name, made in got.items():
        assert made.shape == exact[name].shape
        assert ((made.double() - exact[name]).abs() <= unit * size[name]).all(), name


# Shape of the input, and of the scale.
SHAPES = {
    "rows": ((7, 64), (1, 64)),
    "one row": ((1, 33), (1, 33)),
    "a scale of lower rank": ((2, 5, 33), (33,)),
    "no scale": ((7, 33), None),
    "channels": ((2, 8, 3, 5), (1, 8, 1, 1)),
    "two axes": ((4, 3, 8), (1, 3, 8)),
    "no rows": ((0, 16), (1, 16)),
}


@pytest.mark.parametrize("compute", [FLOAT, data_type.DOUBLE], ids=lambda d: d.name)
@pytest.mark.parametrize("shape, scale", SHAPES.values(), ids=SHAPES)
def test_layernorm_backward(shape, scale, compute):
    axes = (len(shape) - 1,) if scale is None else tuple(a - len(scale) for a, e in enumerate(scale) if e != 1)
    axes = tuple(a % len(shape) for a in axes)
    dtype = compute if compute is data_type.DOUBLE else BF16
    grad, x = drawn(shape, 1, dtype), drawn(shape, 2, dtype, 3.0, 20.0)
    weight = None if scale is None else drawn(scale, 3, dtype, 0.5, 1.0)
    got = backward("layernorm_backward", grad, x, weight, axes, compute=compute)
    assert set(got) == ({"DX"} if scale is None else set(GRADIENTS))
    hold(got, grad, x, weight, axes, 2.0**-48 if compute is data_type.DOUBLE else 2.0**-20)


@pytest.mark.parametrize(
    "shape, scale", [((3, 5, 33), (3, 1, 33)), ((1, 5, 33), (1, 1, 33)), ((2, 6, 4, 8), (2, 1, 4, 8))]
)
def test_adalayernorm_backward(shape, scale):
    axes = tuple(a for a, e in enumerate(scale) if e != 1 and a)
    grad, x, weight = drawn(shape, 1), drawn(shape, 2, BF16, 3.0, 20.0), drawn(scale, 3, BF16, 0.5, 1.0)
    hold(backward("adalayernorm_backward", grad, x, weight, axes), grad, x, weight, axes, 2.0**-20)


@pytest.mark.emulate
@pytest.mark.parametrize("dtype", [BF16, HALF, FLOAT])
@pytest.mark.parametrize(
    "op, shape, scale",
    [
        ("layernorm_backward", (5, 96), (1, 96)),
        ("layernorm_backward", (1, 1000), (1000,)),
        ("layernorm_backward", (3, 40), None),
        ("adalayernorm_backward", (3, 5, 96), (3, 1, 96)),
        ("adalayernorm_backward", (1, 1, 96), (1, 1, 96)),
    ],
)
def test_dx_alone_is_a_kernel(op, shape, scale, dtype):
    """Two sums of a row, which no sum over rows stands beside."""
    axes = (len(shape) - 1,)
    grad, x = drawn(shape, 1, dtype), drawn(shape, 2, dtype, 3.0, 20.0)
    weight = None if scale is None else drawn(scale, 3, dtype, 0.5, 1.0)
    got = backward(op, grad, x, weight, axes, "emulator", wanted=("DX",), modes=(heur_mode.OPENSOURCE,))
    hold(got, grad, x, weight, axes, 2.0**-20)


# Programs


def facts(graph) -> RowFacts:
    """What engines are told of the only region of a graph."""
    return next(m for m in match.find(PATTERN, lower(freeze(graph))) if isinstance(m, match.Region)).facts


def gradients(g, wanted=GRADIENTS, scale=(1, 64)):
    grad, x = (g.tensor([5, 64], data_type=BF16, name=name) for name in ("grad", "x"))
    w = g.tensor(scale, data_type=BF16, name="w")
    mean, inverse = (g.tensor([5, 1], data_type=FLOAT, name=name) for name in ("mean", "inverse"))
    made = dict(zip(GRADIENTS, g.layernorm_backward(grad, x, w, mean, inverse), strict=True))
    for name in wanted:
        made[name].set_output().set_name(name).set_data_type(BF16)
    return grad, x, w, mean, inverse


def test_the_program_has_two_sums_in_a_phase_and_the_sums_over_rows():
    g = graphs.new()
    gradients(g)
    program = facts(g).program
    assert [len(program.reduced_after(phase, Join.SUM)) for phase in range(program.last + 1)] == [2, 0]
    assert not program.reductions(Join.MAX)
    assert [s.view.name for s in program.sums] == ["DScale", "DBias"]
    assert [len(s.factors) for s in program.sums] == [2, 1]
    assert all(number in dict(program.summed_in(0)) for number in (0, 1))
    assert [s.view.name for s in program.stores] == ["DX"]
    rows = {view.name: (view.rows, view.columns) for view in program.inputs}
    assert rows == dict(grad=(True, True), x=(True, True), w=(False, True), mean=(True, False), inverse=(True, False))


def test_a_single_row_has_statistics_of_its_own():
    """Also where a node before reads the mean first: it is no scalar of the kernel."""
    g = graphs.new(device="emulator")
    x, grad = (g.tensor([1, 64], data_type=BF16, name=name) for name in ("x", "grad"))
    mean, inverse = (g.tensor([1, 1], data_type=FLOAT, name=name) for name in ("mean", "inverse"))
    apart = g.mul(g.sub(x, mean), inverse)
    dx, *_ = g.layernorm_backward(g.mul(grad, apart), x, None, mean, inverse)
    dx.set_output().set_name("dx").set_data_type(FLOAT)
    program = Planned(g, {}).part.facts.program
    assert not program.scalars
    assert {v.name for v in program.inputs if v.rows and not v.columns} == {"mean", "inverse"}


def test_dx_has_the_steps_of_its_nodes():
    op, nodes = graphs.new(), graphs.new()
    gradients(op, ("DX",))
    grad, x = (nodes.tensor([5, 64], data_type=BF16, name=name) for name in ("grad", "x"))
    w = nodes.tensor([1, 64], data_type=BF16, name="w")
    mean, inverse = (nodes.tensor([5, 1], data_type=FLOAT, name=name) for name in ("mean", "inverse"))

    def average(value):
        return nodes.reduction(value, mode=reduction_mode.AVG).set_dim([5, 1])

    normal = nodes.mul(nodes.sub(x, mean), inverse)
    scaled = nodes.mul(grad, w)
    first, second = average(scaled), average(nodes.mul(scaled, normal))
    dx = nodes.mul(nodes.sub(nodes.sub(scaled, first), nodes.mul(normal, second)), inverse)
    dx.set_output().set_name("DX").set_data_type(BF16)

    def described(graph):
        """Steps with operands by what they are, as inputs are read in another order."""
        program = facts(graph).program
        names = {i: view.name for i, view in enumerate(program.inputs)}

        def of(operand):
            if hasattr(operand, "index"):
                known = type(operand).__name__ == "Load"
                return names[operand.index] if known else told(program.steps[operand.index])
            return repr(operand)

        def told(step):
            kind = step.join if isinstance(step, Reduce) else step.op_name
            return (str(kind), *(of(o) for _, o in step.operands))

        (store,) = program.stores
        return told(program.steps[store.value.index])

    times, (_, apart, (_, *product)), inverse = described(nodes)
    assert described(op) == (times, ("fnma", apart, *product), inverse)  # the product is not rounded


# Forward with a scale of each sample


@pytest.mark.emulate
@pytest.mark.parametrize("device", ["cpu", "emulator"])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(
    "shape, scale",
    [((3, 5, 96), (3, 1, 96)), ((1, 4, 33), (1, 1, 33)), ((2, 1, 40), (2, 1, 40)), ((2, 3, 4, 8), (2, 1, 4, 8))],
)
def test_adalayernorm(shape, scale, biased, device):
    axes = tuple(a for a, e in enumerate(scale) if e != 1 and a)
    given = {"input": drawn(shape, 1, BF16, 3.0, 20.0), "scale": drawn(scale, 2, BF16, 0.5, 1.0)}
    given |= {"bias": drawn(scale, 3)} if biased else {}
    g = graphs.new(device=device)
    tensors = {name: g.tensor_like(t, name=name) for name, t in given.items()}
    made = g.adalayernorm(**tensors, epsilon=EPS, norm_forward_phase=TRAINING, name="norm")
    assert [t.get_name() for t in made] == ["norm::Y", "norm::MEAN", "norm::INV_VARIANCE"]
    for t in made:
        t.set_output().set_data_type(FLOAT)
    g.build([heur_mode.FALLBACK if device == "cpu" else heur_mode.OPENSOURCE])
    n, mean, inverse = normal(given["input"].double().numpy(), axes)
    y = n * given["scale"].double().numpy() + (given["bias"].double().numpy() if biased else 0)
    outputs = {t: torch.empty(t.get_dim()) for t in made}
    g.execute({tensors[name]: t for name, t in given.items()} | outputs)
    for t, wanted in zip(made, (y, mean, inverse), strict=True):
        torch.testing.assert_close(outputs[t].double(), torch.from_numpy(wanted), rtol=2e-6, atol=2e-5)


def test_a_modulation_by_one_plus_scale_is_in_the_same_kernel():
    g = graphs.new(device="emulator")
    x = g.tensor([3, 5, 64], data_type=BF16, name="x")
    shift, scale = (g.tensor([3, 1, 64], data_type=BF16, name=name) for name in ("shift", "scale"))
    y = g.adalayernorm(x, g.add(scale, 1.0), shift, EPS, norm_forward_phase=INFERENCE)[0]
    y.set_output().set_name("y").set_data_type(BF16)
    assert {view.name for view in Planned(g, {}).part.facts.program.inputs} == {"x", "shift", "scale"}


# What is refused


def ada(g, shape=(3, 5, 64), scale=(3, 1, 64), bias=None, **given):
    given = {"epsilon": EPS, "norm_forward_phase": INFERENCE} | given
    bias = None if bias is None else g.tensor(bias, data_type=BF16, name="bias")
    x, w = g.tensor(shape, data_type=BF16, name="x"), g.tensor(scale, data_type=BF16, name="w")
    return g.adalayernorm(x, w, bias, **given)[0].set_output()


@pytest.mark.parametrize(
    "given, said",
    [
        (dict(scale=(1, 1, 64)), "its first extent, that of samples"),
        (dict(scale=(3, 1, 32)), "scale must have the rank of input"),
        (dict(scale=(3, 64)), "scale must have the rank of input"),
        (dict(shape=(64,), scale=(64,)), "2 or more"),
        (dict(bias=(1, 1, 64)), r"bias must have scale's shape \[3, 1, 64\], got \[1, 1, 64\]"),
        (dict(shape=(3, 5, 0), scale=(3, 1, 0)), "no elements along a normalized axis"),
        (dict(norm_forward_phase=norm_forward_phase.NOT_SET), "accepted: INFERENCE, TRAINING"),
    ],
)
def test_refused_scales(given, said):
    g = graphs.new()
    ada(g, **given)
    with pytest.raises(GraphValidationError, match=said):
        g.validate()


@pytest.mark.parametrize("port, shape", [("mean", [1, 1]), ("inv_variance", [5, 64]), ("grad", [5, 32])])
@pytest.mark.parametrize("op", ["layernorm_backward", "adalayernorm_backward"])
def test_refused_inputs_of_backward(op, port, shape):
    g = graphs.new()
    first = 1 if op == "layernorm_backward" else 5
    shapes = dict(grad=[5, 64], input=[5, 64], scale=[first, 64], mean=[5, 1], inv_variance=[5, 1]) | {port: shape}
    tensors = {name: g.tensor(dim, data_type=BF16, name=name) for name, dim in shapes.items()}
    getattr(g, op)(**tensors)[0].set_output()
    with pytest.raises(GraphValidationError, match=f"{port} must have input's"):
        g.validate()


def test_sums_over_the_rows_of_a_sample_are_the_reference_engines():
    g = graphs.new(device="emulator")
    grad, x = (g.tensor([3, 5, 64], data_type=BF16, name=name) for name in ("grad", "x"))
    mean, inverse = (g.tensor([3, 5, 1], data_type=FLOAT, name=name) for name in ("mean", "inverse"))
    w = g.tensor([3, 1, 64], data_type=BF16, name="w")
    for t in g.adalayernorm_backward(grad, x, w, mean, inverse, name="norm"):
        t.set_output().set_data_type(BF16)
    with pytest.raises(GraphNotSupportedError, match=r"norm::DSCALE.* is a sum over the rows of each sample"):
        g.build([heur_mode.OPENSOURCE])
    g.build([heur_mode.A])
    assert not any(isinstance(part.engine, KernelEngine) for part in g._planner.at(0).parts)


@pytest.mark.emulate
@pytest.mark.parametrize("dtype", [BF16, HALF, FLOAT])
@pytest.mark.parametrize(
    "shape, scale", [((5, 96), (1, 96)), ((11, 1000), (1000,)), ((1, 33), (1, 33)), ((2, 40000), (1, 40000))]
)
def test_all_gradients_are_one_kernel(shape, scale, dtype):
    axes = (len(shape) - 1,)
    grad, x, weight = drawn(shape, 1, dtype), drawn(shape, 2, dtype, 3.0, 20.0), drawn(scale, 3, dtype, 0.5, 1.0)
    got = backward("layernorm_backward", grad, x, weight, axes, "emulator", modes=(heur_mode.OPENSOURCE,))
    hold(got, grad, x, weight, axes, 2.0**-20)
