"""Queries and keys normalized and rotated in one kernel: values, same bits for every knob, races, what is refused."""

import pytest
import torch

from graphfuse import GraphNotSupportedError, heur_mode
from graphfuse.base.device import for_arch
from graphfuse.emulator.compiler import Build
from graphfuse.engines.rows.by_row import ByRowKnobs
from graphfuse.runtime import nvrtc
from graphfuse.testing import machine_code
from support import graphs
from support.emulation import Planned
from support.graphs import BF16, E4M3, FLOAT, HALF
from support.losses import INT32
from support.rotary import Rotary

pytestmark = pytest.mark.emulate


def planned(problem: Rotary, knobs: object = None) -> Planned:
    return Planned(problem.graph("emulator"), problem.inputs() | problem.outputs(), knobs)


KINDS = {
    "half-split": dict(),
    "interleaved": dict(interleaved=True),
    "a part": dict(columns=128, rotary=64),
    "a part, interleaved": dict(columns=80, rotary=32, interleaved=True),
    "pieces that are no power of two": dict(columns=96, rotary=96),
    "wide": dict(columns=256, rotary=128),
    "widest": dict(columns=512, rotary=512),
    "wide, interleaved": dict(columns=1024, rotary=1024, interleaved=True),
    "backward": dict(inverse=True),
    "backward, interleaved": dict(inverse=True, interleaved=True),
    "rotated alone": dict(norm=False),
    "queries alone": dict(keys=0),
    "queries rotated alone": dict(keys=0, norm=False, interleaved=True),
    "numbers beyond": dict(beyond=True, columns=128),
    "numbers beyond, interleaved": dict(beyond=True, interleaved=True, columns=128),
    "one token": dict(tokens=1),
    "one token of one head": dict(tokens=1, queries=1, keys=1),
    "no tokens": dict(tokens=0),
    "of a packed tensor": dict(stride=512),
    "keys to a cache": dict(slots=9),
    "keys to a cache, interleaved": dict(slots=7, tokens=7, interleaved=True, columns=128, rotary=32),
    "float32": dict(dtype=FLOAT, out=FLOAT),
    "float32, interleaved": dict(dtype=FLOAT, out=FLOAT, interleaved=True),
    "float16": dict(dtype=HALF, out=HALF, table=HALF, index=INT32),
    "bfloat16 tables": dict(table=BF16, index=INT32),
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_values(kind):
    problem = Rotary(**kind)
    run = planned(problem)
    run.run()
    problem.hold(run.pack)


@pytest.mark.parametrize(("columns", "interleaved"), [(64, False), (96, False), (512, False), (64, True), (1024, True)])
def test_a_rotation_that_is_written_out(columns, interleaved):
    """With a cosine and a sine for each column, which heads of a token share."""
    g = graphs.new(device="emulator")
    x = g.tensor([5, 3, columns], data_type=BF16, name="x")
    cos, sin = (g.tensor([5, 1, columns], data_type=FLOAT, name=name) for name in ("cos", "sin"))
    y = g.softmax(x, axis=2)
    g.add(g.mul(y, cos), g.mul(g.turn_pairs(y, interleaved=interleaved), sin)).set_output().set_name("out")
    given = {t.get_name(): torch.randn(t.get_dim()) for t in (cos, sin)} | {"x": torch.randn(5, 3, columns).bfloat16()}
    run = Planned(g, given | {"out": torch.empty(5, 3, columns)})
    run.run()
    wide = given["x"].double().softmax(-1)
    one, two = (wide[..., ::2], wide[..., 1::2]) if interleaved else wide.chunk(2, -1)
    turned = torch.stack((-two, one), -1).flatten(-2) if interleaved else torch.cat((-two, one), -1)
    torch.testing.assert_close(
        run.pack["out"].double(), wide * given["cos"] + turned * given["sin"], rtol=1e-5, atol=1e-6
    )


def test_values_in_fp8():
    """What float32 outputs get, rounded."""
    run, wide = planned(Rotary(out=E4M3)), planned(Rotary(out=FLOAT))
    run.run()
    wide.run()
    for name in ("q_out", "k_out"):
        made = run.pack[name]
        assert torch.equal(made.float(), wide.pack[name].clamp(-448, 448).to(made.dtype).float())


@pytest.mark.parametrize(
    "kind", [dict(), dict(interleaved=True, columns=80, rotary=32), dict(beyond=True), dict(slots=9)], ids=str
)
def test_the_reference_engine_has_these_values(kind):
    problem = Rotary(**kind)
    pack = problem.inputs() | problem.outputs()
    graphs.run(problem.graph(), pack, [heur_mode.FALLBACK])
    problem.hold(pack)


@pytest.mark.some(1)
@pytest.mark.parametrize("interleaved", [False, True], ids=["half-split", "interleaved"])
def test_the_same_bits_for_every_knob(interleaved):
    problem = Rotary(tokens=3, columns=128, rotary=64, interleaved=interleaved)
    first = planned(problem)
    first.run()
    spreads = [(16, 1), (8, 2), (32, 1), (32, 2)]
    for threads_per_row, chunks in spreads:
        for ahead, eviction in ((0, 1), (1, 2)):
            run = planned(problem, ByRowKnobs(threads_per_row, 64, chunks, eviction, ahead))
            run.run()
            assert run.contents() == first.contents()


OWN_PAIRS = {
    "as they are": dict(columns=128, rotary=128),
    "backward": dict(columns=128, rotary=128, inverse=True),
    "rotated alone": dict(columns=128, rotary=128, norm=False),
    "float32": dict(columns=128, rotary=128, dtype=FLOAT, out=FLOAT),
    "keys to a cache": dict(columns=128, rotary=128, slots=9),
    "numbers beyond": dict(columns=128, rotary=128, beyond=True),
    "narrow": dict(columns=16, rotary=16),
    "wide": dict(columns=512, rotary=512),
}


def own_pairs(problem: Rotary, threads: int = 64, ahead: int = 0) -> ByRowKnobs:
    """Knobs of threads that have two pieces of a row, 4 columns each of float32, else 8."""
    return ByRowKnobs(problem.columns // 2 // (4 if problem.dtype is FLOAT else 8), threads, 1, 1, ahead)


@pytest.mark.some(3)
@pytest.mark.parametrize("kind", OWN_PAIRS.values(), ids=OWN_PAIRS)
def test_threads_that_have_both_columns_of_a_pair_give_the_same_bits(kind):
    problem = Rotary(tokens=5, **kind)
    first = planned(problem)
    first.run()
    for ahead in (0, 1):
        run = planned(problem, own_pairs(problem, ahead=ahead))
        assert "GF_DEVICE static void other" in run.source and "gf::swap_halves<" not in run.source
        run.run()
        problem.hold(run.pack)
        assert run.contents() == first.contents()


@pytest.mark.parametrize("build", [Build.ADDRESS, Build.RACE], ids=lambda build: build.name)
@pytest.mark.parametrize(
    "kind", [dict(beyond=True), dict(slots=9), dict(columns=80, rotary=32, interleaved=True)], ids=str
)
def test_under_sanitizers_in_all_schedules(kind, build):
    """Also of numbers that the table does not have: nothing is read there."""
    problem = Rotary(**kind)
    run = planned(problem)
    found = run.check(build)
    run.run()
    assert all(found[name] == run.contents()[name] for name in problem.outputs())


@pytest.mark.parametrize("build", [Build.ADDRESS, Build.RACE], ids=lambda build: build.name)
@pytest.mark.parametrize("own", [False, True], ids=["lanes", "own"])
def test_in_place(build, own):
    """Other lanes' columns, or those of the other piece, are what is in registers, so that a row may be written where
    it was read."""
    problem = Rotary(stride=512, tokens=9)
    apart = planned(problem)
    apart.run()
    run = planned(problem, own_pairs(problem) if own else None)
    for name in problem.heads:
        run.pack[f"{name}_out"] = run.pack[name]
    made = run.check(build)
    for name in problem.heads:
        assert made[f"{name}_out"] == made[name]
    run.run()
    for name in problem.heads:
        assert (run.pack[name] == apart.pack[f"{name}_out"]).all()


@pytest.mark.parametrize("kind", [dict(), dict(norm=False, interleaved=True), dict(tokens=1)], ids=str)
def test_one_kernel(kind):
    g = Rotary(**kind).graph("emulator")
    g.validate()
    g.build_operation_graph()
    g.create_execution_plans([heur_mode.OPENSOURCE])
    assert len(g._planner.at(0).parts) == 1


def test_the_text_holds_no_number_of_tokens_or_heads():
    few, many = (planned(Rotary(tokens=t, queries=q, keys=k)) for t, q, k in ((4, 3, 2), (6, 5, 1)))
    assert few.part.knobs == many.part.knobs and few.source == many.source


def test_one_token_has_the_kernel_of_many():
    one, many = planned(Rotary(tokens=1)), planned(Rotary(tokens=4))
    assert one.part.knobs == many.part.knobs and one.source == many.source


REFUSED = {
    "few pairs": (dict(rotary=24), "12 pairs of 64 columns; accepted: a multiple of 8"),
    "few pairs, interleaved": (dict(rotary=12, interleaved=True), "6 pairs of 64 columns; accepted: a multiple of 4"),
    "long rows": (dict(columns=1024, rotary=1024), "in rows of 1024; accepted: up to 512, as a warp has a row"),
    "odd columns": (dict(columns=33, rotary=32), "pairs of columns, in rows of 33; accepted: an even number"),
}


@pytest.mark.parametrize("kind, message", REFUSED.values(), ids=REFUSED)
def test_refused(kind, message):
    g = Rotary(**kind).graph("emulator")
    g.validate()
    g.build_operation_graph()
    with pytest.raises(GraphNotSupportedError, match=message):
        g.create_execution_plans([heur_mode.OPENSOURCE])


KNOBS = {
    "too many threads": (
        ByRowKnobs(64, 128),
        "threads_per_row is 64, with 1 pieces each; accepted for pairs of columns",
    ),
    "large pieces": (ByRowKnobs(4, 128, 4), "pieces have 32 columns; accepted with pairs: up to 16"),
}


@pytest.mark.parametrize("knobs, message", KNOBS.values(), ids=KNOBS)
def test_knobs_that_are_refused(knobs, message):
    with pytest.raises(GraphNotSupportedError, match=message):
        planned(Rotary(columns=128, rotary=128), knobs)


def test_two_pieces_of_different_pairs_are_refused():
    message = "threads_per_row is 8, with 2 pieces each; accepted .* up to 32, with one piece, or with two of the same"
    with pytest.raises(GraphNotSupportedError, match=message):
        planned(Rotary(columns=128, rotary=64), ByRowKnobs(8, 128))


@pytest.mark.compile
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a", "sm_120"])
@pytest.mark.parametrize("kind", [dict(), dict(rotary=64), dict(interleaved=True), dict(slots=9)], ids=str)
def test_machine_code_has_no_local_memory(kind, arch):
    run, device = planned(Rotary(**{"columns": 128, "rotary": 128} | kind)), for_arch(arch)
    engine, facts = run.part.engine, run.part.facts
    for knobs in engine.propose(facts, device, heur_mode.A):
        assert machine_code.resources(nvrtc.compile(engine.source(facts, knobs), arch, "by_row.cu")).local == 0
