"""Queries and keys that are normalized and rotated, in graphs: what is found, what is left and why, and values."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from graphfuse.torch import compile_report
from graphfuse.torch.compile_backend import rotated, rotation
from graphfuse.torch.compile_backend.compiled import replace_in
from graphfuse.torch.fusion import surroundings
from support.traces import recorded

pytestmark = [pytest.mark.usefixtures("nothing_compiled"), pytest.mark.torch]
EPS = 1e-5
HALF, FULL = torch.bfloat16, torch.float32
B, T, D = 2, 5, 32


def llama(x, w):
    wide = x.float()
    return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def gemma(x, w):
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS) * (1.0 + w.float())).to(x.dtype)


def turned(x):
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)


def tables(angles, kind):
    both = torch.cat((angles, angles), dim=-1)
    return (both.cos() * 1.5).to(kind), (both.sin() * 1.5).to(kind)


def rotate(q, k, cos, sin, axis=1):
    cos, sin = cos.unsqueeze(axis), sin.unsqueeze(axis)
    return q * cos + turned(q) * sin, k * cos + turned(k) * sin


def norm_first(q, k, v, w, angles):
    """As Qwen3: norms of (batch, tokens, heads, columns)."""
    q, k = (llama(x, s).transpose(1, 2) for x, s in ((q, v), (k, w)))
    return rotate(q, k, *tables(angles, q.dtype))


def transposed_first(q, k, v, w, angles):
    """As Gemma-3."""
    q, k = (gemma(x.transpose(1, 2), s) for x, s in ((q, v), (k, w)))
    return rotate(q, k, *tables(angles, q.dtype))


def in_place(q, k, v, w, angles):
    """Heads stay behind tokens."""
    return rotate(llama(q, v), llama(k, w), *tables(angles, q.dtype), axis=2)


def two_layers(q, k, v, w, angles):
    cos, sin = tables(angles, q.dtype)
    one = rotate(llama(q, v), llama(k, w), cos, sin, axis=2)
    two = rotate(llama(one[0] * 2, v), llama(one[1] * 2, w), cos, sin, axis=2)
    return (*one, *two)


def given(dtype=HALF, samples=1, columns=D, heads=(4, 2)):
    g = torch.Generator().manual_seed(0)
    q, k = (torch.randn(B, T, n, columns, generator=g).to(dtype) for n in heads)
    v, w = (torch.randn(columns, generator=g).to(dtype) for _ in range(2))
    return q, k, v, w, torch.randn(samples, T, columns // 2, generator=g) * 3


def pairs(graph):
    return rotation.pairs(graph.graph, surroundings.regions(graph.graph))


def called(graph):
    return [n for n in graph.graph.nodes if "graphfuse" in str(n.target)]


@pytest.mark.parametrize("how", ["aten", "dynamo"])
@pytest.mark.parametrize("samples", [1, B])
@pytest.mark.parametrize("function", [norm_first, transposed_first, in_place, two_layers])
def test_found(function, samples, how):
    """No further from exact values than torch, which rounds more often; layouts are torch's."""
    tensors = given(samples=samples)
    graph, arguments = recorded(function, tensors, how)
    found, left = pairs(graph)
    assert len(found) == (2 if function is two_layers else 1) and not left
    rotated.replace(graph, found)
    assert [str(n.target) for n in called(graph)] == ["graphfuse.differentiable_qk_norm_rope.default"] * len(found)
    assert sum("arange" in str(n.target) for n in graph.graph.nodes) == 1  # one table for all
    with torch.no_grad():
        exact = function(*(t.double() for t in tensors))
    for got, want, wide in zip(graph(*arguments), function(*tensors), exact, strict=True):
        assert got.dtype is want.dtype and got.shape == want.shape and got.stride() == want.stride()
        assert (got - wide).norm() <= 1.05 * (want - wide).norm()


