"""Queries and keys normalized over all heads and rotated, with gradients: values, kernels, torch's machinery."""

import pytest
import torch

from graphfuse import VariantPackError
from graphfuse import torch as training
from graphfuse.torch import qk_norm_rope_across_heads
from support import oracle

pytestmark = pytest.mark.torch

EPS = 1e-5
NAME = "differentiable_qk_norm_rope_across_heads"
LEAVES = ("q", "k", "q_weight", "k_weight")
NEOX = pytest.mark.parametrize("is_neox", [True, False], ids=["half-split", "interleaved"])


def drawn(tokens=(5,), queries=3, keys=3, columns=64, rotary=64, dtype=torch.float32, weights=True, seed=0):
    """What a call is given, by argument: q and k are parts of one packed tensor."""
    source = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=source, dtype=torch.float64).to(dtype)

    packed = random(*tokens, queries + 2 * keys, columns)
    made = {"q": packed[..., :queries, :], "k": packed[..., queries : queries + keys, :]}
    made |= {f"{x}_weight": random(n * columns) if weights else None for x, n in (("q", queries), ("k", keys))}
    made = {name: None if t is None else t.detach().requires_grad_() for name, t in made.items()}
    made["cos_sin_cache"] = random(13, rotary) if dtype is torch.float64 else random(13, rotary).float()
    return made | {"positions": torch.randint(13, tokens, generator=source)}


def plain(q, k, q_weight, k_weight, cos_sin_cache, positions, is_neox=False):
    """By torch's own operations, in the type that is given."""
    cos, sin = cos_sin_cache.to(q.dtype)[positions].unsqueeze(-2).chunk(2, -1)
    made = []
    for x, weight in ((q, q_weight), (k, k_weight)):
        y = x / (x.square().mean((-2, -1), keepdim=True) + EPS).sqrt()
        y = y if weight is None else y * weight.view(y.shape[-2:])
        made.append(oracle.rotated(y, *(t.expand(*y.shape[:-1], -1) for t in (cos, sin)), not is_neox))
    return tuple(made)


def asked(given):
    return [given[name] for name in LEAVES if given[name] is not None]


def check(given, is_neox=False) -> None:
    made = qk_norm_rope_across_heads(**given, eps=EPS, is_neox=is_neox)
    source = torch.Generator().manual_seed(1)
    outer = [torch.randn(y.shape, generator=source, dtype=torch.float64).to(y.dtype) for y in made]
    got = torch.autograd.grad(made, asked(given), outer)
    exact = {n: t.detach().double().requires_grad_() if n in LEAVES and t is not None else t for n, t in given.items()}
    want = plain(**exact, is_neox=is_neox)
    gradients = torch.autograd.grad(want, asked(exact), [t.double() for t in outer])
    for a, b, of in zip((*made, *got), (*want, *gradients), (given["q"], given["k"], *asked(given)), strict=True):
        assert a.dtype is of.dtype and a.shape == of.shape
        unit, scale = torch.finfo(a.dtype).eps, max(1.0, b.abs().max().item()) if b.numel() else 1.0
        torch.testing.assert_close(a.double(), b, rtol=0.51 * unit + 1e-6, atol=1e-5 * scale)


SHAPES = {
    "tokens": {},
    "samples": dict(tokens=(2, 3)),
    "no dimension for tokens": dict(tokens=()),
    "no tokens": dict(tokens=(0,)),
    "fewer keys": dict(keys=2),
    "one token of one head": dict(tokens=(1,), queries=1, keys=1),
    "a part": dict(columns=32, rotary=16),
    "no kernel": dict(columns=20, rotary=6),
}


@NEOX
@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_values(shape, weights, is_neox):
    for seed in range(2):  # the second time by fast paths
        check(drawn(**shape, weights=weights, seed=seed), is_neox)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_types(dtype):
    check(drawn(dtype=dtype))


@NEOX
@pytest.mark.emulate
@pytest.mark.parametrize("kind", [dict(), dict(rotary=32), dict(weights=False), dict(tokens=(2, 3))], ids=str)
def test_kernels_of_each_forward_and_backward(kind, is_neox, kernels):
    check(drawn(dtype=torch.bfloat16, **kind), is_neox)
    assert kernels == {f"{NAME}_training": [True, True], f"{NAME}_backward": [True, True]}


@pytest.mark.emulate
def test_other_counts_of_tokens_and_heads(kernels):
    for tokens, queries in ((5, 3), (9, 3), (3, 3), (5, 2), (139, 1)):
        check(drawn((tokens,), queries))


@NEOX
def test_gradcheck(is_neox):
    given = drawn((3,), 2, 1, 8, 6, torch.float64)
    angles, leaves = (given["cos_sin_cache"], given["positions"]), [given[name] for name in LEAVES]
    assert torch.autograd.gradcheck(lambda *tensors: qk_norm_rope_across_heads(*tensors, *angles, EPS, is_neox), leaves)


@pytest.mark.parametrize("weights", [True, False])
def test_opcheck(weights):
    def packet(suffix):
        return getattr(torch.ops.graphfuse, f"{NAME}{suffix}").default

    given = drawn(weights=weights)
    leaves = [*given.values(), EPS, False]
    plain = [t.detach() if isinstance(t, torch.Tensor) else t for t in leaves]
    *outs, q_inverse, k_inverse = packet("_training")(*plain)
    assert q_inverse.shape == k_inverse.shape == (5, 1)
    read = (*plain[:6], q_inverse, k_inverse, *outs, False, True, True, *[weights] * 2)
    for suffix, values in (("", leaves), ("", plain), ("_training", plain), ("_backward", read)):
        assert set(torch.library.opcheck(packet(suffix), tuple(values)).values()) == {"SUCCESS"}


def test_a_gradient_that_nobody_asks_for_is_not_made():
    given = drawn()
    given["q_weight"].requires_grad_(False)
    q_out, _ = qk_norm_rope_across_heads(**given, eps=EPS)
    got = torch.autograd.grad(q_out.sum(), [given[n] for n in ("q", "k", "k_weight")], allow_unused=True)
    assert [t is None for t in got] == [False, True, True]


def test_one_compiled_graph_for_all_counts_of_tokens():
    torch._dynamo.reset()
    fast = torch.compile(
        lambda given: qk_norm_rope_across_heads(**given, eps=EPS), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for n, tokens in enumerate((5, 7, 2)):
        got, want = drawn((tokens,), seed=n), drawn((tokens,), seed=n)
        with torch.compiler.set_stance("fail_on_recompile" if n else "default"):
            made = fast(got)
        exact = qk_norm_rope_across_heads(**want, eps=EPS)
        pairs = (
            torch.autograd.grad(sum(y.square().sum() for y in ys), asked(of)) for ys, of in ((made, got), (exact, want))
        )
        for a, b in (*zip(made, exact, strict=True), *zip(*pairs, strict=True)):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_what_is_refused():
    given = drawn()
    assert training.qk_norm_rope_across_heads is qk_norm_rope_across_heads
    with pytest.raises(VariantPackError, match=r"q_weight has shape \(64,\); accepted: \(192,\)"):
        qk_norm_rope_across_heads(**given | {"q_weight": torch.ones(64)})
    with pytest.raises(VariantPackError, match="k_weight is None and q_weight is a tensor"):
        qk_norm_rope_across_heads(**given | {"k_weight": None})
