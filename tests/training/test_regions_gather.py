"""The element of each row that an index names, as of tokens' log-probabilities: a step of the region that reads the
row, with torch's values and gradients; what is left."""

import pytest
import torch
from torch.nn import functional as F

from graphfuse.engines.rows.engine import RowEngine
from graphfuse.rows.steps import Pick
from graphfuse.torch import compile_report
from graphfuse.torch.analysis import cost
from graphfuse.torch.compile_backend import compiled_graphs
from support.regions import found
from support.traces import recorded

pytestmark = [pytest.mark.usefixtures("nothing_compiled"), pytest.mark.torch]
HALF, FULL, BINARY16 = torch.bfloat16, torch.float32, torch.float16
BATCH, TOKENS, CLASSES = 2, 6, 64


def of_rows(x, t):
    x, t = x.flatten(0, 1), t.flatten()
    return F.log_softmax(x.float(), -1).gather(-1, t[:, None]).squeeze(-1)


def of_samples(x, t):
    return torch.gather(x[:, :-1].log_softmax(-1), 2, t[:, 1:].unsqueeze(2)).squeeze(2)


def less_logsumexp(x, t):
    return torch.gather(x, dim=-1, index=t.unsqueeze(-1)).squeeze(-1) - torch.logsumexp(x, -1)


def at_a_temperature(x, t):
    x = x.float() / 0.7
    return x.gather(-1, t.unsqueeze(-1)).squeeze(-1) - x.logsumexp(-1)


