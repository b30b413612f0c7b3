"""Adaptive layer norm, alone and after a gated residual sum: values, which gradients are made, how many kernels,
torch's machinery."""

import pytest
import torch

from graphfuse import GraphNotSupportedError, VariantPackError
from graphfuse.torch import ada_layer_norm
from graphfuse.torch.operators.declared import ADD_ADA_LAYER_NORM

pytestmark = pytest.mark.torch

TYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
SHAPES = [  # of x, and of scale and shift
    ((3, 5, 48), (3, 1, 48)),
    ((3, 5, 48), (48,)),
    ((3, 5, 48), (1, 1, 48)),
    ((3, 5, 48), (3, 5, 48)),
    ((2, 3, 4, 17), (2, 1, 1, 17)),
    ((4, 64), (4, 64)),
    ((64,), (64,)),
    ((1, 7, 64), (1, 1, 64)),
    ((3, 0, 16), (3, 1, 16)),
]


EPS = 1e-6


def exact(x, scale, shift):
    apart = x - x.mean(-1, keepdim=True)
    return apart / (apart.square().mean(-1, keepdim=True) + EPS).sqrt() * (1 + scale) + shift


def exact_added(x, residual, scale, shift, gate=1.0):
    """Normalized before it is rounded."""
    total = x * gate + residual
    return exact(total, scale, shift), total


def add_ada_layer_norm(x, residual, scale, shift, gate=None):
    return ADD_ADA_LAYER_NORM.run(x, residual, scale, shift, gate, EPS)


OPERATORS = {  # and how many tensors are of x's shape, and others of scale's
    "ada": (ada_layer_norm, exact, (1, 2)),
    "added": (add_ada_layer_norm, exact_added, (2, 3)),
    "without a gate": (add_ada_layer_norm, exact_added, (2, 2)),
}
each = pytest.mark.parametrize("name", OPERATORS)


