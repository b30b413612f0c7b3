"""cuDNN's engine where there is no cuDNN: which nodes it is asked for, when, what it says, and of plans."""

import dataclasses
import subprocess
import sys

import pytest
import torch
from hypothesis import given

from graphfuse import (
    GraphNotSupportedError,
    GraphValidationError,
    SettingError,
    data_type,
    heur_mode,
    norm_forward_phase,
    reduction_mode,
)
from graphfuse.base.device import for_arch
from graphfuse.engines.cudnn import CudnnEngine, devices, engine, plans
from graphfuse.op_graph.ir import Subgraph
from graphfuse.patterns import epilogues
from graphfuse.planning import plan
from graphfuse.planning import registry as plugins
from support import graphs, whole
from support.graphs import BF16, FLOAT
from support.products import lowered, product

H200 = dataclasses.replace(for_arch("sm_90a"), here=True)
INFERENCE = norm_forward_phase.INFERENCE


@pytest.fixture(autouse=True)
def registries(monkeypatch):
    monkeypatch.delenv("GRAPHFUSE_CUDNN", raising=False)
    plugins.forget()
    yield
    plugins.forget()


def regions(g) -> list[list[str]]:
    """Names of the nodes of each region that it is asked about, largest first."""
    found, declined = plan.matches(lowered(g), plugins.registry(engines=["cudnn"]))
    assert not declined
    return [[n.name for n in r.subgraph.nodes] for r in found if r.pattern in ("epilogue", "norm")]


# Regions


def test_a_product_with_its_epilogue_and_every_shorter_one():
    g = graphs.new()
    y = g.bias(product(g), g.tensor([1, 4]), name="bias")
    y = g.add(g.relu(y, name="relu"), g.tensor([8, 4]), name="residual")
    g.mul(y, 0.5, name="scale").set_output()
    whole_one = ["product", "bias", "relu", "residual", "scale"]
    assert regions(g) == [whole_one[:n] for n in (5, 4, 3, 2, 1)]


def test_what_is_not_of_the_products_shape_or_not_pointwise_stays_outside():
    g = graphs.new()
    x = product(g)
    g.relu(g.reduction(x, mode=reduction_mode.ADD).set_dim([8, 1]), name="other").set_output()
    y = g.softmax(g.exp(x, name="exp"), name="softmax")
    g.relu(y, name="after").set_output()
    assert regions(g) == [["product", "exp"], ["product"]]


def test_what_would_lead_out_and_back_stays_outside():
    g = graphs.new()
    x = product(g)
    g.add(g.relu(x, name="relu"), g.softmax(x, name="softmax"), name="sum").set_output()
    assert regions(g) == [["product", "relu"], ["product"]]


def test_what_comes_before_stays_outside_and_long_epilogues_end():
    g = graphs.new()
    y = g.matmul(g.relu(g.tensor([8, 16]), name="before"), g.tensor([16, 4]), name="product")
    for n in range(12):
        y = g.relu(y, name=f"relu{n}")
    y.set_output()
    found = regions(g)
    assert len(found) == epilogues.LONGEST + 1 and "before" not in sum(found, [])
    assert found[0] == ["product", *(f"relu{n}" for n in range(epilogues.LONGEST))]


def test_attention_and_norms_are_taken_alone():
    g = graphs.new()
    q, k, v = (g.tensor([1, 2, 4, 8]) for _ in "qkv")
    y = g.relu(g.sdpa(q, k, v, name="attention")[0], name="relu")
    g.batchnorm_inference(y, *[g.tensor([1, 2, 1, 1]) for _ in range(4)], name="norm").set_output()
    assert sorted(regions(g)) == [["attention"], ["norm"]]


@given(graph=whole.drawn())
def test_regions_of_any_graph_can_run_as_one(graph):
    low = lowered(graph.build())
    found, _ = plan.matches(low, plugins.registry(engines=["cudnn"]))
    own = [r for r in found if r.pattern in ("epilogue", "norm")]
    names = (*epilogues.PRODUCTS, *epilogues.ATTENTION, *epilogues.NORMALIZING)
    for region in own:
        anchors = [n for n in region.subgraph.nodes if n.op_name in names]
        assert [n.name for n in anchors] == [region.facts.node] and region.facts.subgraph == region.subgraph
        assert plan.schedule(low, [region.subgraph]) is not None
    taken = {i for r in own for i in r.subgraph.node_ids if len(r.subgraph.node_ids) == 1}
    assert taken == {i for i, n in enumerate(low.nodes) if n.op_name in names}


# When it is asked


