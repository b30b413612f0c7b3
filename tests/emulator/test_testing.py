"""``graphfuse.testing``: what is right passes, and every planted mistake is found."""

import collections
import contextlib
import ctypes
import functools
import importlib
import itertools
import re

import pytest
from typer.testing import CliRunner

from graphfuse import (
    CheckFailedError,
    DeviceError,
    GraphTypeError,
    GraphValidationError,
    SettingError,
    ToolkitNotFoundError,
    cli,
    data_type,
    heur_mode,
    norm_forward_phase,
    pygraph,
    testing,
)
from graphfuse.base.device import EMULATOR
from graphfuse.contract.engine import HostEngine, No, NoKnobs
from graphfuse.ops import OPS
from graphfuse.runtime import nvrtc, toolkit
from graphfuse.runtime.record import no_gpu
from graphfuse.testing import Report
from graphfuse.testing.acceptance import accepted_cases
from graphfuse.testing.machine_code import CompiledResources, resources
from graphfuse.testing.subject import subject_of
from graphfuse.testing.variants import cases
from support import cubin
from support import wrong_plugins as wrong

pytestmark = [pytest.mark.emulate, pytest.mark.xdist_group("testing")]

checked = functools.partial(testing.check, problems=24, programs=4, random=4, architectures=(), raises=False)

VALUES, RACES = "values, AddressSanitizer", "races, ThreadSanitizer"


def test_what_is_right_passes():
    report = checked((wrong.PATTERN, wrong.Right()))
    assert report.ok, str(report)
    assert {line.stage: line.passed for line in report.lines}[VALUES] == 24
    assert {line.stage: line.passed for line in report.lines}[RACES] == 4
    assert any("`serves.compute`" in reason for reason in report.declined)
    assert str(report).startswith("pattern 'staged_add_relu', engine 'staged_add_relu': passed\nstage ")


def test_moves_have_variants_of_other_sizes():
    """Of which slices and shapes are attributes."""
    g = pygraph(io_data_type=data_type.FLOAT)
    x, numbers = g.tensor([8, 1, 64], name="x"), g.tensor([16, 1], name="numbers", data_type=data_type.INT64)
    flat = g.reshape(g.slice(x, [slice(None)] * 3)).set_dim([8, 64])
    normalized = g.rmsnorm(flat, epsilon=1e-5, norm_forward_phase=norm_forward_phase.INFERENCE)[0].set_output()
    g.gather_rows(normalized, g.slice(numbers, [slice(0, 8), slice(None)])).set_output()
    report = checked(g, problems=12)
    assert report.ok and report.lines, str(report)


def silu_of_norm():
    g = pygraph("block", io_data_type=data_type.BFLOAT16, intermediate_data_type=data_type.FLOAT)
    x, w = g.tensor([8, 64], name="x"), g.tensor([1, 64], name="w")
    g.swish(g.rmsnorm(x, w, 1e-5, norm_forward_phase=norm_forward_phase.INFERENCE)[0]).set_output()
    return g


def test_gradients_and_the_kernels_of_backward():
    report = checked(silu_of_norm(), problems=4)
    assert report.ok, str(report)
    passed = {line.stage: line.passed for line in report.lines}
    assert passed["gradients, in float64"] == 1 and passed["gradients, kernels"] >= 1


def test_a_wrong_rule_is_found(monkeypatch):
    monkeypatch.setitem(OPS["swish"].vjp, "input", lambda p: p.grad)
    report = checked(silu_of_norm(), problems=4)
    (finding,) = report.findings
    assert finding.stage == "gradients, in float64" and "its gradient says" in finding.what


def test_a_graph_without_gradients_has_a_line_that_says_why():
    g = pygraph("flags", io_data_type=data_type.FLOAT)
    g.mul(g.cmp_gt(g.tensor([8, 64], name="x"), 0.0), 2.0).set_output()
    (line,) = (line for line in checked(g, problems=4).lines if "gradients" in line.stage)
    assert (line.passed, line.failed) == (0, 0) and line.note.startswith("1 graph has none: ")


