"""Queries and keys that are normalized and rotated, in graphs: one operator for both, which has torch's bits."""

import pytest
import torch

from graphfuse import SerializedError, VariantPackError
from graphfuse.torch import compile_report
from graphfuse.torch.regions import selection
from graphfuse.torch.regions.joined_graphs import graphs_of
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


def given(dtype=HALF, samples=1, columns=D, heads=(4, 2), tokens=T, batch=B):
    g = torch.Generator().manual_seed(0)
    q, k = (torch.randn(batch, tokens, n, columns, generator=g).to(dtype) for n in heads)
    v, w = (torch.randn(columns, generator=g).to(dtype) for _ in range(2))
    return q, k, v, w, torch.randn(samples, tokens, columns // 2, generator=g) * 3


def replaced(function, tensors, how="aten"):
    """The programs of what was replaced. The graph then makes what the function makes, bit for bit, as it lies."""
    graph, arguments = recorded(function, tensors, how)
    verdicts, _ = selection.replace_in(graph, declines=False)
    for got, want in zip(graph(*arguments), function(*tensors), strict=True):
        lies = ([s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1] for t in (got, want))
        assert got.dtype is want.dtype and got.shape == want.shape and next(lies) == next(lies)
        assert torch.equal(got, want)
    assert not any(why for _, why in verdicts)
    assert sum("graphfuse" in str(n.target) for n in graph.graph.nodes) == len(verdicts)
    return [region.program for region, _ in verdicts]


def turns(program):
    return "turn_pairs" in program.operations


@pytest.mark.parametrize("how", ["aten", "dynamo"])
@pytest.mark.parametrize("samples", [1, B])
@pytest.mark.parametrize("dtype", [HALF, FULL])
@pytest.mark.parametrize("function", [norm_first, transposed_first, in_place, two_layers])
def test_both_are_one_kernel(function, dtype, samples, how):
    (program,) = replaced(function, given(dtype, samples), how)
    assert program.joined == (4, 2) and turns(program)


@pytest.mark.parametrize(("batch", "samples"), [(1, 1), (3, 1), (3, 3)])
@pytest.mark.parametrize("function", [norm_first, transposed_first, in_place])
def test_one_token(function, batch, samples):
    """Where heads were transposed before the norm, nothing says so of one token: they are a region each."""
    programs = replaced(function, given(tokens=1, batch=batch, samples=samples))
    assert all(map(turns, programs)) and len(programs) == (2 if function is transposed_first else 1)


def test_as_many_heads():
    (program,) = replaced(norm_first, given(heads=(4, 4)))
    assert turns(program)


def other_halves(q, k, v, w, angles):
    both = torch.cat((angles, angles + 1), dim=-1)
    return rotate(llama(q, v), llama(k, w), both.cos().to(q.dtype), both.sin().to(q.dtype), axis=2)


def from_outside(q, k, v, w, angles):
    cos = torch.cat((angles, angles), dim=-1).to(q.dtype)
    return rotate(llama(q, v), llama(k, w), cos, cos, axis=2)


def angles_changed_in_place(q, k, v, w, angles):
    both = torch.cat((angles, angles), dim=-1)
    both[..., :4] = 1
    return rotate(llama(q, v), llama(k, w), both.cos().to(q.dtype), both.sin().to(q.dtype), axis=2)


def changed_in_place(q, k, v, w, angles):
    cos, sin = tables(angles, q.dtype)
    made = rotate(llama(q, v), llama(k, w), cos, sin, axis=2)
    cos.add_(1)
    return (*made, cos)


@pytest.mark.parametrize("how", ["aten", "dynamo"])
@pytest.mark.parametrize("function", [other_halves, from_outside, angles_changed_in_place, changed_in_place])
def test_cosines_may_be_any(function, how):
    (program,) = replaced(function, given(), how)
    assert program.joined and turns(program)


def read_elsewhere(q, k, v, w, angles):
    q = llama(q, v)
    return (*rotate(q, llama(k, w), *tables(angles, q.dtype), axis=2), q.relu())


def over_all_heads(q, k, v, w, angles):
    """As OLMo-2."""
    q, k = (llama(x.flatten(2), 1.5).view(x.shape) for x in (q, k))
    return rotate(q, k, *tables(angles, q.dtype), axis=2)


def backward(q, k, v, w, angles):
    """Turned the other way round."""
    q, k = llama(q, v), llama(k, w)
    cos, sin = (t.unsqueeze(2) for t in tables(angles, q.dtype))
    return tuple(x * cos + torch.cat((x[..., D // 2 :], -x[..., : D // 2]), -1) * sin for x in (q, k))


def halves_read_elsewhere(q, k, v, w, angles):
    q, k = llama(q, v), llama(k, w)
    cos, sin = (t.unsqueeze(2) for t in tables(angles, q.dtype))
    one, two = q[..., : D // 2], q[..., D // 2 :]
    return q * cos + torch.cat((-two, one), -1) * sin, two.clone(), k * cos + turned(k) * sin


def of_different_norms(q, k, v, w, angles):
    return rotate(llama(q, v), gemma(k, w), *tables(angles, q.dtype), axis=2)


APART = [read_elsewhere, over_all_heads, backward, halves_read_elsewhere, of_different_norms]


@pytest.mark.parametrize("how", ["aten", "dynamo"])
@pytest.mark.parametrize("function", APART)
def test_values_where_they_are_several(function, how):
    programs = replaced(function, given(), how)
    assert not any(program.joined for program in programs)
    assert len(programs) > 1


@pytest.mark.parametrize("columns", [24, 80, 528])
def test_heads_of_other_widths(columns):
    """Of those that no kernel turns the norms are regions."""
    programs = replaced(norm_first, given(columns=columns))
    assert [one.operations for one in programs] == (
        ["rmsnorm, mul, turn_pairs, add"] if columns == 80 else ["rmsnorm, mul"] * 2
    )


def test_gradients():
    tensors = [t.requires_grad_(t.dim() != 3) for t in given(FULL)]
    run = torch.compile(norm_first, backend="graphfuse", options={"then": "aot_eager"}, fullgraph=True)
    got, want = run(*tensors), norm_first(*tensors)
    grads = [torch.autograd.grad(sum(y.square().sum() for y in made), tensors[:4]) for made in (got, want)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    entries = compile_report().graphs[-1].entries
    assert [(e.became, "turn_pairs" in e.why) for e in entries] == [("region", True)]


def test_learned_angles_keep_their_gradient():
    tensors = given(FULL)
    angles = tensors[-1].requires_grad_()
    run = torch.compile(norm_first, backend="graphfuse", options={"then": "aot_eager"}, fullgraph=True)
    got, want = (torch.autograd.grad(sum(y.sum() for y in f(*tensors)), angles)[0] for f in (run, norm_first))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert [e.why for e in compile_report().graphs[-1].entries] == ["rmsnorm"] * 2


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
    assert not found.left and all("turn_pairs" in e.why for e in found.replaced)


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

    assert became() == ["region"]
    graphs = len(compile_report().graphs)
    module.scaling = 0.5
    assert became() == ["region"] and len(compile_report().graphs) == graphs
    module.k_eps = 0.1
    assert became() == ["region"] * 2


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
    (why,) = {e.why for e in compile_report().graphs[-1].entries}
    assert why == "mul, reduction: nothing is reduced for its gradients: inductor makes them element by element"


class Norm(torch.nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = torch.nn.Parameter(weight)

    def forward(self, x):
        return llama(x, self.weight)


class Normed(torch.nn.Module):
    def __init__(self, v, w):
        super().__init__()
        self.q_norm, self.k_norm = Norm(v), Norm(w)

    def forward(self, q, k, angles):
        return rotate(self.q_norm(q), self.k_norm(k), *tables(angles, q.dtype), axis=2)


def test_the_report_names_both():
    q, k, v, w, angles = given()
    run = torch.compile(Normed(v, w), backend="graphfuse", options={"then": "aot_eager"}, fullgraph=True)
    run(q, k, angles)
    one, other = compile_report().graphs[-1].entries
    assert (one.name, other.name, other.why) == ("q_norm", "k_norm", "with q_norm")
    assert one.became == other.became == "region" and "turn_pairs" in one.why


def test_damaged_texts_are_refused():
    (program,) = replaced(in_place, given())
    for text in (program.text.replace("[4,2]", joined) for joined in ("[4]", "4", "[4,null]")):
        with pytest.raises(SerializedError, match="the graph of a region is damaged"):
            graphs_of(text)
    q, k, *others = (t.to(HALF) for t in given())
    graphs = graphs_of(program.text)
    with pytest.raises(VariantPackError, match=r"in0 has shape \(2, 5, 3, 32\); accepted: 4 for 3"):
        torch.ops.graphfuse.region([q[:, :, :3], *[k] * (len(graphs.tensors) - 1)], program.text)
