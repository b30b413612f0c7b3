"""What is left to inductor, by what was measured; the pass within inductor, and what inductor keeps on disk."""

import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from graphfuse.runtime import torch_private
from graphfuse.torch import inductor_pass
from graphfuse.torch.analysis import cost
from graphfuse.torch.compile_backend import compiled_graphs
from graphfuse.torch.regions.selection import ELSEWHERE
from support.compiled import EPS, HIDDEN, became, rows

pytestmark = [pytest.mark.usefixtures("nothing_compiled"), pytest.mark.torch]
ROOT = Path(__file__).resolve().parents[2]

# Costs


def test_cases_are_those_of_the_records():
    for case in cost.CASES:
        record = json.loads((ROOT / "docs" / "records" / case.record).read_text())
        at = case.rows, case.columns, "bf16"
        (found,) = [c for c in record["cases"] if (c["rows"], c["columns"], c["output"]) == at]
        assert record["environment"]["device"] == "NVIDIA H200"
        assert found["peers"]["graphfuse"]["us"]["median"] == case.ours
        assert found["peers"]["torch_compile"]["us"]["median"] == case.inductors


def on_cuda(function, *shapes, dtype=torch.bfloat16):
    """The graph of a function of tensors that would be on a GPU."""
    with FakeTensorMode():
        return make_fx(function)(*(torch.empty(shape, dtype=dtype, device="cuda") for shape in shapes))


def layer_norm(x, w):
    return F.layer_norm(x, x.shape[-1:], w)


def sandwich(x, r, w):
    total = F.rms_norm(x, x.shape[-1:], w, EPS) + r
    return F.rms_norm(total, x.shape[-1:], w, EPS), total


def between(x, r, w):
    """The norms differ."""
    total = F.rms_norm(x, x.shape[-1:], w, EPS) + r
    return F.rms_norm(total, x.shape[-1:], None, EPS), total


def judged(graph, declines=True):
    return compiled_graphs.replace_in(graph, declines)


@pytest.mark.parametrize(
    "rows, columns, dtype, is_left",
    [
        (4096, 1024, torch.bfloat16, True),
        (4096, 1024, torch.float16, True),
        (2048, 768, torch.bfloat16, True),
        (4096, 1024, torch.float32, False),
        (4096, 4096, torch.bfloat16, False),
        (32768, 2048, torch.bfloat16, False),
        (16, 1024, torch.bfloat16, False),  # further than the cases reach
    ],
)
def test_a_layer_norm_that_inductor_is_as_good_at_is_left(rows, columns, dtype, is_left):
    (entry,) = judged(on_cuda(layer_norm, (rows, columns), (columns,), dtype=dtype))
    assert entry.is_replaced is not is_left
    assert not is_left or entry.why == f"layernorm: inductor is as good ({cost._nearest(cost.LAYER, rows, columns)[0]})"
    (entry,) = judged(on_cuda(layer_norm, (rows, columns), (columns,), dtype=dtype), declines=False)
    assert (entry.became, entry.why) == ("region", "layernorm")


def test_the_same_layer_norm_in_a_training_step_is_replaced():
    graph = on_cuda(layer_norm, (4096, 1024), (1024,))
    for node in graph.graph.nodes:
        if isinstance(node.meta.get("val"), torch.Tensor):
            node.meta["val"].requires_grad_()
    assert [e.became for e in judged(graph)] == ["region"]


@pytest.mark.parametrize("function", [between, sandwich])
def test_norms_around_a_sum_are_one_region(function):
    shape = (2, 2048, 2560)
    for declines in (True, False):
        (entry,) = judged(on_cuda(function, shape, shape, (2560,)), declines)
        assert (entry.became, entry.why.split(", ")[0]) == ("region", "rmsnorm")


def test_on_the_cpu_all_are_left():
    x, w = torch.ones(4096, 8, dtype=torch.bfloat16), torch.ones(8, dtype=torch.bfloat16)
    graph = make_fx(between, tracing_mode="fake")(x, x, w)
    assert [e.why for e in judged(graph)] == [f"rmsnorm, add: {ELSEWHERE}"]
    assert [e.became for e in judged(graph, declines=False)] == ["region"]


@pytest.mark.parametrize("columns, is_known", [(1024, True), (4096, True), (32, False), (1 << 20, False)])
def test_for_numbers_of_rows_that_vary_cases_of_all_numbers_count(columns, is_known):
    found = cost._nearest(cost.LAYER, None, columns)
    assert [case.rows for case in found] == [4096, 32768] * is_known


def test_the_case_that_has_least_counts(monkeypatch):
    cases = [cost.MeasuredCase(cost.LAYER, rows, 1024, 2.0, us, "") for rows, us in ((4096, 1.0), (32768, 3.0))]
    monkeypatch.setattr(cost, "CASES", tuple(cases))
    assert cost._nearest(cost.LAYER, None, 1024) == cases
    for n, saved in ((4096, -2.0), (32768, 0.0), (8192, -2.0)):  # that it is faster alone is no reason to move more
        assert cost.saved(cost.cases("layernorm", True, False, (n, 1024))) == saved
    (left,), (taken,) = (judged(on_cuda(layer_norm, (n, 1024), (1024,))) for n in (4096, 32768))
    assert left.why == f"layernorm: inductor is as good ({cases[0]})" and taken.is_replaced


