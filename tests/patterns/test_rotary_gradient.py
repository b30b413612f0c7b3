"""The gradient of rotated heads in one kernel with that of their norm: values, same bits for every knob, races."""

import pytest
import torch

from graphfuse import GraphNotSupportedError, heur_mode, norm_forward_phase
from graphfuse.base.device import for_arch
from graphfuse.emulator.compiler import Build
from graphfuse.engines.rows.persistent import PersistentKnobs
from graphfuse.runtime import nvrtc
from graphfuse.testing import machine_code
from support import graphs, oracle
from support.emulation import Planned
from support.graphs import BF16, FLOAT, HALF
from support.losses import INT32
from support.rotary_gradient import RotaryGradient

pytestmark = pytest.mark.emulate


def planned(problem: RotaryGradient, knobs: object = None) -> Planned:
    return Planned(problem.graph("emulator"), problem.inputs() | problem.outputs(), knobs)


KINDS = {
    "half-split": dict(),
    "interleaved": dict(interleaved=True),
    "a part": dict(columns=128, rotary=64),
    "a part, interleaved": dict(columns=80, rotary=32, interleaved=True),
    "pieces that are no power of two": dict(columns=96, rotary=96),
    "widest": dict(columns=256, rotary=256, tokens=9),
    "rows of several warps, interleaved": dict(columns=512, rotary=512, interleaved=True, tokens=3),
    "numbers beyond": dict(beyond=True),
    "numbers beyond, interleaved": dict(beyond=True, interleaved=True, columns=128, rotary=32),
    "one token of one head": dict(tokens=1, heads=1),
    "no tokens": dict(tokens=0),
    "of a packed tensor": dict(stride=512),
    "without a weight": dict(weight=False),
    "float32": dict(dtype=FLOAT),
    "float32, interleaved": dict(dtype=FLOAT, interleaved=True),
    "float16, tables too": dict(dtype=HALF, table=HALF, index=INT32),
    "bfloat16 tables": dict(table=BF16),
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_values(kind):
    problem = RotaryGradient(**kind)
    run = planned(problem)
    assert isinstance(run.part.knobs, PersistentKnobs) is bool(run.part.facts.program.sums)
    run.run()
    problem.hold(run.pack)


@pytest.mark.parametrize("kind", [dict(), dict(beyond=True), dict(dtype=FLOAT, columns=32, rotary=32)], ids=str)
@pytest.mark.parametrize("stages", [1, 3])
def test_threads_that_have_both_columns_of_a_pair_give_the_same_bits(kind, stages):
    problem = RotaryGradient(**kind, tokens=12)
    first = planned(problem)
    first.run()
    run = planned(problem, PersistentKnobs(4, 128, stages, 1, 2))
    assert "GF_DEVICE static void other" in run.source and "gf::swap_halves<" not in run.source
    assert run.check(Build.ADDRESS)["dx"] == first.contents()["dx"]
    run.run()
    problem.hold(run.pack)


@pytest.mark.parametrize("kind", [dict(), dict(interleaved=True, columns=80, rotary=32), dict(beyond=True)], ids=str)
def test_the_reference_engine_has_these_values(kind):
    problem = RotaryGradient(**kind)
    pack = problem.inputs() | problem.outputs()
    graphs.run(problem.graph(), pack, [heur_mode.FALLBACK])
    problem.hold(pack)


@pytest.mark.some(1)
@pytest.mark.parametrize("interleaved", [False, True], ids=["half-split", "interleaved"])
def test_the_same_bits_for_every_knob(interleaved):
    """Of rows; sums over rows are as near as the order of their terms lets them be."""
    problem = RotaryGradient(tokens=20, columns=128, rotary=64, interleaved=interleaved)
    first = planned(problem)
    first.run()
    for threads_per_row, threads, stages, ctas in ((16, 128, 3, 4), (32, 128, 1, 2), (32, 256, 2, 1)):
        run = planned(problem, PersistentKnobs(threads_per_row, threads, stages, 1, ctas))
        run.run()
        assert run.contents()["dx"] == first.contents()["dx"]
        problem.hold(run.pack)


@pytest.mark.parametrize(
    "kind, stages, build",
    [
        (dict(beyond=True), 1, Build.ADDRESS),
        (dict(interleaved=True, columns=80, rotary=32), 3, Build.RACE),
        pytest.param(dict(), 2, Build.RACE, marks=pytest.mark.further),
    ],
    ids=["addresses", "races of copies", "races"],
)
def test_under_sanitizers_in_all_schedules(kind, stages, build):
    """Also of numbers that the table does not have: nothing is read there. CTAs take rows more than once."""
    problem = RotaryGradient(**kind, tokens=12)
    run = planned(problem, PersistentKnobs(16, 128, stages, 1, 2))
    found = run.check(build)
    run.run()
    assert all(found[name] == run.contents()[name] for name in problem.outputs())


@pytest.mark.parametrize(
    "kind",
    [dict(dtype=FLOAT, columns=256, rotary=256), dict(columns=512, rotary=512)],
    ids=["float32", "bfloat16"],
)
def test_of_wide_heads_the_rotation_is_a_kernel_of_its_own(kind):
    problem = RotaryGradient(**kind)
    pack = problem.inputs() | problem.outputs()
    g = problem.graph("emulator")
    graphs.run(g, pack, [heur_mode.OPENSOURCE])
    problem.hold(pack)
    assert [part.engine.name for part in g._planner.at(0).parts] == ["rows", "rows"]


def test_the_text_holds_no_number_of_tokens_or_heads():
    few, many = (planned(RotaryGradient(tokens=t, heads=h)) for t, h in ((4, 3), (6, 5)))
    assert few.part.knobs == many.part.knobs and few.source == many.source


REFUSED = {
    "few pairs": (dict(rotary=24), "12 pairs of 64 columns; accepted: a multiple of 8"),
    "wide heads": (dict(columns=512, rotary=512), "in rows of 512; accepted: up to 256, as a warp has a row"),
    "several warps": (dict(columns=128), "threads_per_row is 64, with 1 pieces each; accepted for pairs of columns"),
}


@pytest.mark.parametrize("kind, message", REFUSED.values(), ids=REFUSED)
def test_what_one_kernel_refuses(kind, message):
    with pytest.raises(GraphNotSupportedError, match=message):
        planned(RotaryGradient(**kind), PersistentKnobs(64, 128, 1, 1, 1))


@pytest.mark.compile
@pytest.mark.parametrize(
    "kind, arch",
    [*((dict(), arch) for arch in ("sm_80", "sm_90a", "sm_120")), (dict(interleaved=True, rotary=64), "sm_100a")],
    ids=str,
)
def test_machine_code_has_no_local_memory(kind, arch):
    problem, device = (
        RotaryGradient(**{"tokens": 4096, "heads": 32, "columns": 128, "rotary": 128} | kind),
        for_arch(arch),
    )
    g = problem.graph("emulator")
    g.validate()
    g.build_operation_graph()
    g.create_execution_plans([heur_mode.OPENSOURCE])
    (part,) = g._planner.at(0).parts
    for knobs in part.engine.propose(part.facts, device, heur_mode.A):
        text = part.engine.source(part.facts, knobs)
        assert machine_code.resources(nvrtc.compile(text, arch, "persistent.cu")).local == 0


def test_statistics_of_heads_that_are_joined():
    """The inverse RMS of queries and of keys, each stored by itself, beside what is rotated."""
    g, counts = graphs.new(device="emulator"), {"q": 3, "k": 2}
    parts = [g.tensor([5, n, 64], data_type=BF16, name=name) for name, n in counts.items()]
    y, inverse = g.rmsnorm(g.join(*parts, 1), None, 1e-5, norm_forward_phase=norm_forward_phase.TRAINING)
    source = graphs.generator("cpu", 0)
    pack = {name: torch.randn(5, n, 64, generator=source).bfloat16() for name, n in counts.items()}
    first = 0
    for name, n in counts.items():
        for t, dtype, columns, of in ((y, BF16, 64, "out"), (inverse, FLOAT, 1, "inverse")):
            part = g.slice(t, [slice(None), slice(first, first + n), slice(None)])
            part.set_output().set_name(f"{name}_{of}").set_data_type(dtype).set_stride([2 * n * columns, columns, 1])
            memory = torch.full((5, 2 * n, columns), 99.0, dtype=torch.bfloat16 if dtype is BF16 else torch.float32)
            pack[f"{name}_{of}"] = memory[:, :n]
        first += n
    run = Planned(g, pack)
    checked = run.check(Build.ADDRESS)
    run.run()
    assert checked == run.contents()
    for name in counts:
        want, exact = oracle.rmsnorm(pack[name], None, 1e-5)
        torch.testing.assert_close(run.pack[f"{name}_inverse"].double(), exact, rtol=1e-6, atol=0)
        torch.testing.assert_close(run.pack[f"{name}_out"].double(), want, rtol=2**-8, atol=1e-5)
        assert (run.pack[f"{name}_inverse"]._base[:, counts[name] :] == 99).all()
