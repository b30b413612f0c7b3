"""Graphs on the emulator: who is asked, what plans are called, what execute computes from CPU tensors."""

import pytest
import torch

import graphfuse
from graphfuse import DeviceError, KernelCompileError, heur_mode, norm_forward_phase
from graphfuse.base.device import EMULATOR
from graphfuse.base.enums import build_plan_policy
from graphfuse.codegen.render import render
from graphfuse.contract.engine import Address, Constant, KernelEngine, Launch, NoKnobs, Scratch
from support import graphs, oracle
from support.graphs import BF16, E4M3, FLOAT, FP4, HALF, Norm

pytestmark = pytest.mark.emulate

OPEN = [heur_mode.OPENSOURCE]


def emulated(case: Norm, device: str = "emulator"):
    g = case.graph(device=device)
    g.build(OPEN)
    return g


CASES = {
    "bf16": Norm(),
    "float with bias": Norm(rows=5, columns=111, input=FLOAT, weight=HALF, output=FLOAT, bias=BF16, training=True),
    "strided": Norm(rows=7, columns=48, input_stride=64, output_stride=50, output=HALF, alignment=2),
    "scalars": Norm(eps=None, factor="device", output=HALF),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_execute(case):
    g = emulated(case)
    values = case.inputs() | case.outputs()
    g.execute(values, graphs.workspace(g.get_workspace_size()))
    exact = case.exact(values)
    want = oracle.rounded(exact["out"], values["out"].dtype)
    assert (values["out"].double() - exact["out"]).abs().max() <= 2.0**-6 * exact["out"].abs().max()
    if case.output is not FLOAT:
        assert oracle.ulps(values["out"], want).max() <= 1
    if case.training:
        torch.testing.assert_close(values["inverse_rms"].double(), exact["inverse_rms"], rtol=1e-6, atol=0)


COLUMNS = 1 << 16
LEAST = 2.0**-63
"""Whose square is the smallest normal float32 number."""


def _sparse() -> torch.Tensor:
    """A mean that is just normal, of few elements; the squares of all others are a few subnormal units."""
    row = torch.full((COLUMNS,), 1.37 * 2.0**-74)
    row[::64] = 8 * LEAST
    return row


EDGES = {
    "the least mean": lambda: torch.full((COLUMNS,), LEAST),
    "the least mean, most squares subnormal": _sparse,
    "small magnitudes of all kinds": lambda: torch.randn(COLUMNS, generator=graphs.generator("cpu", 0)) * 1.5 * LEAST,
    "the largest sum": lambda: torch.full((COLUMNS,), 1.8125 * 2.0**55),
}


@pytest.mark.parametrize("device", ["emulator", "cpu"])
@pytest.mark.parametrize("edge", EDGES.values(), ids=EDGES)
def test_one_ulp_at_the_edges_of_what_is_claimed(edge, device):
    """Epsilon 0; the sum of squares finite in float32, their mean a normal number."""
    x = edge()[None].bfloat16()
    squares = x.double().square()
    assert squares.sum() < torch.finfo(torch.float32).max and squares.mean() >= torch.finfo(torch.float32).tiny
    g = graphs.new(device=device, io_data_type=BF16)
    y, _ = g.rmsnorm(g.tensor(x.shape, name="x"), None, 0.0, norm_forward_phase=norm_forward_phase.INFERENCE)
    y.set_output().set_name("out")
    out = torch.empty_like(x)
    g.build(OPEN if device == "emulator" else [heur_mode.FALLBACK])
    g.execute({"x": x, "out": out}, graphs.workspace(g.get_workspace_size()))
    assert oracle.ulps(out, oracle.rounded(oracle.rmsnorm(x, None, 0.0)[0], torch.bfloat16)).max() <= 1


def test_quantized_outputs_are_those_of_the_float32_result():
    exact = Norm(output=FLOAT)
    inputs = exact.inputs()
    values = inputs | exact.outputs()
    emulated(exact).execute(values)
    for output in (E4M3, FP4):
        case = Norm(output=output, blocks=output is FP4)
        quantized = inputs | case.outputs()
        emulated(case).execute(quantized)
        if output is E4M3:
            want = values["out"].clamp(-448, 448).to(torch.float8_e4m3fn)
            assert torch.equal(quantized["out"].view(torch.uint8), want.view(torch.uint8))
        else:
            assert len(quantized["out"].unique()) > 20 and (quantized["block_scale"] != 0xA5).all()


def test_plans_and_explain_say_so():
    g = emulated(Norm())
    assert g.get_plan_name_at_index(0).startswith("emulator: rows[")
    assert g.get_engine_and_knobs_at_index(0)[0] == "rows"
    text = g.explain()
    assert "on emulator (H200 emulated on the CPU)" in text
    assert "note: emulator: kernels run as C++ on the CPU" in text
    fp8 = Norm(output=E4M3).graph(device="emulator")
    fp8.build(OPEN)
    assert "FP8 conversion: software, bit-identical to the instruction" in fp8.get_numerical_notes_at_index(0)


def test_the_plan_is_that_of_an_h200():
    from graphfuse.base.device import for_arch
    from graphfuse.engines.rows import RowEngine

    g = emulated(Norm(rows=4096, columns=4096))
    part = g._planner.plans[0].parts[0]
    best = RowEngine().propose(part.facts, for_arch("sm_90a"), heur_mode.OPENSOURCE)[0]
    assert part.knobs == best


def by_variable(g, monkeypatch):
    monkeypatch.setenv("GRAPHFUSE_DEVICE", "emulator")
    g.build(OPEN)


def without_handle(case: Norm):
    g = case.graph()
    g.handle = None
    return g


def test_three_spellings_of_one_thing(monkeypatch):
    monkeypatch.delenv("GRAPHFUSE_DEVICE", raising=False)
    case = Norm()
    one, two, three = without_handle(case), without_handle(case), emulated(case)
    one.build(OPEN, engines=["emulator"])
    by_variable(two, monkeypatch)
    results = []
    for g in (one, two, three):
        assert g._planner.device is EMULATOR
        assert g.get_plan_name_at_index(0) == three.get_plan_name_at_index(0)
        values = case.inputs() | case.outputs()
        g.execute(values)
        results.append(values["out"])
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_it_is_not_offered_otherwise(monkeypatch):
    monkeypatch.delenv("GRAPHFUSE_DEVICE", raising=False)
    g = Norm().graph()
    with pytest.raises(graphfuse.GraphNotSupportedError, match="rows: needs a CUDA device or the emulator; got cpu"):
        g.build(OPEN)
    g.build([heur_mode.A])
    assert "emulator:" not in g.explain()


def test_a_handle_for_another_device_is_refused():
    with pytest.raises(
        DeviceError, match=r"the handle is for cpu; accepted: no handle, or create_handle\('emulator'\)"
    ):
        Norm().graph(device="cpu").build(OPEN, engines=["emulator"])


def test_named_engines_beside_it():
    g = without_handle(Norm())
    g.build([heur_mode.A], engines=["emulator", "reference"])
    assert g.get_plan_name_at_index(0) == "reference"
    g.build([heur_mode.A], engines=["emulator"])
    assert g.get_plan_name_at_index(0).startswith("emulator: rows")


def test_every_plan_gives_the_same_bits():
    case = Norm(rows=5, columns=1000)
    g = case.graph(device="emulator")
    g.validate()
    g.build_operation_graph()
    g.create_execution_plans(OPEN)
    g.build_plans(build_plan_policy.ALL)
    found = set()
    for index in range(g.get_execution_plan_count()):
        values = case.inputs() | case.outputs()
        g.execute_plan_at_index(values, None, index)
        found.add(values["out"].view(torch.int16).numpy().tobytes())
    assert g.get_execution_plan_count() > 1 and len(found) == 1


def test_what_no_kernel_takes_runs_on_the_reference_engine():
    g = graphs.new(device="emulator")
    x, w = g.tensor([4, 64], name="x"), g.tensor([1, 64], name="w")
    phase = graphfuse.norm_forward_phase.INFERENCE
    y = g.rmsnorm(g.add(x, x), w, 1e-5, norm_forward_phase=phase)[0].set_output().set_name("y")
    g.reduction(y, mode=graphfuse.reduction_mode.MUL).set_dim([4, 1]).set_output().set_name("out")
    g.build([heur_mode.A])
    assert "reference" in g.get_plan_name_at_index(0) and "rows[" in g.get_plan_name_at_index(0)
    a, b = torch.randn(4, 64), torch.rand(1, 64)
    y, out = torch.empty(4, 64), torch.empty(4, 1)
    g.execute({"x": a, "w": b, "y": y, "out": out}, graphs.workspace(g.get_workspace_size()))
    torch.testing.assert_close(y.double(), oracle.rmsnorm(a + a, b, 1e-5)[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(out.double(), y.double().prod(1, keepdim=True), rtol=1e-5, atol=1e-5)


def test_nothing_to_do_launches_nothing():
    case = Norm(rows=0)
    emulated(case).execute(case.inputs() | case.outputs())


# A third party's engine


class Doubler(KernelEngine):
    """relu(x) on packed float32, through scratch memory, so that every kind of argument is used."""

    name = "doubler"
    modes = frozenset(OPEN)
    entry = "doubler"
    text = """
#include "graphfuse/simt.cuh"
#include "generated.cuh"
extern "C" GF_KERNEL(64) doubler(const float* x, float* scratch, float* out, int small, gf::i64 n, float zero) {
  const gf::i64 i = gf::block_index() * gf::i64(small) + gf::thread_index();
  if (i < n) {
    scratch[i] = x[i] > zero ? x[i] : zero;
    out[i] = scratch[i];
  }
}
"""

    def __init__(self, text: str | None = None):
        from support import toys

        self.facts = toys.Solo
        self.text = text or self.text

    def why_not(self, facts, device):
        return None

    def source(self, facts, knobs):
        return render(self.text, "", "doubler.cu")

    def launch(self, facts: object, knobs: NoKnobs) -> Launch:
        (x,), (out,) = facts.subgraph.inputs, facts.subgraph.outputs
        n = facts.subgraph.graph.tensors[out].elements
        arguments = (
            Address(x),
            Scratch(256),
            Address(out),
            Constant("int32", 64),
            Constant("int64", n),
            Constant("float32", 0.0),
        )
        return Launch(-(-n // 64), 64, arguments, scratch_bytes=256 + 4 * n)


def doubled(engine: Doubler):
    from support import toys

    g = graphs.new(device="emulator")
    g.relu(g.tensor([10, 21], name="x")).set_output().set_name("out")
    g.build(OPEN, patterns=toys.solo("relu"), engines=[engine])
    return g


def test_any_kernel_engine_runs_there():
    g = doubled(Doubler())
    x, out = torch.randn(10, 21), torch.empty(10, 21)
    g.execute({"x": x, "out": out}, graphs.workspace(g.get_workspace_size()))
    assert torch.equal(out, x.relu())
    assert g.get_plan_name_at_index(0) == "emulator: doubler"


def test_a_kernel_with_cudas_own_names_is_a_clear_error():
    raw = Doubler.text.replace("gf::thread_index()", "threadIdx.x")
    with pytest.raises(KernelCompileError, match="kernel 'doubler' does not run on the emulator: it uses threadIdx"):
        doubled(Doubler(raw))


def test_a_kernel_fault_is_a_clear_error():
    text = Doubler.text.replace("  if (i < n) {", "  if (i == 70) gf::barrier();\n  if (i < n) {")
    g = doubled(Doubler(text))
    values = {"x": torch.randn(10, 21), "out": torch.empty(10, 21)}
    with pytest.raises(
        graphfuse.KernelFaultError, match=r"kernel 'doubler' on the emulator: doubler\.cu:\d+: barrier that"
    ):
        g.execute(values, graphs.workspace(g.get_workspace_size()))


def test_handles_and_streams():
    handle = graphfuse.create_handle("emulator")
    assert handle.device is EMULATOR and handle.stream == 0
    case = Norm()
    g = case.graph(device="emulator")
    g.build(OPEN)
    g.execute(case.inputs() | case.outputs(), None, handle)
    with pytest.raises(DeviceError, match=r"planned for emulator \(H200 emulated on the CPU\); the handle is for cpu"):
        g.execute(case.inputs() | case.outputs(), None, graphfuse.create_handle("cpu"))


def test_memory_that_is_not_the_cpus_is_refused():
    case = Norm()
    values = case.inputs() | case.outputs()
    values["x"] = torch.empty(12, 64, dtype=torch.bfloat16, device="meta")
    with pytest.raises(graphfuse.VariantPackError, match="the memory given is on meta; accepted: cpu"):
        emulated(case).execute(values)


def test_threads_take_turns():
    import threading

    case = Norm(rows=40, columns=256)
    g = emulated(case)
    results, want = [], case.inputs() | case.outputs()
    g.execute(want)

    def work():
        values = case.inputs() | case.outputs()
        g.execute(values)
        results.append(torch.equal(values["out"], want["out"]))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert results == [True] * 4