def test_float32():
    tensors = given(FULL)
    graph, arguments = recorded(norm_first, tensors)
    rotated.replace(graph, pairs(graph)[0])
    for got, want in zip(graph(*arguments), norm_first(*tensors), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def other_halves(q, k, v, w, angles):
    both = torch.cat((angles, angles + 1), dim=-1)
    return rotate(llama(q, v), llama(k, w), both.cos().to(q.dtype), both.sin().to(q.dtype), axis=2)


def from_outside(q, k, v, w, cos):
    return rotate(llama(q, v), llama(k, w), cos, cos, axis=2)


def read_elsewhere(q, k, v, w, angles):
    q = llama(q, v)
    return (*rotate(q, llama(k, w), *tables(angles, q.dtype), axis=2), q.sum())


def over_all_heads(q, k, v, w, angles):
    """As OLMo-2."""
    q, k = (llama(x.flatten(2), 1.5).view(x.shape) for x in (q, k))
    return rotate(q, k, *tables(angles, q.dtype), axis=2)


def backward(q, k, v, w, angles):
    """Turned the other way round: no rotation of this kind."""
    q, k = llama(q, v), llama(k, w)
    cos, sin = (t.unsqueeze(2) for t in tables(angles, q.dtype))
    return tuple(x * cos + torch.cat((x[..., D // 2 :], -x[..., : D // 2]), -1) * sin for x in (q, k))


def changed_in_place(q, k, v, w, angles):
    cos, sin = tables(angles, q.dtype)
    made = rotate(llama(q, v), llama(k, w), cos, sin, axis=2)
    cos.add_(1)
    return (*made, cos)


def angles_changed_in_place(q, k, v, w, angles):
    both = torch.cat((angles, angles), dim=-1)
    both[..., :4] = 1
    return rotate(llama(q, v), llama(k, w), both.cos().to(q.dtype), both.sin().to(q.dtype), axis=2)


def of_different_norms(q, k, v, w, angles):
    return rotate(llama(q, v), gemma(k, w), *tables(angles, q.dtype), axis=2)


LEFT = [
    (other_halves, "it is not in the graph that both halves of a row have the same cosines and sines"),
    (read_elsewhere, "it is read by more than the rotation"),
    (over_all_heads, "what it normalizes is no row of those that are rotated"),
    (of_different_norms, "no keys or queries are rotated with it"),
    (changed_in_place, "its cosines or sines are changed in place"),
    (angles_changed_in_place, "its cosines or sines are changed in place"),
    (backward, None),
]


@pytest.mark.parametrize("how", ["aten", "dynamo"])
@pytest.mark.parametrize(("function", "why"), LEFT)
def test_left(function, why, how):
    graph, _ = recorded(function, given(), how)
    found, left = pairs(graph)
    assert found == []
    assert why in left.values() if why else not left


def test_cosines_that_are_given_may_differ():
    q, k, v, w, _ = given()
    graph, _ = recorded(from_outside, (q, k, v, w, torch.ones(1, T, D).to(HALF)))
    found, left = pairs(graph)
    assert not found and set(left.values()) == {LEFT[0][1]}


def test_heads_that_no_kernel_takes():
    graph = recorded(norm_first, given(columns=24))[0]
    found, left = pairs(graph)
    assert not found and set(left.values()) == {"heads have 24 columns; accepted: a multiple of 16, at most 512"}


def test_gradients():
    tensors = [t.requires_grad_(t.dim() != 3) for t in given(FULL)]
    run = torch.compile(norm_first, backend="graphfuse", options={"then": "aot_eager"}, fullgraph=True)
    got, want = run(*tensors), norm_first(*tensors)
    grads = [torch.autograd.grad(sum(y.square().sum() for y in made), tensors[:4]) for made in (got, want)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    entries = compile_report().graphs[-1].entries
    assert [(e.became, e.why.partition(" with ")[0]) for e in entries] == [("qk_norm_rope", "rotated,")] * 2


def test_learned_angles_keep_their_gradient():
    tensors = given(FULL)
    angles = tensors[-1].requires_grad_()
    run = torch.compile(norm_first, backend="graphfuse", options={"then": "aot_eager"}, fullgraph=True)
    got, want = (torch.autograd.grad(sum(y.sum() for y in f(*tensors)), angles)[0] for f in (run, norm_first))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert all("have gradients" in e.why for e in compile_report().graphs[-1].entries)


@pytest.mark.parametrize("samples", [1, B])
def test_tokens_that_vary(samples):
    run = torch.compile(norm_first, backend="graphfuse", options={"then": "aot_eager"}, fullgraph=True)
    for tokens in (T, 3):
        q, k, v, w, angles = given(FULL, samples)
        q, k, angles = (t[:, :tokens].contiguous() for t in (q, k, angles))
        tensors = q, k, v, w, angles
        for t in (q, k, angles):
            torch._dynamo.mark_dynamic(t, 1)
        for got, want in zip(run(*tensors), norm_first(*tensors), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    found = compile_report()
    assert not found.left and {e.became for e in found.replaced} == {"qk_norm_rope"}


class Heads(torch.nn.Module):
    """Numbers are attributes, as in models."""

    def __init__(self, q, k):
        super().__init__()
        self.q, self.k = (torch.nn.Parameter(t) for t in (q, k))
        self.project = torch.nn.ModuleList([torch.nn.Linear(16, n * D, bias=False) for n in (4, 2)])
        self.q_eps, self.k_eps, self.scaling, self.columns = 1e-5, 1e-5, 1.5, D

    def forward(self, x, angles):
        q, k = (project(x).view(*x.shape[:2], -1, self.columns) for project in self.project)
        q, k = (
            w * (heads * torch.rsqrt(heads.pow(2).mean(-1, keepdim=True) + eps))
            for heads, w, eps in ((q, self.q, self.q_eps), (k, self.k, self.k_eps))
        )
        both = torch.cat((angles, angles), dim=-1)
        return rotate(q, k, both.cos() * self.scaling, both.sin() * self.scaling, axis=2)


def test_numbers_that_are_inputs_of_the_graph():
    """Numbers of modules are, with dynamic=True. Those of which an operator was made are guarded."""
    *_, v, w, angles = given(FULL)
    module, x = Heads(v, w), torch.randn(B, T, 16)
    run = torch.compile(module, backend="graphfuse", options={"then": "aot_eager"}, fullgraph=True, dynamic=True)

    def became():
        for tokens in (T, 3):
            tensors = x[:, :tokens].contiguous(), angles[:, :tokens].contiguous()
            for got, want in zip(run(*tensors), module(*tensors), strict=True):
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        return [entry.became for entry in compile_report().graphs[-1].entries]

    assert became() == ["qk_norm_rope"] * 2
    graphs = len(compile_report().graphs)
    module.scaling = 0.5
    assert became() == ["qk_norm_rope"] * 2 and len(compile_report().graphs) == graphs
    module.k_eps = 0.1
    assert became() == ["region"] * 2
    assert all("no keys or queries are rotated with it" in e.why for e in compile_report().graphs[-1].entries)


@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_epsilons_that_are_read_of_tensors():
    """Nothing is known of them when a graph is compiled."""
    *_, v, w, angles = given(FULL)
    module, x, eps = Heads(v, w), torch.randn(B, T, 16), torch.tensor([1e-5, 0.1])

    def call(x, angles, eps):
        module.q_eps, module.k_eps = eps[0].item(), eps[1].item()
        return module(x, angles)

    compiled = torch.compile(call, backend="graphfuse", options={"then": "aot_eager"}, fullgraph=True)
    for got, want in zip(compiled(x, angles, eps), call(x, angles, eps), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert {e.why for e in compile_report().graphs[-1].entries} == {"mul, reduction: no kernels make its gradients"}


def test_the_report_names_both():
    entries = replace_in(make_fx(norm_first, tracing_mode="fake")(*given()), declines=False)
    assert [e.became for e in entries] == ["qk_norm_rope"] * 2
    assert all(e.why.startswith("rotated, with ") for e in entries)