WRONG = {
    wrong.LayoutOrder: (VALUES, "elements are wrong"),
    wrong.RoundingIgnored: (VALUES, "elements are wrong"),
    wrong.NumberMisread: (VALUES, "elements are wrong"),
    wrong.TailLost: (VALUES, "are NaN, as memory is before it is written"),
    wrong.TailOverrun: (VALUES, "heap-buffer-overflow"),
    wrong.NegativeGrid: ("planning", "grid is -3; accepted"),
    wrong.WrongArgument: (VALUES, "heap-buffer-overflow"),
    wrong.HalfOfTheThreads: (VALUES, "elements are wrong"),
    wrong.Raises: ("planning", "why_not .* raised KeyError: 'oops'"),
    wrong.Declines: ("coverage", "no problem was accepted"),
    wrong.DoesNotCompile: (VALUES, "maximum"),
}


@pytest.mark.parametrize("engine", WRONG, ids=lambda e: e.__name__)
def test_a_planted_mistake_is_found(engine):
    stage, what = WRONG[engine]
    with pytest.raises(CheckFailedError, match=f"(?s)FAILED.*{what}") as error:
        checked((wrong.PATTERN, engine()), raises=True)
    assert isinstance(error.value, AssertionError) and isinstance(error.value.report, Report)
    assert stage in {finding.stage for finding in error.value.report.findings}


@pytest.mark.parametrize(("right", "mistaken"), [("gf::rounded<Total>", ""), ("i < n", "i <= n")])
def test_the_test_that_new_plugin_writes_finds_a_mistake(right, mistaken, tmp_path, monkeypatch):
    """As many problems and kernels as there: kernels of what is declared come before those of other types."""
    name = f"scaffold_{len(mistaken)}"
    assert CliRunner().invoke(cli.app, ["new-plugin", name, "--folder", str(tmp_path / name)]).exit_code == 0
    kernel = tmp_path / name / "src" / name / f"{name}.cu"
    kernel.write_text(kernel.read_text().replace(right, mistaken))
    monkeypatch.syspath_prepend(tmp_path / name / "src")
    plugin = importlib.import_module(name)
    (numbers,) = re.findall(r"check\(.*?, (.*)\)\)", (tmp_path / name / "tests" / f"test_{name}.py").read_text())
    given = {argument: int(value) for argument, value in re.findall(r"(\w+)=(\d+)", numbers)}
    report = testing.check((plugin.PATTERN, plugin.ENGINE), **given, architectures=(), raises=False)
    assert {f.stage for f in report.findings} == {VALUES}, str(report)
    assert "declares in `serves`" not in str(report)


@pytest.mark.compile
def test_machine_code_that_spills_is_found():
    pytest.importorskip("cuda.core")
    report = checked((wrong.PATTERN, wrong.Spills()), problems=1, programs=1, architectures=("sm_80", "sm_90a"))
    found = [f for f in report.findings if f.stage == "machine code, no spills"]
    assert len(found) == len(report.findings) == 2
    assert all("256 bytes of local memory a thread" in f.what for f in found)


@pytest.mark.compile
@pytest.mark.parametrize("engine", [wrong.Right, wrong.Spills])
def test_machine_code_is_read_as_cuobjdump_does(engine):
    (one,) = itertools.islice(_taken(engine()), 1)
    for arch in ("sm_80", "sm_90a", "sm_120"):
        code = nvrtc.compile(engine().source(one.part.facts, one.part.knobs), arch, "kernel.cu")
        used = cubin.usage(code)
        assert resources(code) == CompiledResources(used["REG"], used["STACK"])


def _taken(engine):
    subject = subject_of((wrong.PATTERN, engine), ())
    for case in cases(subject.samples[0], 0, 0):
        yield from accepted_cases(subject, case, EMULATOR, collections.Counter())


def test_no_elf_no_resources():
    with pytest.raises(ValueError, match="not a cubin"):
        resources(b"// ptx")


def test_without_nvrtc_the_report_says_so(monkeypatch):
    def missing():
        raise ToolkitNotFoundError("no NVRTC anywhere")

    monkeypatch.setattr(toolkit, "load", missing)
    report = checked((wrong.PATTERN, wrong.Right()), problems=1, programs=1, architectures=("sm_90a",))
    assert report.ok and "left out: no NVRTC anywhere" in str(report)


