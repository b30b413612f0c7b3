"""What is wrong with a launch is said when planning, before anything is compiled or run."""

import dataclasses
import re
import warnings

import pytest
import torch

from graphfuse import KernelFaultError, PluginError, heur_mode
from graphfuse.base.device import ARCHES, CPU, EMULATOR, for_arch
from graphfuse.codegen.render import render
from graphfuse.contract import signature
from graphfuse.contract.engine import (
    Address,
    ByRows,
    Constant,
    HostScalar,
    KernelEngine,
    Launch,
    NoKnobs,
    RowCount,
    Scratch,
)
from graphfuse.contract.launch_limits import fault, largest_cluster
from graphfuse.emulator.check import check
from graphfuse.op_graph.lower import lower
from graphfuse.planning import plan
from graphfuse.planning import registry as plugins
from support import graphs, toys

H200 = for_arch("sm_90a")
FINE = Launch(
    4, 256, (Constant("int32", 7),), cluster=2, shared_bytes=1024, scratch_bytes=512, by_rows=ByRows(4, 2, cluster=2)
)
TEXT = """
#include "graphfuse/simt.cuh"
#include "generated.cuh"
extern "C" GF_KERNEL(64) halved(const float* x, /* of x, and */ float* out, gf::i64 n) {
  const gf::i64 i = gf::block_index() * gf::i64(64) + gf::thread_index();
  if (i < n) out[i] = x[i] * 0.5f;
}
"""


def on(device, **changes) -> str | None:
    return fault(dataclasses.replace(FINE, **changes), device)


@pytest.mark.parametrize("device", [H200, EMULATOR], ids=str)
def test_a_launch_that_fits_has_no_fault(device):
    assert fault(FINE, device) is None
    assert on(device, grid=0, by_rows=None) is None
    assert on(device, cluster=1) is None  # CTAs that share rows without being a cluster
    assert on(device, by_rows=None, grid=132, cluster=1, block=1024, cooperative=True) is None
    assert on(device, block=1024, shared_bytes=227 << 10) is None


WRONG = {
    "block of none": ({"block": 0}, "block is 0; accepted: an int, 1 to 1024"),
    "block too large": ({"block": 4096}, "block is 4096; accepted: an int, 1 to 1024"),
    "block of another type": ({"block": 32.0}, "block is 32.0; accepted: an int"),
    "grid below zero": ({"grid": -3}, "grid is -3; accepted: an int, 0 to"),
    "grid of 33 bits": ({"grid": 2**33, "cluster": 1}, "grid is 8589934592; accepted: an int, 0 to"),
    "grid is true": ({"grid": True}, "grid is True; accepted: an int"),
    "no cluster": ({"cluster": 0}, "cluster is 0; accepted: an int, 1 to 16"),
    "cluster too large": ({"cluster": 32}, "cluster is 32; accepted: an int, 1 to 16"),
    "cluster does not divide": ({"grid": 5}, "grid is 5; accepted: a multiple of the cluster's 2"),
    "shared memory": ({"shared_bytes": 10**9}, "shared_bytes is 1000000000; accepted: an int, 0 to 232448"),
    "shared memory below zero": ({"shared_bytes": -1}, "shared_bytes is -1; accepted: an int, 0 to"),
    "scratch below zero": ({"scratch_bytes": -5}, "scratch_bytes is -5; accepted: an int, 0 to"),
    "scratch beyond memory": ({"scratch_bytes": 2**60}, "scratch_bytes is 1152921504606846976; accepted: an int, 0 to"),
    "argument of no kind": ({"arguments": (7,)}, r"arguments\[0\] is 7; accepted: one of Address, HostScalar"),
    "constant type": ({"arguments": (Constant("int8", 1),)}, r"arguments\[0\] .*int8.* a ctype of pointer, int32"),
    "constant too wide": ({"arguments": (Constant("int32", 2**31),)}, "accepted: a value that int32 has"),
    "constant of another type": ({"arguments": (Constant("int64", 0.5),)}, "accepted: a value that int64 has"),
    "constant is text": ({"arguments": (Constant("int64", "7"),)}, "accepted: a value that int64 has"),
    "scratch offset": ({"arguments": (Scratch(513),)}, "Scratch.* an offset of 0 to 512"),
    "row count without rows": ({"by_rows": None, "arguments": (RowCount(),)}, "launches that have by_rows"),
    "rows and grid": ({"grid": 8}, "grid is 8; accepted: 4, as by_rows has for 4 rows"),
    "rows and cluster": ({"by_rows": ByRows(4, 2)}, "by_rows.cluster is 1; accepted: a multiple of the cluster's 2"),
    "rows of no cluster": ({"by_rows": ByRows(4, 2, None)}, "by_rows.cluster is None; accepted: an int"),
    "rows of no number": ({"by_rows": ByRows(4, 0, 2)}, "by_rows.together is 0; accepted"),
    "too many at once": (
        {"grid": 134, "block": 1024, "cluster": 1, "by_rows": None, "shared_bytes": 120 << 10, "cooperative": True},
        "grid is 134 of a cooperative launch .* accepted: 0 to 132",
    ),
}


