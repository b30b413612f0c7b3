"""Adaptive layer norm in graphs that are compiled, with the gated sum before it. Values are held against float64, from
which they may differ as much as torch's own do."""

import pytest
import torch
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from graphfuse.benchmarks.programs.model_blocks import DiTBlock, Stack
from graphfuse.torch import compile_report, fuse
from graphfuse.torch.compile_backend.compiled_graphs import replace_in
from support.traces import recorded

pytestmark = [pytest.mark.usefixtures("nothing_compiled"), pytest.mark.torch]
HALF, FULL = torch.bfloat16, torch.float32
S, T, W = 2, 5, 64
ADA, GATED, SUMMED = "layernorm, add, mul", "mul, add, layernorm", "add, layernorm, mul"
"""Operations of a norm, of that with a gated sum before it, and with a sum."""


def model(dtype):
    torch.manual_seed(0)
    return Stack([DiTBlock(W, 2), DiTBlock(W, 2)]).to(dtype)


def drawn(*shape, dtype=HALF, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def conditioned(dtype):
    return drawn(S, T, W, dtype=dtype), drawn(S, W, dtype=dtype, seed=1)


def run(function):
    return torch.compile(function, backend="graphfuse", fullgraph=True, options={"then": "aot_eager"})


def entries():
    return [(e.name, e.kind, e.became, e.why) for e in compile_report().graphs[-1].entries]


def is_as_exact(got, want, wide, slack=1.1):
    """Whether `got` is as near to exact values as torch's own."""
    assert got.dtype is want.dtype and got.shape == want.shape
    return (got - wide).norm() <= slack * (want - wide).norm() + 1e-12


def called(graph):
    return [str(n.target).split(".")[1] for n in graph.graph.nodes if "graphfuse" in str(n.target)]


# The blocks of a model

FOUND = [
    ("blocks.0.norm1", "LayerNorm", "region", ADA),
    ("blocks.0.norm2", "LayerNorm", "region", GATED),
    ("blocks.1.norm1", "LayerNorm", "region", GATED),  # of the sum that the block before returns
    ("blocks.1.norm2", "LayerNorm", "region", GATED),
]


@pytest.mark.parametrize("dtype", [HALF, FULL], ids=str)
def test_blocks_in_inference(dtype):
    own, given = model(dtype), conditioned(dtype)
    with torch.no_grad():
        got, want = run(own)(*given), own(*given)
        wide = own.double()(*(t.double() for t in given))
    assert is_as_exact(got, want, wide)
    assert entries() == FOUND


@pytest.mark.parametrize("dtype", [HALF, FULL], ids=str)
def test_blocks_in_training(dtype):
    own, given = model(dtype), [t.requires_grad_() for t in conditioned(dtype)]
    outer = drawn(S, T, W, dtype=dtype, seed=2)

    def differentiated(function, given, outer):
        made = function(*given)
        return made.detach(), *torch.autograd.grad(made, [*given, *own.parameters()], outer)

    got, want = differentiated(run(own), given, outer), differentiated(own, given, outer)
    own.double()
    wide = differentiated(own, [t.detach().double().requires_grad_() for t in given], outer.double())
    assert entries() == FOUND
    assert all(is_as_exact(*three, slack=1.5) for three in zip(got, want, wide, strict=True))


@pytest.mark.parametrize("dtype", [HALF, FULL], ids=str)
@pytest.mark.parametrize("how", ["aten", "dynamo"])
def test_one_operator_is_in_the_graph_of_each_site_and_reads_chunks(how, dtype):
    with torch.no_grad():
        graph, _ = recorded(model(dtype), conditioned(dtype), how)
        replace_in(graph, declines=False)
    names = [str(n.target) for n in graph.graph.nodes]
    assert called(graph) == ["region"] * 4
    assert not any("layer_norm" in name for name in names)
    assert not any(word in name for name in names for word in ("clone", "contiguous", "copy"))
    for node in graph.graph.nodes:
        if "graphfuse" in str(node.target):
            of_samples = [t for t in node.args[0] if t.meta.get("val", t.meta.get("example_value")).shape[1] == 1]
            assert len(of_samples) >= 2
            assert all(
                any(word in str(t.all_input_nodes) for word in ("chunk", "split", "getitem")) for t in of_samples
            )


def test_in_the_operations_that_inductor_passes_see():
    own, given = model(HALF), conditioned(HALF)
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        given = map(mode.from_tensor, given)
        graph = make_fx(own, decomposition_table=select_decomp_table())(*given)
        replace_in(graph, declines=False)
    assert called(graph) == ["region"] * 4
    assert not any("rsqrt" in str(n.target) for n in graph.graph.nodes)


def test_autocast():
    """1 + scale has half the width of the norm's result."""
    own, given = model(FULL), conditioned(FULL)
    with torch.autocast("cpu", HALF):
        got, want = run(own)(*given), own(*given)
    assert [e[2] for e in entries()] == ["region"] * 4
    assert is_as_exact(got, want, own.double()(*(t.double() for t in given)))


def test_extents_that_vary():
    own = model(FULL)
    function = run(own)
    with torch.no_grad():
        for samples, tokens in ((2, 5), (3, 7)):
            x, c = drawn(samples, tokens, W, dtype=FULL), drawn(samples, W, dtype=FULL)
            for t, dims in ((x, (0, 1)), (c, 0)):
                torch._dynamo.mark_dynamic(t, dims)
            torch.testing.assert_close(function(x, c), own(x, c), rtol=1e-4, atol=1e-5)
    assert len(compile_report().graphs) == 1
    assert [e[2:] for e in entries()] == [e[2:] for e in FOUND]


def test_models_that_are_fused_in_place_round_as_before():
    own, given = model(HALF), conditioned(HALF)
    with torch.no_grad():
        want = own(*given)
        assert fuse(own).replaced
        torch.testing.assert_close(own(*given), want, rtol=2e-2, atol=2e-2)


# Spellings. x, r: full tensors; g, s, t: gate, scale and shift, of samples.


def norm(h):
    return F.layer_norm(h, (W,), eps=1e-6)


def views_behind_the_sum(x, r, g, s, t):
    """As Flux."""
    h = r + g.unsqueeze(1) * x
    return norm(h) * (1 + s[:, None]) + t[:, None], h


def one_added_first(x, r, g, s, t):
    h = x * g[:, None] + r
    return t[:, None] + (s + 1)[:, None] * norm(h), h


def in_float32(x, r, g, s, t):
    """As WAN: each line rounded once."""
    g, s, t = (v.unsqueeze(1).float() for v in (g, s, t))
    h = (r.float() + x * g).type_as(r)
    return (norm(h.float()) * (1 + s) + t).type_as(h), h


def without_a_gate(x, r, g, s, t):
    h = r + x
    return norm(h) * (1 + s[:, None]) + t[:, None], h


def product_read(x, r, g, s, t):
    product = g[:, None] * x
    h = r + product
    return norm(h) * (1 + s[:, None]) + t[:, None], h, product


def gate_of_columns(x, r, g, s, t):
    """A gate that is no sample's is the other kernel's matter."""
    h = r + g[0] * x
    return norm(h) * (1 + s[:, None]) + t[:, None], h


def scale_of_the_sum(x, r, g, s, t):
    h = r + g[:, None] * x
    return norm(h) * (1 + h[:, :1]) + t[:, None], h


def gate_changed_behind(x, r, g, s, t):
    h = r + g[:, None] * x
    y = norm(h) * (1 + s[:, None]) + t[:, None]
    g.add_(1)
    return y, h


def gate_changed_between(x, r, g, s, t):
    h = r + g[:, None] * x
    g.add_(1)
    return norm(h) * (1 + s[:, None]) + t[:, None], h


def gate_set_between(x, r, g, s, t):
    h = r + g[:, None] * x
    g[0] = 1
    return norm(h) * (1 + s[:, None]) + t[:, None], h


def shift_changed_between(x, r, g, s, t):
    gate, shift = g[:, None], t[:, None]
    h = r + gate * x
    y = norm(h) * (1 + s[:, None])
    t.add_(1)
    return y + shift, h


def two_norms_of_a_sum(x, r, g, s, t):
    h = r + g[:, None] * x
    return norm(h) * (1 + s[:, None]) + t[:, None], norm(h) * (1 + t[:, None]) + s[:, None], h


def of_integers(x, r, g, s, t):
    h = r + g[:, None].round().int() * x
    return norm(h) * (1 + s[:, None].round().int()) + t[:, None], h


def without_a_shift(x, r, g, s, t):
    return (norm(x) * (1 + s[:, None]),)


def of_each_token(x, r, g, s, t):
    return (norm(x) * (1 + s[:1].expand(T, W)) + t[:, None],)


def norm_read_twice(x, r, g, s, t):
    y = norm(x)
    return y * (1 + s[:, None]) + t[:, None], y


SPELLINGS = [
    (views_behind_the_sum, GATED),
    (one_added_first, GATED),
    (in_float32, GATED),
    (without_a_gate, SUMMED),
    (product_read, GATED),
    (gate_of_columns, GATED),
    (scale_of_the_sum, ADA),
    (gate_changed_behind, GATED),
    (gate_changed_between, ADA),
    (gate_set_between, ADA),
    (shift_changed_between, GATED),
    (two_norms_of_a_sum, GATED),
    (of_integers, "add, layernorm"),
    (without_a_shift, ADA),
    (of_each_token, ADA),
    (norm_read_twice, ADA),
]


@pytest.mark.parametrize("how", ["aten", "dynamo"])
@pytest.mark.parametrize(("function", "found"), SPELLINGS)
def test_spellings(function, found, how):
    def given():
        full = [drawn(S, T, W, seed=n) for n in range(2)]
        return [*full, *drawn(S, 3 * W, seed=2).chunk(3, -1)]

    tensors = given()
    with torch.no_grad():
        graph, arguments = recorded(function, tensors, how)
        order = [next(i for i, t in enumerate(tensors) if t is a) for a in arguments]
        assert [(e.became, e.why) for e in replace_in(graph, declines=False)] == [("region", found)]
        assert called(graph) == ["region"]
        assert not any("layer_norm" in str(n.target) for n in graph.graph.nodes)
        made = graph(*(given()[i] for i in order))
        want, wide = function(*given()), function(*(t.double() for t in given()))
    for three in zip(made, want, wide, strict=True):
        assert is_as_exact(*three)


def test_gradients_of_a_gated_sum():
    given = [drawn(S, T, W, dtype=FULL, seed=n) for n in range(2)]
    given += drawn(S, 3 * W, dtype=FULL, seed=2).chunk(3, -1)
    given = [t.requires_grad_() for t in given]
    got, want = run(views_behind_the_sum)(*given), views_behind_the_sum(*given)
    assert [e[2:] for e in entries()] == [("region", GATED)]
    grads = [torch.autograd.grad(y.square().sum() + h.sum(), given) for y, h in (got, want)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
