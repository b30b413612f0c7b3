"""Operators that models alone have: norms on both sides of a sum, and norms along channels. One kernel each way, what
it computes, gradients, and what torch asks of operators."""

import itertools

import pytest
import torch
from torch.nn import functional as F

from graphfuse import GraphNotSupportedError
from graphfuse.torch.operators import declared as operators

pytestmark = pytest.mark.torch

EPS, NEXT = 1e-5, 1e-3
HALF, FULL, DOUBLE = torch.bfloat16, torch.float32, torch.float64
LAYOUTS = pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d], ids=str)
UNIT_NORMS = ("unit_norm", "unit_norm_silu", "rounded_unit_norm", "rounded_unit_norm_silu")
FACTOR, SHORT, CHANNELS = 32**0.5, 1e-12, -4


def drawn(*shape, dtype=HALF, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def llama(x, w, eps):
    wide = x.float()
    return w * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


@pytest.mark.emulate
def test_norms_on_both_sides_of_a_sum_are_one_kernel_each_way(kernels):
    given = [t.requires_grad_() for t in (drawn(6, 72), drawn(6, 72, seed=1), drawn(72, seed=2), drawn(72, seed=3))]
    y, total = operators.OF_MODELS["llama_rms_norm_add_norm"].run(*given, EPS, NEXT)
    x, r, w, v = (t.detach() for t in given)
    want = llama(x, w, EPS) + r
    assert torch.equal(total, want)
    torch.testing.assert_close(y, llama(want, v, NEXT), rtol=0.01, atol=0)
    torch.autograd.grad((y, total), given, (x, r))
    assert kernels == {"llama_rms_norm_add_norm_training": [True], "llama_rms_norm_add_norm_backward": [True]}


@pytest.mark.parametrize("kind", ["", "llama_", "gemma_"])
def test_gradients_of_norms_on_both_sides_of_a_sum(kind):
    """With an epsilon for each, and a weight for either."""
    run = operators.OF_MODELS[f"{kind}rms_norm_add_norm"].run
    for weights in itertools.product((True, False), repeat=2):
        shapes = ((3, 6), (3, 6), *((6,) for given in weights if given))
        given = [drawn(*s, dtype=DOUBLE, seed=n).requires_grad_() for n, s in enumerate(shapes)]

        def function(x, residual, *others, weights=weights):
            of = iter(others)
            return run(x, residual, *(next(of) if given else None for given in weights), 0.1, 0.5)

        assert torch.autograd.gradcheck(function, given)


# Norms along channels


def video(layout, dtype=HALF, channels=32, seed=0):
    return drawn(2, channels, 2, 4, 6, dtype=dtype, seed=seed).contiguous(memory_format=layout)


def along_channels(name, x, weight, bias):
    y = F.normalize(x, dim=1, eps=SHORT) * FACTOR
    y = y if weight is None else y * weight.view(-1, 1, 1, 1)
    y = y if bias is None else y + bias.view(-1, 1, 1, 1)
    return F.silu(y) if name.endswith("silu") else y


def unit_norm(name, x, weight=None, bias=None):
    return operators.OF_MODELS[name].run(x, weight, bias, SHORT, FACTOR, CHANNELS)


@pytest.mark.emulate
@LAYOUTS
def test_a_norm_along_channels_is_one_kernel_in_either_layout(layout, kernels):
    x, w, b = video(layout), drawn(32, seed=1), drawn(32, seed=2)
    y = unit_norm("rounded_unit_norm_silu", x, w, b)
    assert kernels["rounded_unit_norm_silu_rows"] == [True]
    assert y.stride() == x.stride()
    want = along_channels("rounded_unit_norm_silu", x, w, b)
    torch.testing.assert_close(y, want, rtol=0.02, atol=0.01)
    assert (y != want).float().mean() < 0.02


@pytest.mark.emulate
@LAYOUTS
@pytest.mark.parametrize("asked", [(0,), (0, 1), (1, 2), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("name", UNIT_NORMS)
def test_its_gradients_are_one_kernel_in_either_layout(name, asked, layout, kernels):
    """Sums over rows are made of copies whose rows lie as kernels sum them."""
    given = [video(layout), drawn(32, seed=1), drawn(32, seed=2)]
    outer, wide = video(torch.contiguous_format, seed=3), [t.double() for t in given]
    for n in asked:
        given[n].requires_grad_(), wide[n].requires_grad_()
    made, want = unit_norm(name, *given), along_channels(name, *wide)
    got = torch.autograd.grad(made, [given[n] for n in asked], outer)
    exact = torch.autograd.grad(want, [wide[n] for n in asked], outer.double())
    assert kernels == {f"{name}_rows_training": [True], f"{name}_rows_backward": [True]}
    for n, a, b in zip(asked, got, exact, strict=True):
        assert a.dtype is HALF and a.shape == given[n].shape
        torch.testing.assert_close(a.double(), b, rtol=0.01, atol=1e-4)
    if asked == (0,):
        assert got[0].stride() == given[0].stride()


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d, None], ids=str)
@pytest.mark.parametrize("weights", [0, 1, 2])
@pytest.mark.parametrize("name", UNIT_NORMS)
def test_gradients_along_channels(name, weights, layout):
    """layout: None for one with gaps."""
    x = drawn(1, 5, 2, 1, 4, dtype=DOUBLE)[..., ::2] if layout is None else drawn(1, 5, 2, 1, 2, dtype=DOUBLE)
    given = [x.contiguous(memory_format=layout) if layout else x]
    given += [drawn(5, dtype=DOUBLE, seed=n) for n in range(weights)]
    assert torch.autograd.gradcheck(
        lambda *tensors: unit_norm(name, *tensors), [t.requires_grad_() for t in given], nondet_tol=1e-12
    )


def test_a_row_that_is_shorter_than_eps_is_divided_by_a_constant():
    x = torch.tensor([[3e-13, 4e-13], [3.0, 4.0]], dtype=DOUBLE).requires_grad_()
    y = operators.OF_MODELS["unit_norm"].run(x, None, None, SHORT, 2.0, -1)
    (got,) = torch.autograd.grad(y, x, torch.ones_like(y))
    (want,) = torch.autograd.grad(F.normalize(x, eps=SHORT) * 2.0, x, torch.ones_like(y))
    torch.testing.assert_close(got, want)


def test_weights_of_another_type_and_one_gradient_of_all():
    """The gradient of a sum is one element, expanded."""
    x, w, b = video(torch.contiguous_format), drawn(32, dtype=FULL, seed=1), drawn(32, dtype=torch.float16, seed=2)
    given = [t.requires_grad_() for t in (x, w, b)]
    wide = [t.detach().double().requires_grad_() for t in given]
    for _ in range(2):  # the second time by fast paths
        got = torch.autograd.grad(unit_norm("unit_norm", *given).sum(), given)
        want = torch.autograd.grad(along_channels("unit_norm", *wide).sum(), wide)
        for a, b, of in zip(got, want, given, strict=True):
            assert a.dtype is of.dtype
            torch.testing.assert_close(a.double(), b, rtol=0.51 * torch.finfo(a.dtype).eps, atol=1e-4)


@pytest.mark.parametrize("name", UNIT_NORMS)
@LAYOUTS
def test_compiled(name, layout):
    torch._dynamo.reset()
    run = lambda *given: unit_norm(name, *given)  # noqa: E731
    fast = torch.compile(run, fullgraph=True, backend="aot_eager")
    given = [video(layout, FULL), drawn(32, dtype=FULL, seed=1), drawn(32, dtype=FULL, seed=2)]
    with torch.no_grad():
        assert torch.equal(fast(*given), run(*given))
    given = [t.requires_grad_() for t in given]
    made, want = fast(*given), run(*given)
    assert torch.equal(made, want) and made.stride() == want.stride()
    outer = video(layout, FULL, seed=3)
    for a, b in zip(*(torch.autograd.grad(y, given, outer) for y in (made, want)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.xdist_group("inductor")
@LAYOUTS
def test_in_a_graph_that_inductor_has_decomposed(layout):
    """Where a pass puts it."""

    def put(graph):
        (sine,) = (node for node in graph.nodes if node.target is torch.ops.aten.sin.default)
        with graph.inserting_before(sine):
            arguments = (sine.args[0], None, None, SHORT, FACTOR, CHANNELS)
            made = graph.call_function(torch.ops.graphfuse.unit_norm.default, arguments)
        made.meta.update(sine.meta)
        sine.replace_all_uses_with(made)
        graph.erase_node(sine)

    torch._dynamo.reset()
    x = video(layout, FULL)
    with torch._inductor.config.patch(post_grad_custom_pre_pass=put, force_disable_caches=True), torch.no_grad():
        made = torch.compile(lambda x: (x * 2).sin() + 1)(x)
    torch.testing.assert_close(made, unit_norm("unit_norm", x * 2) + 1)


def test_exported():
    class Norm(torch.nn.Module):
        def forward(self, x, w):
            return torch.ops.graphfuse.unit_norm(x, w, None, SHORT, FACTOR, CHANNELS)

    x, w = video(torch.contiguous_format, FULL), drawn(32, dtype=FULL)
    program = torch.export.export(Norm(), (x, w))
    torch.testing.assert_close(program.module()(x, w), along_channels("unit_norm", x, w, None))


def test_second_derivatives_are_refused():
    x = video(torch.contiguous_format, FULL).requires_grad_()
    (first,) = torch.autograd.grad(unit_norm("unit_norm", x).sum(), x, create_graph=True)
    with pytest.raises(GraphNotSupportedError, match="graphfuse::unit_norm_rows: its gradient has no derivative"):
        first.square().sum().backward()


def test_opcheck():
    x, w = drawn(2, 16, 3, 4, dtype=FULL), drawn(16, dtype=FULL)
    for name, arguments in (
        ("unit_norm", (x, w, None, SHORT, 4.0, -3)),
        ("unit_norm_silu", (x, w, w, SHORT, 4.0, -3)),
        ("unit_norm_silu", (x.clone().requires_grad_(), w, w, SHORT, 4.0, -3)),
        ("unit_norm_rows_training", (x.movedim(1, -1), w, w, SHORT, 4.0)),
        ("unit_norm_rows_backward", (*(x.movedim(1, -1),) * 2, w, x[:, 0, ..., None], SHORT, 4.0, True, True, True)),
    ):
        operator = getattr(torch.ops.graphfuse, name).default
        assert set(torch.library.opcheck(operator, arguments).values()) == {"SUCCESS"}, name