@pytest.mark.parametrize(("changes", "message"), WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("device", [H200, EMULATOR], ids=str)
def test_the_field_is_named(device, changes, message):
    found = on(device, **changes)
    assert found is not None
    assert re.search(message, found), found


def test_the_emulator_lists_no_more_ctas_than_memory_has_room_for():
    small = dataclasses.replace(EMULATOR, memory_bytes=1 << 30)
    assert "accepted: an int, 0 to 33554432" in fault(Launch(2**26, 32, ()), small)
    assert fault(Launch(2**25, 32, ()), small) is None and fault(Launch(2**26, 32, ()), H200) is None


def test_clusters_of_a_cooperative_launch_are_counted_by_the_driver():
    """It starts fewer. The emulator, which starts all, counts them."""
    launch = Launch(4096, 1024, (), cluster=8, cooperative=True)
    assert fault(launch, H200) is None and "accepted: 0 to 264" in fault(launch, EMULATOR)


@pytest.mark.parametrize("arch", ARCHES)
def test_clusters_by_chip(arch):
    device = for_arch(arch)
    most = {80: 1, 86: 1, 89: 1, 90: 16, 100: 16, 103: 16, 120: 8}[device.sm]
    assert largest_cluster(device) == most
    assert fault(Launch(most, 32, (), cluster=most), device) is None
    assert f"accepted: an int, 1 to {most}" in fault(Launch(2 * most, 32, (), cluster=2 * most), device)
    assert device.memory_bytes >= 48 << 30


# As an engine's


class Halved(KernelEngine):
    """x / 2 for a relu node: wrong, but what launches are refused never runs."""

    name = "halved"
    facts = toys.Solo
    modes = frozenset({heur_mode.OPENSOURCE, heur_mode.A})
    entry = "halved"

    def __init__(self, **changes):
        self.changes = changes

    def why_not(self, facts, device):
        return None

    def source(self, facts, knobs):
        return render(TEXT, "", "halved.cu")

    def launch(self, facts: toys.Solo, knobs: NoKnobs) -> Launch:
        (x,), (out,) = facts.subgraph.inputs, facts.subgraph.outputs
        n = facts.subgraph.graph.tensors[out].elements
        return dataclasses.replace(
            Launch(-(-n // 64), 64, (Address(x), Address(out), Constant("int64", n))), **self.changes
        )


def relu(**changes):
    g = graphs.new(device="emulator")
    g.tanh(g.relu(g.tensor([100], name="x"))).set_output().set_name("out")
    g.build([heur_mode.A], patterns=toys.solo("relu"), engines=[Halved(**changes)])
    return g


REFUSED = {
    "block": ({"block": 0}, "block is 0"),
    "grid": ({"grid": -3}, "grid is -3"),
    "scratch": ({"scratch_bytes": 2**60}, "scratch_bytes is"),
    "another node's tensor": ({"arguments": (Address(2),)}, r"Address\(tensor=2\); accepted: the id .* 0 \('x'\), 1 "),
    "no tensor": ({"arguments": (Address(77),)}, r"Address\(tensor=77\); accepted: the id of a tensor in memory"),
    "a tensor as a number": ({"arguments": (HostScalar(0),)}, "passed by value that the nodes .*: there is none"),
    "cleared": ({"cleared": (0,)}, "cleared has 0; accepted: the id of a tensor of 4 bytes .*: there is none"),
    "too few": ({"arguments": (Address(0),)}, r"arguments are 1; accepted: 3, as the .*: halved\(const float\* x, fl"),
    "too many": ({"arguments": (Address(0), Address(1), Scratch(), RowCount())}, r"arguments\[3\] is RowCount"),
    "another type": (
        {"arguments": (Address(0), Address(1), Constant("int32", 100))},
        r"arguments\[2\] is .*, passed as int32; accepted: int64, for the kernel's parameter 'gf::i64 n'",
    ),
    "a number for an address": (
        {"arguments": (Address(0), Constant("float32", 1.0), Constant("int64", 100))},
        "passed as float32; accepted: pointer",
    ),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_an_engine_is_told_before_anything_runs(changes, message):
    with pytest.raises(PluginError, match=f"engine 'halved': launch for relu.0 gave a Launch whose .*{message}"):
        relu(**changes)


@pytest.mark.emulate
def test_a_launch_that_fits_runs():
    g = relu()
    x, out = torch.randn(100), torch.empty(100)
    g.execute({"x": x, "out": out}, graphs.workspace(g.get_workspace_size()))
    assert torch.equal(out, (x / 2).tanh())


def test_chosen_knobs_are_looked_at_too():
    class Wide(Halved):
        name, knobs = "wide", toys.Knobs

        def propose(self, facts, device, mode):
            return (toys.Knobs(64),)

        def launch(self, facts, knobs):
            return dataclasses.replace(super().launch(facts, knobs), block=knobs.size)

    g = graphs.new(device="emulator")
    g.relu(g.tensor([100])).set_output()
    g.validate()
    g.build_operation_graph(patterns=toys.solo("relu"), engines=[Wide()])
    g.create_execution_plans([heur_mode.OPENSOURCE])
    with pytest.raises(PluginError, match="engine 'wide': launch for relu.0 .* block is 2048; accepted"):
        g.create_execution_plan("wide", {"size": 2048})


def test_a_cpu_allows_what_any_chip_does():
    """Engines are planned for it in tests, and nowhere else."""
    assert fault(Launch(4, 256, (), shared_bytes=1), CPU) is None and "cluster is 2" in fault(FINE, CPU)


def test_first_party_launches_fit():
    g = graphs.Norm(rows=1000, columns=4096).graph()
    g.validate()
    graph, known = lower(g._ir), plugins.installed()
    regions, _ = plan.matches(graph, known)
    for arch in ARCHES:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            made = plan.propose(graph, regions, known.engines, for_arch(arch), heur_mode.B, origins=known.origins)
        for part in (p for made_plan in made.plans for p in made_plan.parts if p.engine.name == "rows"):
            assert fault(part.outline, for_arch(arch), part.region.subgraph) is None
            text = part.engine.source(part.facts, part.knobs)
            assert signature.fault(text, part.engine.entry, part.outline) is None
            extra = dataclasses.replace(part.outline, arguments=(*part.outline.arguments, Constant("int32", 0)))
            assert "arguments are" in signature.fault(text, part.engine.entry, extra)
            break


# A kernel's parameters


def told(parameters: str, *arguments, entry: str = "k") -> str | None:
    return signature.fault(
        f'// extern "C"\nextern "C" __global__ void k({parameters}) {{ }}', entry, Launch(1, 1, arguments)
    )


INT, LONG, FLOAT = Constant("int32", 1), Constant("int64", 1), Constant("float32", 1.0)


@pytest.mark.parametrize(
    ("parameters", "arguments"),
    [
        ("", ()),
        ("void", ()),
        ("int n", (INT,)),
        ("const unsigned int n, long long m", (INT, LONG)),
        ("float *__restrict__ a, const float a[], void* const*", (Address(0), Address(1), Scratch())),
        ("int (&a)[3], int b", ()),
        ("void (*f)(int, int)", ()),
        ("Parameters p", (INT, LONG)),
        ("PARAMETERS", (INT, LONG)),
        ("gf::Array<int, 3> a, int b", (INT,)),
        ("unsigned long long address", (Address(0),)),
        ("int a,\n#ifdef X\nint c,\n#endif\nint b", ()),
    ],
)
def test_what_fits_or_is_not_known_is_not_refused(parameters, arguments):
    assert told(parameters, *arguments) is None


@pytest.mark.parametrize(
    ("parameters", "arguments", "message"),
    [
        ("", (INT,), "arguments are 1; accepted: 0"),
        ("int a /* , int c */, int b // , int d\n", (INT,), "arguments are 1; accepted: 2"),
        ("float a", (INT,), "passed as int32; accepted: float32, for the kernel's parameter 'float a'"),
        ("double a", (FLOAT,), "no argument is passed as that"),
        ("const float* a", (INT,), "passed as int32; accepted: pointer"),
        ("int n", (LONG,), "passed as int64; accepted: int32"),
    ],
)
def test_what_does_not_fit_is_named(parameters, arguments, message):
    assert message in told(parameters, *arguments)


def test_another_kernel_is_not_looked_at():
    assert told("int n", LONG, LONG, entry="other") is None


@pytest.mark.emulate
def test_the_checker_says_so_too():
    source = render(TEXT, "", "halved.cu")
    with pytest.raises(KernelFaultError, match="kernel 'halved': the launch's block is 0"):
        check(source, "halved", Launch(1, 0, (Address(0), Address(1), Constant("int64", 4))), {})
    with pytest.raises(KernelFaultError, match="kernel 'halved': the launch's arguments are 2; accepted: 3"):
        check(source, "halved", Launch(1, 64, (Address(0), Address(1))), {})
