"""Queries and keys normalized and rotated, with gradients: values, what is made of them, kernels, torch's machinery."""

import contextlib

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from graphfuse import GraphNotSupportedError, VariantPackError, VariantPackTypeError
from graphfuse import torch as training
from graphfuse.torch import QKNormRope, qk_norm_rope
from support import oracle

pytestmark = pytest.mark.torch

EPS = 1e-5
NAME = "differentiable_qk_norm_rope"
LEAVES = ("q", "k", "q_weight", "k_weight")
TYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def drawn(tokens=(5,), queries=3, keys=2, columns=64, rotary=64, dtype=torch.float32, weight="one", seed=0):
    """What a call is given, by argument: q and k are slices of one packed tensor."""
    source = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=source, dtype=torch.float64).to(dtype)

    packed = random(*tokens, queries + 2 * keys, columns)
    made = {"q": packed[..., :queries, :], "k": packed[..., queries : queries + keys, :]}
    for name, heads in (("q", queries), ("k", keys)):
        shape = {"one": (columns,), "heads": (heads, columns), "none": None}[weight]
        made[f"{name}_weight"] = None if shape is None else random(*shape)
    made = {name: None if t is None else t.detach().requires_grad_() for name, t in made.items()}
    table = torch.float64 if dtype is torch.float64 else torch.float32
    made["cos_sin_cache"] = torch.randn(13, rotary, generator=source, dtype=torch.float64).to(table)
    return made | {"positions": torch.randint(13, tokens, generator=source)}


def plain(q, k, q_weight, k_weight, cos_sin_cache, positions, is_neox=True):
    """By torch's own operations, token by token and head by head at once, in the type that is given."""
    cos, sin = cos_sin_cache.to(q.dtype)[positions.long()].unsqueeze(-2).chunk(2, -1)
    made = []
    for x, weight in ((q, q_weight), (k, k_weight)):
        y = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()
        y = y if weight is None else y * weight
        angles = (t.expand(*y.shape[:-1], -1) for t in (cos, sin))
        made.append(oracle.rotated(y, *angles, not is_neox))
    return tuple(made)


def asked(given):
    return [given[name] for name in LEAVES if given[name] is not None and given[name].requires_grad]


def wide(given):
    """The same in float64, as leaves."""
    return {
        name: t.detach().double().requires_grad_(t.requires_grad) if name in LEAVES and t is not None else t
        for name, t in given.items()
    }


def outers(made, seed=1):
    source = torch.Generator().manual_seed(seed)
    return [torch.randn(y.shape, generator=source, dtype=torch.float64).to(y.dtype) for y in made]


def check(given, is_neox=True, outer=None) -> None:
    made = qk_norm_rope(**given, eps=EPS, is_neox=is_neox)
    outer = outers(made) if outer is None else outer
    got = torch.autograd.grad(made, asked(given), outer)
    exact = wide(given)
    want = plain(**exact, is_neox=is_neox)
    gradients = torch.autograd.grad(want, asked(exact), [t.double() for t in outer])
    for a, b, of in zip((*made, *got), (*want, *gradients), (given["q"], given["k"], *asked(given)), strict=True):
        assert a.dtype is of.dtype and a.shape == of.shape
        unit, scale = torch.finfo(a.dtype).eps, max(1.0, b.abs().max().item()) if b.numel() else 1.0
        torch.testing.assert_close(a.double(), b, rtol=0.51 * unit + 1e-6, atol=1e-5 * scale)


SHAPES = {
    "tokens": {},
    "batch": dict(tokens=(2, 3)),
    "no dimension for tokens": dict(tokens=()),
    "no tokens": dict(tokens=(0,)),
    "one token of one head": dict(tokens=(1,), queries=1, keys=1),
    "a part": dict(columns=32, rotary=16),
    "no kernel": dict(columns=20, rotary=6),
}