@pytest.mark.parametrize(
    ("what", "error", "said"),
    [
        (7, GraphTypeError, "accepted: a pygraph, a Pattern, an Engine"),
        ("nobody", GraphValidationError, "no pattern or engine is named 'nobody'; there are: rows"),
        ((wrong.PATTERN, "rows"), GraphTypeError, "accepted: a pygraph"),
    ],
)
def test_what_cannot_be_checked(what, error, said):
    with pytest.raises(error, match=said):
        testing.check(what)


def test_arguments_are_looked_at_first():
    with pytest.raises(GraphTypeError, match="graphs are pygraphs"):
        testing.check((wrong.PATTERN, wrong.Right()), graphs=[3])
    with pytest.raises(DeviceError, match="benchmark=True.* needs a GPU") if no_gpu() else contextlib.nullcontext():
        testing.check((wrong.PATTERN, wrong.Declines()), benchmark=True, raises=False)
    with pytest.raises(SettingError, match="unknown architecture 'sm_1'"):
        testing.check((wrong.PATTERN, wrong.Right()), architectures=["sm_1"])


def test_a_graph_of_the_users():
    """By all installed engines; norms have scalars, weights and places where results are rounded."""
    graph = pygraph(io_data_type=data_type.BFLOAT16, intermediate_data_type=data_type.FLOAT)
    x, weight = graph.tensor([8, 64], name="x"), graph.tensor([1, 64], name="weight")
    norm = graph.rmsnorm(x, weight, 1e-5, norm_forward_phase=norm_forward_phase.INFERENCE)[0]
    graph.swish(norm).set_output()
    report = checked(graph, problems=6, programs=2)
    assert report.ok, str(report)
    assert {line.stage: line.passed for line in report.lines}[VALUES] > 1


def test_graphs_that_no_template_draws():
    """A user's graph instead of sample graphs, for a pattern whose captures are of no shape that is guessed."""
    graph = pygraph("given", io_data_type=data_type.FLOAT, intermediate_data_type=data_type.FLOAT)
    a, b = graph.tensor([2, 3, 5], name="a"), graph.tensor([2, 3, 5], name="b")
    graph.relu(graph.add(a, b)).set_output()
    report = checked((wrong.PATTERN, wrong.Right()), graphs=[graph], problems=8, programs=1)
    assert report.ok, str(report)
    assert all("staged_add_relu (a" not in f.case for f in report.findings)


def test_an_engine_of_python():
    """It is run as execute runs it, on the CPU; a wrong one is found."""

    class Host(HostEngine[wrong.Facts, NoKnobs]):
        name, facts, modes = "host_add_relu", wrong.Facts, frozenset({heur_mode.A})
        factor = 1.0

        def why_not(self, facts, device):
            same = facts.a.dim == facts.b.dim and device.kind == "cpu"
            floats = {t.dtype for t in (facts.a, facts.b, facts.output)} == {data_type.FLOAT}
            return None if same and floats else No("accepted: the CPU, FLOAT, one shape")

        def run(self, facts, knobs, device, buffers, stream):
            sizes = ctypes.c_float * facts.output.elements
            a, b, out = (sizes.from_address(buffers.address(t.id)) for t in (facts.a, facts.b, facts.output))
            for i in range(len(out)):
                out[i] = max(a[i] + b[i], 0.0) * self.factor

    report = checked((wrong.PATTERN, Host()))
    assert report.ok and {line.stage: line.passed for line in report.lines}["values, as execute runs it"] > 8
    Host.factor = 1.001
    report = checked((wrong.PATTERN, Host()))
    assert [f.stage for f in report.findings] == ["values, as execute runs it"] * 3


def test_a_race_is_found():
    """By results that depend on the order of threads, or by ThreadSanitizer."""
    report = checked((wrong.PATTERN, wrong.Race()), programs=1)
    assert not report
    assert any("depend on the order" in f.what or "data race" in f.what for f in report.findings), str(report)