def test_cases_next_to_it_count():
    for case in cost.CASES:
        assert cost._nearest(case.what, case.rows, case.columns - 1) == [case]
    for n, found in ((1024, [4096]), (4097, [4096, 32768]), (32769, [32768]), (16, []), (0, [])):
        assert [case.rows for case in cost._nearest(cost.LAYER, n, 1024)] == found
    assert [(c.rows, c.columns) for c in cost._nearest(cost.RMS_BACKWARD, 16384, 5120)] == [(8192, 5120), (32768, 4096)]
    assert math.isinf(cost._distance(0, 1))


# Inductor


class Counted:
    """A pass without a uuid."""

    def __init__(self):
        self.calls = 0

    def __call__(self, graph):
        self.calls += 1


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return tmp_path


def hits_and_misses(**kwargs):
    torch.compiler.reset()
    counters.clear()
    x = rows(2)
    run = torch.compile(normalized, **kwargs)
    torch.testing.assert_close(run(x), normalized(x))
    found = {n.rpartition("_")[2] for group in ("inductor", "aot_autograd") for n in counters[group] if "cache_" in n}
    return found & {"hit", "miss", "bypass"}


def normalized(x):
    y = F.rms_norm(x.exp(), (HIDDEN,))
    return y @ y.mT


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor has no C++ compiler")
def test_what_inductor_keeps_is_not_mixed_up(cache, monkeypatch):
    """Neither graphs with and without operators, nor those of two versions."""
    import graphfuse

    monkeypatch.setattr(cost, "DEVICE", "cpu")
    assert hits_and_misses(backend="inductor") == {"miss"}
    assert hits_and_misses(backend="graphfuse") == {"miss"}
    assert became() == ["region"]
    assert hits_and_misses(backend="graphfuse") == {"hit"}
    assert hits_and_misses(backend="inductor", options={"post_grad_custom_pre_pass": inductor_pass()}) == {"miss"}
    assert became() == ["region"]
    monkeypatch.setattr(graphfuse, "__version__", "another")
    counted = Counted()
    assert hits_and_misses(backend="graphfuse") == {"miss"}
    assert hits_and_misses(backend="graphfuse", options={"post_grad_custom_pre_pass": counted}) <= {"bypass"}
    assert counted.calls == 1


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor has no C++ compiler")
def test_inductors_code_calls_regions_past_the_dispatcher(cache, monkeypatch):
    monkeypatch.setattr(cost, "DEVICE", "cpu")
    x = rows(2).requires_grad_()
    run = torch.compile(normalized, backend="graphfuse")
    with torch.no_grad():
        made, (inference,) = run_and_get_code(run, x)
    torch.testing.assert_close(made, normalized(x))
    trained, training = run_and_get_code(lambda: torch.autograd.grad(run(x).sum(), x))
    torch.testing.assert_close(trained, torch.autograd.grad(normalized(x).sum(), x))
    called = [re.findall(r"= torch\.ops\.graphfuse\.([\w.]+)\(", code) for code in (inference, *training)]
    assert called == [["region_by_inductor"], ["region_training_by_inductor"], ["region_backward_by_inductor"]]
    assert re.search(r"assert_alignment\(buf\d+, 16, 'torch.ops.graphfuse.region.default'\)", inference)


def test_without_inductors_names_its_code_calls_operators(monkeypatch):
    from torch._inductor import lowering

    known = lowering.lowerings.get(torch.ops.graphfuse.region.default)
    monkeypatch.setattr(torch_private, "_find", lambda path: None)
    torch_private.call_from_inductor({torch.ops.graphfuse.region.default: "nothing"})
    assert lowering.lowerings.get(torch.ops.graphfuse.region.default) is known


def test_a_pass_that_is_set_runs_first(monkeypatch):
    monkeypatch.setattr(cost, "DEVICE", "cpu")
    from torch._inductor import config

    counted = Counted()
    with config.patch(post_grad_custom_pre_pass=counted):
        own = inductor_pass()
        with config.patch(post_grad_custom_pre_pass=own):
            again = inductor_pass()
    assert counted.calls == 0
    assert own.uuid() is None and again.uuid() is None  # so inductor keeps nothing, as without us
    graph = make_fx(lambda x: F.rms_norm(x, (HIDDEN,)), tracing_mode="fake")(rows(2))
    own(graph.graph)
    assert counted.calls == 1 and became() == ["region"]


def test_uuids():
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Theirs(CustomGraphPass):
        name = "theirs"

        def __call__(self, graph):
            pass

        def uuid(self):
            return self.name

    from torch._inductor import config

    assert isinstance(inductor_pass(), CustomGraphPass)
    alone = inductor_pass().uuid()
    assert alone == inductor_pass().uuid()
    theirs = Theirs()
    with config.patch(post_grad_custom_pre_pass=theirs):
        behind = inductor_pass()
    first = behind.uuid()
    theirs.name = "changed"
    assert len({alone, first, behind.uuid()}) == 3