@pytest.mark.parametrize("is_neox", [True, False], ids=["half-split", "interleaved"])
@pytest.mark.parametrize("weight", ["one", "heads", "none"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_values(shape, weight, is_neox):
    for seed in range(2):  # the second time by fast paths
        check(drawn(**shape, weight=weight, seed=seed), is_neox)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_types(dtype):
    given = drawn(dtype=dtype)
    check(given)
    other = torch.float32 if dtype is torch.bfloat16 else torch.bfloat16
    weights = {name: given[name].detach().to(other).requires_grad_() for name in ("q_weight", "k_weight")}
    check(given | weights | {"positions": given["positions"].int()})
    check(given | {"cos_sin_cache": given["cos_sin_cache"].bfloat16()})


def test_strides():
    given = drawn((2, 3))
    made = qk_norm_rope(**given, eps=EPS)
    check(given, outer=[torch.ones(()).expand(y.shape) for y in made])
    check(given, outer=[t.mT.contiguous().mT for t in outers(made)])
    x = given["q"].detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    check(given | {"q": x})


@pytest.mark.emulate
@pytest.mark.parametrize("kind", [dict(), dict(rotary=32), dict(weight="none")], ids=str)
@pytest.mark.parametrize("is_neox", [True, False], ids=["half-split", "interleaved"])
def test_a_kernel_for_both_and_one_for_the_gradients_of_each(kind, is_neox, kernels):
    check(drawn((7,), dtype=torch.bfloat16, **kind), is_neox)
    assert kernels == {f"{NAME}_training": [True], f"{NAME}_backward": [True, True]}


@pytest.mark.emulate
def test_other_counts_of_tokens_and_heads(kernels):
    """By plans for other numbers of rows than they were made for."""
    for tokens, queries in ((5, 3), (9, 3), (3, 3), (5, 2)):
        check(drawn((tokens,), queries))


class Backwards(torch.utils._python_dispatch.TorchDispatchMode):
    """What backward is asked for: the gradients of q and k, and those of their weights."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if str(func) == f"graphfuse.{NAME}_backward.default":
            self.asked.append(args[-4:])
        return func(*args, **(kwargs or {}))


ASKED = {
    ("q",): (True, False, False, False),
    ("k_weight",): (False, False, False, True),
    ("q", "q_weight"): (True, False, True, False),
    ("q", "k_weight"): (True, False, False, True),
}


@pytest.mark.parametrize("names", ASKED, ids=str)
def test_gradients_that_nobody_asks_for_are_not_made(names):
    given = drawn()
    for name in LEAVES:
        given[name].requires_grad_(name in names)
    exact = wide(given)
    made, want = qk_norm_rope(**given, eps=EPS), plain(**exact)
    assert [y.requires_grad for y in made] == [any(name[0] == of for name in names) for of in "qk"]
    used = [n for n, y in enumerate(made) if y.requires_grad]
    outer = [outers(made)[n] for n in used]
    with Backwards() as heard:
        got = torch.autograd.grad([made[n] for n in used], asked(given), outer)
    assert heard.asked == [ASKED[names]]
    gradients = torch.autograd.grad([want[n] for n in used], asked(exact), [t.double() for t in outer])
    for a, b in zip(got, gradients, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


def test_a_result_that_nobody_uses_has_no_backward():
    given = drawn()
    q_out, _ = qk_norm_rope(**given, eps=EPS)
    got = torch.autograd.grad(q_out.sum(), asked(given), allow_unused=True)
    assert [t is None for t in got] == [False, True, False, True]


def test_angles_have_no_gradient():
    given = drawn()
    cache = given["cos_sin_cache"].requires_grad_()
    sum(y.sum() for y in qk_norm_rope(**given, eps=EPS)).backward()
    assert cache.grad is None and given["q"].grad is not None
    for name in LEAVES:
        given[name].requires_grad_(False)
    assert not any(y.requires_grad for y in qk_norm_rope(**given, eps=EPS))


def test_a_position_that_the_cache_does_not_have():
    given = drawn(columns=32, rotary=16)
    given["positions"][1] = 13
    made = qk_norm_rope(**given, eps=EPS)
    dq, dweight = torch.autograd.grad(made[0], (given["q"], given["q_weight"]), outers(made)[0])
    assert dq[1].isnan().all() and not dq[[0, 2, 3, 4]].isnan().any()
    assert dweight[:16].isnan().all() and not dweight[16:].isnan().any()


@pytest.mark.parametrize("is_neox", [True, False], ids=["half-split", "interleaved"])
@pytest.mark.parametrize("weight", ["one", "heads", "none"])
def test_gradcheck(weight, is_neox):
    given = drawn((3,), 2, 1, 8, 6, torch.float64, weight)
    angles = given["cos_sin_cache"], given["positions"]
    leaves = [given[name] for name in LEAVES]
    assert torch.autograd.gradcheck(lambda *tensors: qk_norm_rope(*tensors, *angles, EPS, is_neox), leaves)


@pytest.mark.parametrize("weight", ["one", "none"])
def test_opcheck(weight):
    def packet(suffix):
        return getattr(torch.ops.graphfuse, f"{NAME}{suffix}").default

    given = drawn(weight=weight)
    leaves = [*given.values(), EPS, False]
    plain = [t.detach() if isinstance(t, torch.Tensor) else t for t in leaves]
    *outs, q_inverse, k_inverse = packet("_training")(*plain)
    read = (*plain[:6], q_inverse, k_inverse, *outs, False, True, True, *[weight == "one"] * 2)
    for suffix, values in (("", leaves), ("", plain), ("_training", plain), ("_backward", read)):
        assert set(torch.library.opcheck(packet(suffix), tuple(values)).values()) == {"SUCCESS"}


def test_one_compiled_graph_for_all_counts_of_tokens():
    torch._dynamo.reset()

    def around(given):
        given = given | {name: given[name] * 2 for name in ("q", "k")}
        return tuple(y.sin() for y in qk_norm_rope(**given, eps=EPS))

    fast = torch.compile(around, fullgraph=True, dynamic=True, backend="aot_eager")
    for n, tokens in enumerate((5, 7, 3, 2)):
        got, want = drawn((tokens,), seed=n), drawn((tokens,), seed=n)
        with torch.compiler.set_stance("fail_on_recompile" if n else "default"):
            made = fast(got)
        exact = around(want)
        for a, b in zip(made, exact, strict=True):
            torch.testing.assert_close(a, b)
        pairs = (torch.autograd.grad(ys, asked(of), outers(exact)) for ys, of in ((made, got), (exact, want)))
        for a, b in zip(*pairs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_autocast_changes_nothing():
    given = drawn(dtype=torch.bfloat16)
    want = qk_norm_rope(**given, eps=EPS)
    with torch.autocast("cpu", torch.bfloat16):
        made = qk_norm_rope(**given, eps=EPS)
    assert all(torch.equal(a, b) and a.dtype is b.dtype for a, b in zip(made, want, strict=True))
    got = (torch.autograd.grad(ys, asked(given), outers(want)) for ys in (made, want))
    assert all(torch.equal(a, b) for a, b in zip(*got, strict=True))


@pytest.mark.parametrize("device", ["fake", "meta"])
def test_tensors_without_memory(device):
    given = drawn((4,), dtype=torch.bfloat16)
    want = qk_norm_rope(**given, eps=EPS)
    with FakeTensorMode() if device == "fake" else contextlib.nullcontext() as mode:
        empty = {
            name: mode.from_tensor(t) if mode else t.detach().to("meta").requires_grad_(t.requires_grad)
            for name, t in given.items()
        }
        made = qk_norm_rope(**empty, eps=EPS)
        for a, b in zip(made, want, strict=True):
            assert (a.shape, a.dtype, a.stride(), a.requires_grad) == (b.shape, b.dtype, b.stride(), True)
        torch.autograd.backward(made, [torch.empty_like(y) for y in made])
    for name in LEAVES:
        assert (empty[name].grad.shape, empty[name].grad.dtype) == (given[name].shape, given[name].dtype)


A = drawn()
REFUSED = {
    "one weight": (
        dict(q_weight=None),
        VariantPackError,
        "q_weight is None and k_weight is a tensor; accepted: tensor",
    ),
    "the other": (dict(k_weight=None), VariantPackError, "k_weight is None and q_weight is a tensor"),
    "a weight": (dict(k_weight=torch.ones(3, 64)), VariantPackError, r"k_weight has shape \(3, 64\); accepted: \(64"),
    "positions": (
        dict(positions=torch.ones(5)),
        VariantPackTypeError,
        "positions is of torch.float32; accepted: int64",
    ),
    "a wide table": (
        dict(cos_sin_cache=torch.ones(13, 66)),
        VariantPackError,
        "even and 2 to 64, the last dimension of",
    ),
    "is_neox": (dict(is_neox=None), VariantPackTypeError, "is_neox"),
    "eps": (
        dict(eps=torch.tensor(EPS, requires_grad=True)),
        VariantPackTypeError,
        "eps is a tensor that requires a gr",
    ),
}


@pytest.mark.parametrize("change, error, said", REFUSED.values(), ids=REFUSED)
def test_what_is_refused(change, error, said):
    with pytest.raises(error, match=said):
        qk_norm_rope(**A | change)


def test_other_derivatives_are_refused():
    given = drawn()
    q, others = given.pop("q"), {name: t.detach() for name, t in given.items()}
    (made,) = torch.autograd.grad(qk_norm_rope(q, **others)[0].sum(), q, create_graph=True)
    with pytest.raises(GraphNotSupportedError, match=f"{NAME}: its gradient has no derivative"):
        made.sum().backward()
    with pytest.raises(GraphNotSupportedError, match="differentiated by torch.func"):
        torch.func.grad(lambda q: qk_norm_rope(q, **others)[0].sum())(q.detach())
    with pytest.raises(GraphNotSupportedError, match="no forward-mode derivative"):
        torch.func.jvp(lambda q: qk_norm_rope(q, **others)[0], (q.detach(),), (torch.ones_like(q),))


def test_the_module():
    given = drawn()
    module = QKNormRope(64, eps=EPS, is_neox=False)
    assert training.QKNormRope is QKNormRope and [*module.state_dict()] == ["q_weight", "k_weight"]
    assert all(torch.equal(weight, torch.ones(64)) for weight in module.parameters())
    with torch.no_grad():
        module.q_weight.copy_(given["q_weight"]), module.k_weight.copy_(given["k_weight"])
    made = module(given["q"], given["k"], given["cos_sin_cache"], given["positions"])
    want = qk_norm_rope(**given, eps=EPS, is_neox=False)
    assert all(torch.equal(a, b) for a, b in zip(made, want, strict=True))
    sum(y.square().sum() for y in made).backward()
    sum(y.square().sum() for y in want).backward()
    for name in ("q_weight", "k_weight"):
        assert torch.equal(getattr(module, name).grad, given[name].grad)
    bare = QKNormRope(64, elementwise_affine=False, device="meta", dtype=torch.bfloat16)
    assert not bare.state_dict() and "64, eps=1e-06, is_neox=True, elementwise_affine=False" in repr(bare)
    assert QKNormRope(64, device="meta", dtype=torch.bfloat16).q_weight.dtype is torch.bfloat16