def test_it_is_used_unless_it_is_turned_off(monkeypatch):
    everything = ["rows", "cudnn", "torch", "reference"]
    for value, names, last in (
        (None, everything, {"cudnn"}),
        ("", everything, {"cudnn"}),
        ("on", everything, set()),
        ("off", ["rows", "torch", "reference"], set()),
    ):
        monkeypatch.delenv("GRAPHFUSE_CUDNN", raising=False)
        if value is not None:
            monkeypatch.setenv("GRAPHFUSE_CUDNN", value)
        found = plugins.registry()
        assert [e.name for e in found.engines] == names and found.last == last
        assert (epilogues.NORMS in found.patterns) is ("cudnn" in names) and epilogues.PATTERN in found.patterns
        # Whoever names it has it.
        assert found.off == ({"cudnn"} if value == "off" else set()) and not plugins.registry(engines=["rows"]).off
        chosen = plugins.registry(engines=["cudnn", "reference"])
        assert [e.name for e in chosen.engines] == ["cudnn", "reference"] and epilogues.NORMS in chosen.patterns
        given_object = plugins.registry(engines=[CudnnEngine()])
        assert [e.name for e in given_object.engines] == ["cudnn", *(n for n in names if n != "cudnn")]
        assert not any((chosen.last, given_object.last, chosen.off, given_object.off))
    monkeypatch.setenv("GRAPHFUSE_CUDNN", "yes")
    with pytest.raises(SettingError, match="GRAPHFUSE_CUDNN='yes' is not known; accepted: on, off"):
        plugins.registry()


class Asked(CudnnEngine):
    """Takes whatever it is asked about, and counts."""

    def __init__(self):
        self.about = []

    def why_not(self, facts, device):
        self.about.append([node.op_name for node in facts.subgraph.nodes])

    def propose(self, facts, device, mode):
        return (plans.CudnnKnobs(0),)

    def problem(self, facts):
        return None


def asked(draw, mode, last=("cudnn",)):
    """What it is asked about, the engines of the best plan, and its verdicts."""
    g, engine = graphs.new(), Asked()
    draw(g).set_output()
    low = lowered(g)
    known = plugins.registry()
    engines = [engine if e.name == "cudnn" else e for e in known.engines]
    found, _ = plan.matches(low, known)
    proposal = plan.propose(low, found, engines, H200, mode, last=last, off=known.off)
    why = [str(v.why) for v in proposal.verdicts if v.engine == "cudnn" and v.why is not None]
    return engine.about, [part.engine.name for part in proposal.plans[0].parts], why


def norm(g, **kwargs):
    return g.rmsnorm(g.tensor([8, 64]), g.tensor([1, 64]), 1e-5, norm_forward_phase=INFERENCE, **kwargs)[0]


@pytest.mark.parametrize("mode", plans.MODES)
def test_a_norm_alone_never_pays_for_it(mode):
    about, engines, why = asked(norm, mode)
    assert about == [] and engines == ["reference" if mode is heur_mode.FALLBACK else "rows"]
    assert why == [
        "it was not asked: no nodes remain for it"
        if mode is heur_mode.A
        else "it was not asked, as rows takes these nodes"
    ]
    about, engines, _ = asked(norm, mode, last=())
    assert engines == ["cudnn" if mode is heur_mode.FALLBACK else "rows"]
    assert about == ([] if mode is heur_mode.A else [["rmsnorm"]])


def test_turned_off_it_is_not_asked_and_the_verdicts_say_why(monkeypatch):
    monkeypatch.setenv("GRAPHFUSE_CUDNN", "off")
    about, engines, why = asked(lambda g: g.relu(product(g)), heur_mode.A, last=())
    assert about == [] and "cudnn" not in engines
    assert why == ["it was not asked: it is turned off in the environment"]


@pytest.mark.parametrize("mode", plans.MODES)
def test_it_is_asked_first_about_what_no_other_pattern_has(mode):
    about, engines, why = asked(lambda g: g.relu(product(g)), mode)
    assert about[0] == ["matmul", "relu"] and engines == ["cudnn"] and why == []


@pytest.mark.parametrize("mode", plans.MODES)
def test_it_is_asked_about_norms_that_kernels_do_not_take(mode):
    def over_batches(g):
        return g.batchnorm(g.tensor([2, 4, 3, 3]), *[g.tensor([1, 4, 1, 1]) for _ in range(2)], epsilon=1e-5)[0]

    about, engines, _ = asked(over_batches, mode)
    assert about == [["batchnorm"]] and engines == ["cudnn"]


def test_an_unknown_engine_is_told_of_it():
    with pytest.raises(GraphValidationError, match="no engine is named 'cuDNN'; there are: .*cudnn"):
        plugins.registry(engines=["cuDNN"])