def along_a_dimension(x, t):
    """Which counts negative numbers from the end."""
    return x.log_softmax(-1).take_along_dim((t - CLASSES // 2)[..., None], -1).squeeze(-1)


def masked(x, t):
    logps = torch.gather(x.log_softmax(-1), 2, torch.where(t > 9, t, 0)[..., None]).squeeze(2)
    return torch.where(t > 9, logps, 0).sum(-1)


def with_entropy(x, t):
    logps = F.log_softmax(x, -1)
    return logps.gather(2, t[..., None]).squeeze(-1), -(logps.exp() * logps).sum(-1)


FUNCTIONS = [of_rows, of_samples, less_logsumexp, at_a_temperature, along_a_dimension, masked, with_entropy]


def given(dtype=FULL, batch=BATCH, classes=CLASSES):
    source = torch.Generator().manual_seed(3)
    x = 3 * torch.randn(batch, TOKENS, classes, generator=source)
    return x.to(dtype), torch.randint(0, classes, (batch, TOKENS), generator=source)


def made(function, x, t):
    """Results and the gradient."""
    x = x.clone().requires_grad_()
    results = function(x, t)
    results = results if isinstance(results, tuple) else (results,)
    outer = [torch.linspace(0.5, 2, r.numel(), dtype=r.dtype).view(r.shape) for r in results]
    return *(r.detach() for r in results), *torch.autograd.grad(results, x, outer)


def check(run, function, x, t):
    """That results and gradient are no further from those of float64 than eager's, but for roundings."""
    exact = made(function, x.double(), t)
    for got, want, of in zip(made(run, x, t), made(function, x, t), exact, strict=True):
        assert got.dtype is want.dtype and got.shape == want.shape
        error, bound = ((one.double() - of).abs() for one in (got, want))
        eps = torch.finfo(got.dtype).eps
        assert (error <= 2 * bound.max() + 4 * eps * of.abs().max()).all()


def compiled_with(function, **options):
    torch.compiler.reset()
    return torch.compile(function, backend="graphfuse", options={"then": "aot_eager"}, fullgraph=True, **options)


@pytest.mark.parametrize("dtype, dynamic", [(HALF, False), (BINARY16, False), (FULL, True)])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_against_torch(function, dtype, dynamic):
    run = compiled_with(function, dynamic=dynamic)
    for batch in (BATCH, 3)[: 1 + dynamic]:
        check(run, function, *given(dtype, batch))
    entry, *others = compile_report().graphs[-1].replaced
    assert "gen_index, cmp_eq" in entry.why and not any("cmp_eq" in other.why for other in others)
    assert entry.moved.startswith("2." if dtype.itemsize == 2 else "4.")  # bytes: logits are read once


@pytest.mark.parametrize("function", [of_rows, less_logsumexp])
def test_in_graphs_of_aten(function):
    module, tensors, (verdict,) = found(function, *given(HALF), how="aten")
    assert verdict[1] == "" and verdict[0].moved.startswith("2.")
    torch.testing.assert_close(module(*tensors), function(*tensors))


def test_columns_that_vary():
    run = compiled_with(less_logsumexp, dynamic=True)
    for classes in (CLASSES, 40):
        check(run, less_logsumexp, *given(FULL, classes=classes))
    (graph,) = compile_report().graphs
    assert graph.replaced


@pytest.mark.emulate
@pytest.mark.parametrize("function", [of_samples, less_logsumexp, along_a_dimension])
def test_one_kernel_each_way_on_the_emulator(function, kernels):
    check(compiled_with(function), function, *given(HALF))
    assert kernels == {"region_training": [True], "region_backward": [True]}


@pytest.mark.parametrize("engine", ["reference", pytest.param("emulator", marks=pytest.mark.emulate)])
@pytest.mark.parametrize("function", [of_samples, less_logsumexp])
def test_other_elements_count_for_nothing(function, engine, plan_on):
    """What is infinite is 0 or stays so; a row with NaN leaves the others, and of a gather that is no NaN itself."""
    x, t = given(FULL)
    x[0, 0, 5], x[0, 1] = -torch.inf, -torch.inf
    x[0, 1, 3], t[0] = 0.0, 5
    x[1, 2, 7] = torch.nan
    if engine == "emulator":
        plan_on("emulator")
    for got, want in zip(made(compiled_with(function), x, t), made(function, x, t), strict=True):
        torch.testing.assert_close(got, want, equal_nan=True)
    assert compile_report().replaced


def test_the_element_beside_nan_is_itself():
    x, t = given(FULL)
    x[0, 0, 5], t[0, 0] = torch.nan, 4
    function = lambda x, t: (x.gather(-1, t[..., None]), x.logsumexp(-1))  # noqa: E731
    module, arguments, verdicts = found(function, x, t)
    assert [why for _, why in verdicts] == [""]
    for got, want in zip(module(*arguments), function(x, t), strict=True):
        assert torch.equal(got.nan_to_num(7), want.nan_to_num(7))


@pytest.mark.parametrize("engine", ["reference", pytest.param("emulator", marks=pytest.mark.emulate)])
@pytest.mark.parametrize("function", [of_samples, less_logsumexp])
def test_the_number_of_no_column_makes_its_row_nan(function, engine, plan_on):
    """Torch stops the program. Nothing of the row has a gradient through that element."""
    x, t = given(FULL)
    want = made(function, x, t)
    t[0, 2], t[1, 4] = -1, CLASSES
    with pytest.raises(RuntimeError, match="out of bounds"):
        function(x, t)
    if engine == "emulator":
        plan_on("emulator")
    logps, grad = made(compiled_with(function), x, t)
    shift = TOKENS - logps.shape[1]  # a token is named by the one before it
    for sample, token in ((0, 2 - shift), (1, 4 - shift)):
        assert logps[sample, token].isnan()
        for one in (logps, grad, *want):
            one[sample, token] = 0
    torch.testing.assert_close((logps, grad), want)


@pytest.mark.emulate
@pytest.mark.parametrize("function", [of_samples, less_logsumexp])
def test_no_other_element_is_looked_at(function, plan_on, monkeypatch):
    programs, own = [], RowEngine.propose

    def propose(engine, facts, *more):
        programs.append(facts.program)
        return own(engine, facts, *more)

    monkeypatch.setattr(RowEngine, "propose", propose)
    plan_on("emulator")
    with torch.no_grad():
        compiled_with(function)(*given(HALF))
    assert programs and all(any(isinstance(step, Pick) for step in program.steps) for program in programs)


def several(x, t):
    return x.log_softmax(-1).gather(-1, t[..., None].expand(-1, -1, 3))


def of_some(x, t):
    return x.log_softmax(-1).gather(-1, t[:, :3, None])


def of_others(x, t):
    y = x.flip(-1)
    return x.softmax(-1) * y.gather(-1, t[..., None])


WHY_LEFT = {
    several: "gather: gather.default by an index of shape (2, 6, 3); accepted: one a row",
    of_some: "gather: gather.default by an index of shape (2, 3, 1); accepted: one a row",
    of_others: "gather: nothing else reads the rows: torch reads the elements that are named",
}


@pytest.mark.parametrize("function", WHY_LEFT)
def test_what_is_left(function):
    x, t = given()
    graph, arguments = recorded(function, (x, t), "dynamo")
    taken, left = compiled_graphs.replace_in(graph, declines=False)
    assert taken.is_replaced and "gen_index" not in taken.why and left.why == WHY_LEFT[function]
    torch.testing.assert_close(graph(*arguments)[0], function(x, t))


def test_an_element_of_rows_that_nobody_reduces_is_no_region():
    graph, _ = recorded(lambda x, t: x.gather(-1, t[..., None]), given(), "dynamo")
    assert compiled_graphs.replace_in(graph, declines=False) == []


@pytest.mark.parametrize("function", [of_rows, of_samples, less_logsumexp])
@pytest.mark.parametrize("needs_grad", [False, True])
def test_on_a_gpu_it_is_taken(function, needs_grad, monkeypatch):
    entries = []

    def backend(graph, _):
        entries.extend(compiled_graphs.replace_in(graph, declines=True))
        return graph

    monkeypatch.setattr(cost, "DEVICE", "cpu")
    x = torch.ones(4, 32, 2048, dtype=HALF, requires_grad=needs_grad)
    torch.compile(function, backend=backend, fullgraph=True)(x, torch.zeros(4, 32, dtype=torch.int64))
    (entry,) = entries
    assert entry.became == "region" and entry.moved.startswith(("2 ", "2.0"))