def drawn(name, shapes, dtype=torch.float32, seed=0) -> list[torch.Tensor]:
    """x, a residual, scale, shift and gate, as far as there are."""
    source = torch.Generator().manual_seed(seed)
    shapes = [shape for shape, n in zip(shapes, OPERATORS[name][2], strict=True) for _ in range(n)]
    return [torch.randn(s, generator=source, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def results(function, given) -> list[torch.Tensor]:
    made = function(*given)
    return [*made] if isinstance(made, tuple) else [made]


def like(made, seed=7) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(seed)
    return [torch.randn(y.shape, generator=source, dtype=torch.float64).to(y.dtype) for y in made]


def check(name: str, given: list[torch.Tensor], outer=like, of=slice(None)) -> None:
    """outer: the gradients of results. of: which of them are used."""
    run, exactly, _ = OPERATORS[name]
    made, asked = results(run, given), [t for t in given if t.requires_grad]
    wide = [t.detach().double().requires_grad_(t.requires_grad) for t in given]
    exact, wide_asked = results(exactly, wide), [t for t in wide if t.requires_grad]
    assert [y.requires_grad for y in made] == [y.requires_grad for y in exact]
    used, want = ([y for y in ys[of] if y.requires_grad] for ys in (made, exact))
    outer = outer(used)
    got = torch.autograd.grad(used, asked, outer, materialize_grads=True)
    gradients = torch.autograd.grad(want, wide_asked, [g.double() for g in outer], materialize_grads=True)
    for a, b, of in zip((*made, *got), (*exact, *gradients), (*given[: len(made)], *asked), strict=True):
        assert a.dtype is of.dtype and a.shape == of.shape
        unit, scale = torch.finfo(a.dtype).eps, max(1.0, b.abs().max().item()) if b.numel() else 1.0
        torch.testing.assert_close(a.double(), b, rtol=0.51 * unit + 1e-6, atol=1e-5 * scale)


@each
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_values(shapes, dtype, name):
    for seed in range(2):  # the second time by fast paths
        check(name, drawn(name, shapes, dtype, seed))


@each
def test_types_and_strides(name):
    given = drawn(name, ((3, 5, 48), (3, 1, 48)), torch.bfloat16)
    rest = len(given) - OPERATORS[name][2][1]
    scale, shift, *gate = given[rest:]
    others = [scale.detach().float().requires_grad_(), shift.detach().half().requires_grad_(), *gate]
    check(name, [*given[:rest], *others])
    if rest == 2:
        check(name, [given[0], given[1].detach().float().requires_grad_(), *others])
    chunks = torch.randn(3, 6, 48).bfloat16().chunk(6, 1)  # as of an embedding
    check(name, [*given[:rest], *(t.requires_grad_() for t in chunks[2 : 2 + len(others)])])
    check(name, [given[0].detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_(), *given[1:]])
    check(name, given, lambda made: [g[:1, :1, :1].expand(3, 5, 48) for g in like(made)])


@each
@pytest.mark.parametrize("asked", [(0,), (1,), (2,), (0, 2), (1, 2), (3,), (0, 4)], ids=str)
@pytest.mark.parametrize("shapes", SHAPES[:4], ids=str)
def test_gradients_that_nobody_asks_for_are_not_made(shapes, asked, name):
    given = drawn(name, shapes)
    if max(asked) < len(given):
        for n, t in enumerate(given):
            t.requires_grad_(n in asked)
        check(name, given)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("of", [0, 1])
@pytest.mark.parametrize("name", ["added", "without a gate"])
def test_one_of_two_results_used(name, of, dtype):
    check(name, drawn(name, SHAPES[0], dtype), of=slice(of, of + 1))


@each
@pytest.mark.parametrize("shapes", [((2, 3, 6), (2, 1, 6)), ((2, 3, 6), (6,)), ((2, 3, 6), (2, 3, 6))], ids=str)
def test_gradcheck(shapes, name):
    assert torch.autograd.gradcheck(OPERATORS[name][0], drawn(name, shapes, torch.float64))


@pytest.mark.emulate
@each
@pytest.mark.parametrize("shapes", [((3, 9, 72), (72,)), ((3, 9, 72), (3, 1, 72)), ((1, 9, 72), (1, 1, 72))], ids=str)
def test_kernels_on_the_emulator(shapes, name, kernels):
    """One each way, and of several samples another for the sums over the rows of each: of scale, shift and gate."""
    check(name, drawn(name, shapes, torch.bfloat16))
    operator = "ada_layer_norm" if name == "ada" else "add_ada_layer_norm"
    assert kernels[f"{operator}_training"] == [True]
    sums = OPERATORS[name][2][1] if shapes[1][0] == 3 else 0
    assert kernels[f"{operator}_backward"] == [True] * (1 + sums)


@pytest.mark.emulate
def test_a_gated_sum_and_its_norm_of_chunks_of_one_tensor(kernels):
    x, residual, *_ = drawn("added", ((2, 5, 72), (72,)), torch.bfloat16)
    scale, shift, gate = torch.randn(2, 1, 3 * 72).bfloat16().chunk(3, -1)
    with torch.no_grad():
        for gates in ((gate,), ()):
            made = add_ada_layer_norm(x, residual, scale, shift, *gates)
            want = exact_added(*(t.double() for t in (x, residual, scale, shift, *gates)))
            for a, b in zip(made, want, strict=True):
                torch.testing.assert_close(a.double(), b, rtol=0.51 * torch.finfo(a.dtype).eps, atol=1e-5)
    assert kernels["add_ada_layer_norm"] == [True]


@each
def test_opcheck(name):
    operator = "ada_layer_norm" if name == "ada" else "add_ada_layer_norm"
    packet = lambda suffix: getattr(torch.ops.graphfuse, f"{operator}{suffix}").default  # noqa: E731
    given = drawn(name, ((3, 4, 64), (3, 1, 64)))
    rest, without = OPERATORS[name][2][0], [None] * (name == "without a gate")
    plain = [t.detach() for t in given]
    made = [*packet("_training")(*plain, *without, EPS)]
    dy, *dtotal = made[:-2]
    read = [dy, *plain[: rest + 1], *plain[rest + 2 :], *without, *made[-2:], *dtotal, *(True,) * len(given)]
    cases = [("", (*plain, *without, EPS)), ("", (*given, *without, EPS)), ("_training", (*plain, *without, EPS))]
    for suffix, arguments in (*cases, ("_backward", (*read, *(False for _ in without)))):
        assert set(torch.library.opcheck(packet(suffix), arguments).values()) == {"SUCCESS"}


@each
def test_compiled(name):
    torch._dynamo.reset()
    fast = torch.compile(OPERATORS[name][0], fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (5, 7):
        given = drawn(name, ((3, rows, 48), (3, 1, 48)))
        made, want = results(fast, given), results(OPERATORS[name][0], given)
        outer = like(made)
        assert all(map(torch.equal, made, want))
        for a, b in zip(*(torch.autograd.grad(ys, given, outer) for ys in (made, want)), strict=True):
            assert torch.equal(a, b)


def test_second_derivatives_are_refused():
    given = drawn("added", SHAPES[0])
    first = torch.autograd.grad(results(add_ada_layer_norm, given)[0].sum(), given, create_graph=True)
    with pytest.raises(GraphNotSupportedError, match="graphfuse::add_ada_layer_norm: its gradient has no derivative"):
        first[0].square().sum().backward()


def test_shapes_that_do_not_fit_are_refused():
    x, scale, shift = drawn("ada", ((3, 5, 48), (3, 1, 48)))
    with pytest.raises(VariantPackError, match=r"scale has shape \(3, 48\); accepted: \(3, 1, 48\) or \(48,\) or"):
        ada_layer_norm(x, scale[:, 0], shift[:, 0])
    with pytest.raises(VariantPackError, match=r"shift has shape \(48,\); accepted: \(3, 1, 48\)"):
        ada_layer_norm(x, scale, shift[0, 0])
    with pytest.raises(VariantPackError, match=r"gate has shape \(3, 48\); accepted: \(3, 1, 48\)"):
        add_ada_layer_norm(x, x, scale, scale, scale[:, 0])