def test_it_is_not_imported_unless_asked_for():
    code = """
import sys
import graphfuse
chip = graphfuse.create_device_properties("sm_90a")
g = graphfuse.pygraph(device_property=chip, io_data_type=graphfuse.data_type.FLOAT)
g.matmul(g.tensor([2, 3]), g.tensor([3, 2])).set_output()
g.build([graphfuse.heur_mode.A, graphfuse.heur_mode.FALLBACK])
assert "cudnn" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("mode", [heur_mode.A, heur_mode.B, heur_mode.FALLBACK])
@pytest.mark.parametrize("device", ["cpu", "emulator"])
def test_without_cudnn_the_reference_engine_runs_it(mode, device):
    g = graphs.new(device=device)
    a, b = torch.randn(8, 16), torch.randn(16, 4)
    y = g.matmul(g.tensor([8, 16], name="a"), g.tensor([16, 4], name="b"), name="product")
    g.relu(y).set_output().set_name("out")
    g.build([mode], engines=["cudnn", "reference"])
    out = torch.empty(8, 4)
    g.execute({"a": a, "b": b, "out": out})
    torch.testing.assert_close(out.double(), (a.double() @ b.double()).relu(), atol=1e-5, rtol=1e-5)
    assert g.get_plan_name_at_index(0) == "reference"
    assert f"cuDNN runs on CUDA devices, not on {device}" in g.explain()


def test_a_missing_package_is_the_reason_on_a_gpu(monkeypatch):
    monkeypatch.setitem(sys.modules, "cudnn", None)
    g = graphs.new()
    product(g).set_output()
    low, known = lowered(g), plugins.registry(engines=["cudnn", "reference"])
    found, _ = plan.matches(low, known)
    for mode in plans.MODES:
        proposal = plan.propose(low, found, known.engines, H200, mode)
        assert [p.name for p in proposal.plans] == ["reference"]
        assert any("nvidia-cudnn-frontend is not installed" in line for line in plan.refusals(proposal))


def test_it_declines_what_it_cannot_be_told():
    g = graphs.new(compute_data_type=data_type.DOUBLE)
    product(g).set_output()
    facts = Subgraph(lowered(g), (0,))
    assert "computes in DOUBLE" in CudnnEngine.serves.why_not(facts)


def test_preparing_without_the_package_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "cudnn", None)
    g = graphs.new()
    product(g).set_output()
    facts = epilogues.EpilogueFacts("product", Subgraph(lowered(g), (0,)))
    with pytest.raises(GraphNotSupportedError, match="nvidia-cudnn-frontend is not installed"):
        CudnnEngine().prepare(facts, plans.CudnnKnobs(0), H200, None)


def test_a_device_that_is_not_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda ordinal: (9, 0))
    assert devices.why_not(H200) is None
    assert "whose cuda:0 is SM90; the graph is planned for sm_100a" in str(devices.why_not(for_arch("sm_100a")))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert "torch sees no cuda:0" in str(devices.why_not(H200))


# What it knows of its plans


def test_alike_nodes_are_asked_for_once():
    def key(name="graph", extra=False, dtype=FLOAT, second=False):
        g = graphs.new(name)
        if extra:
            g.relu(g.tensor([3], name="x"), name="extra").set_output()
        y = g.matmul(g.tensor([8, 16], data_type=dtype), g.tensor([16, 4]), name=f"product of {name}")
        if second:
            y.set_output()
        g.relu(y, name="relu").set_output()
        low = lowered(g)
        return engine._key(Subgraph(low, tuple(i for i, n in enumerate(low.nodes) if n.name != "extra")))

    assert key() == key("another", extra=True)
    assert len({key(), key(dtype=BF16), key(second=True)}) == 3


def test_modes_and_knobs():
    g = graphs.new()
    product(g).set_output()
    facts = epilogues.EpilogueFacts("product", Subgraph(lowered(g), (0,)))
    own = CudnnEngine()
    listed = [plans.Proposed(plans.CudnnKnobs(n), heur_mode.A) for n in range(20)]
    listed += [
        plans.Proposed(plans.CudnnKnobs(20), heur_mode.B),
        plans.Proposed(plans.CudnnKnobs(1, "A=1"), heur_mode.A),
    ]
    last = plans.Proposed(plans.CudnnKnobs(30), heur_mode.FALLBACK)
    own._answers[engine._key(facts.subgraph), H200] = (*listed, last)
    numbers = {mode: [k.engine for k in own.propose(facts, H200, mode)] for mode in plans.MODES}
    assert numbers[heur_mode.A] == list(range(engine.MOST)) and numbers[heur_mode.FALLBACK] == [30]
    assert numbers[heur_mode.B] == [*range(21), 1, 30]
    assert own.illegal(facts, plans.CudnnKnobs(1, "A=1"), H200) is None
    assert "cuDNN proposes no such plan" in str(own.illegal(facts, plans.CudnnKnobs(1, "A=2"), H200))
    own._answers[engine._key(facts.subgraph), H200] = (last,)
    assert [list(own.propose(facts, H200, mode)) for mode in plans.MODES] == [[last.knobs]] * 3


def test_float32_products_are_not_rounded():
    for dtype, rounds in ((FLOAT, True), (BF16, False)):
        g = graphs.new()
        y = g.matmul(g.tensor([8, 16], data_type=dtype), g.tensor([16, 4], data_type=dtype))
        g.bias(y, g.tensor([1, 4], data_type=FLOAT)).set_output()
        assert plans.rounds_inputs(Subgraph(lowered(g), (0, 1))) is rounds
