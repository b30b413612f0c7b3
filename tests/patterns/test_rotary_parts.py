"""Parts of rows whose pairs of columns are rotated, as heads behind a norm over all of them: one kernel, the same bits
with any knobs; what is refused, and bugs that are planted into it."""

import contextlib
from dataclasses import dataclass

import pytest
import torch

from graphfuse import GraphNotSupportedError, data_type, heur_mode, norm_forward_phase
from graphfuse.base.device import for_arch
from graphfuse.base.errors import KernelFaultError
from graphfuse.emulator.compiler import Build
from graphfuse.engines.rows import RowEngine
from graphfuse.engines.rows.by_row import ByRowKnobs
from graphfuse.engines.rows.persistent import PersistentKnobs
from graphfuse.runtime import nvrtc
from graphfuse.testing import machine_code
from support import graphs, oracle
from support.bugs import ADDRESS, WRONG, Bug, assert_caught, each, plant
from support.emulation import Planned
from support.graphs import BF16, FLOAT, HALF, TORCH

EPS, POSITIONS = 1e-5, 11


@dataclass(frozen=True)
class Parts:
    """RMSNorm over all heads of each of `samples` x `tokens`, with weights, and a rotation of each head.

    rotary: columns of a head that are in pairs. gathered: whether cosines and sines are rows of a table that numbers
    choose, of which the first two tokens ask for one beyond either end if `beyond`. keys: whether there are keys, too,
    which are joined to queries along a further axis. packed: whether tensors are parts of wider ones. apart: elements
    that results have between heads.
    """

    heads: int = 3
    columns: int = 64
    rotary: int = 64
    interleaved: bool = False
    inverse: bool = False
    gathered: bool = True
    beyond: bool = False
    keys: bool = False
    packed: bool = False
    apart: int = 0
    samples: int = 2
    tokens: int = 5
    dtype: data_type = BF16
    out: data_type = FLOAT

    @property
    def names(self) -> str:
        return "qk" if self.keys else "q"

    @property
    def shape(self) -> tuple[int, ...]:
        return (1, self.samples, self.tokens, self.heads, self.columns)

    @property
    def width(self) -> int:
        return self.heads * self.columns

    def graph(self, device: str = "emulator"):
        g, half, whole = graphs.new(device=device), self.rotary // 2, slice(None)
        pack = self.inputs()
        given = {n: g.tensor([*pack[n].shape], [*pack[n].stride()], self.dtype, name=n) for n in self.names}
        weights = [g.tensor([1, 1, 1, self.width], data_type=self.dtype, name=f"{n}_weight") for n in self.names]
        x, weight = given["q"], weights[0]
        if self.keys:
            x, weight = g.join(x, given["k"], 0), g.join(*weights, 0)
        several = (len(self.names), *self.shape[1:])
        rows = g.reshape(x).set_dim((*several[:-2], self.width))
        y = g.mul(g.rmsnorm(rows, None, EPS, norm_forward_phase=norm_forward_phase.INFERENCE)[0], weight)
        if self.gathered:
            table = g.tensor([POSITIONS, 1, 1, 1, self.rotary], data_type=FLOAT, name="table")
            index = g.tensor([1, self.samples, self.tokens, 1, 1], data_type=data_type.INT64, name="index")
            halves = (g.slice(table, [whole] * 4 + [part]) for part in (slice(half), slice(half, None)))
            cos, sin = (g.gather_rows(part, index) for part in halves)
        else:
            cos, sin = (g.tensor([1, 1, self.tokens, 1, half], data_type=FLOAT, name=n) for n in ("cos", "sin"))
        y = g.rotate_pairs(g.reshape(y).set_dim(several), cos, sin, interleaved=self.interleaved, inverse=self.inverse)
        for k, name in enumerate(self.names):
            out = g.slice(y, [slice(k, k + 1)] + [whole] * 4) if self.keys else y
            stride = [*self.outputs()[f"{name}_out"].stride()]
            out.set_output().set_name(f"{name}_out").set_data_type(self.out).set_dim(self.shape).set_stride(stride)
        return g

    def inputs(self) -> dict[str, torch.Tensor]:
        source = graphs.generator("cpu", self.columns)

        def random(*shape):
            return torch.randn(*shape, generator=source)

        wide = random(*self.shape[:-2], (2 + self.packed) * self.width).to(TORCH[self.dtype])
        parts = (t.unflatten(-1, self.shape[-2:]) for t in wide.split(self.width, dim=-1))
        pack = {name: part if self.packed else part.contiguous() for name, part in zip(self.names, parts, strict=False)}
        pack |= {f"{n}_weight": random(1, 1, 1, self.width).to(TORCH[self.dtype]) for n in self.names}
        if not self.gathered:
            return pack | {n: random(1, 1, self.tokens, 1, self.rotary // 2) for n in ("cos", "sin")}
        index = torch.randint(POSITIONS, (1, self.samples, self.tokens, 1, 1), generator=source)
        if self.beyond:
            index[0, 0, :2, 0, 0] = torch.tensor([-1, POSITIONS])
        return pack | {"table": random(POSITIONS, 1, 1, 1, self.rotary), "index": index}

    def outputs(self) -> dict[str, torch.Tensor]:
        columns, heads = self.columns + self.apart, (1 + 2 * self.packed) * self.heads
        made = (torch.full((*self.shape[:-2], heads, columns), 99.0).to(TORCH[self.out]) for _ in self.names)
        return {f"{n}_out": t[..., : self.heads, : self.columns] for n, t in zip(self.names, made, strict=True)}

    def exact(self, pack) -> dict[str, torch.Tensor]:
        """In float64, token by token."""
        made = {}
        for name in self.names:
            rows = []
            for sample in range(self.samples):
                for token in range(self.tokens):
                    x = pack[name][0, sample, token].double()
                    y = x / (x.square().mean() + EPS).sqrt() * pack[f"{name}_weight"].view(x.shape).double()
                    cos, sin = (t.expand(self.heads, -1) for t in self._angles(pack, sample, token))
                    rows.append(oracle.rotated(y, cos, -sin if self.inverse else sin, self.interleaved))
            made[f"{name}_out"] = torch.stack(rows).view(self.shape) if rows else pack[name].double()
        return made

    def _angles(self, pack, sample: int, token: int):
        if not self.gathered:
            return pack["cos"][0, 0, token, 0], pack["sin"][0, 0, token, 0]
        number = int(pack["index"][0, sample, token])
        row = pack["table"][number].flatten() if 0 <= number < POSITIONS else torch.full((self.rotary,), torch.nan)
        return row.chunk(2)

    def planned(self, knobs: object = None) -> Planned:
        """On the emulator, in one kernel."""
        return Planned(self.graph(), self.inputs() | self.outputs(), knobs)

    def hold(self, pack) -> None:
        step = {FLOAT: 2**-17, HALF: 2**-9, BF16: 2**-7}[self.out]
        for name, want in self.exact(pack).items():
            torch.testing.assert_close(pack[name].double(), want, rtol=step, atol=step, equal_nan=True)


KINDS = {
    "plain": dict(),
    "a part of each head": dict(columns=128, rotary=32),
    "pairs that are no power of two": dict(rotary=48),
    "narrow": dict(columns=16, rotary=16, heads=5),
    "widest": dict(columns=512, rotary=512, heads=2),
    "one head": dict(heads=1),
    "of WAN": dict(heads=12, columns=128, rotary=128, keys=True),
    "longer rows than threads": dict(heads=40, columns=128, rotary=128),
    "backward": dict(inverse=True),
    "cosines of each token": dict(gathered=False),
    "a part by cosines of each token": dict(gathered=False, rotary=32),
    "numbers beyond": dict(beyond=True, columns=128),
    "queries and keys": dict(keys=True),
    "of a packed tensor": dict(keys=True, packed=True),
    "one token": dict(samples=1, tokens=1, keys=True),
    "no tokens": dict(tokens=0, keys=True),
    "bfloat16": dict(out=BF16, keys=True),
    "float16": dict(dtype=HALF, out=HALF),
    "float32": dict(dtype=FLOAT),
}


@pytest.mark.emulate
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_values(kind, interleaved):
    problem = Parts(**kind, interleaved=interleaved)
    run = problem.planned()
    run.run()
    problem.hold(run.pack)


@pytest.mark.emulate
def test_interleaved_parts_may_have_any_number_of_pieces():
    problem = Parts(columns=96, rotary=48, interleaved=True)
    run = problem.planned()
    run.run()
    problem.hold(run.pack)


@pytest.mark.parametrize("kind", [dict(), dict(interleaved=True, rotary=32), dict(gathered=False, keys=True)], ids=str)
def test_the_reference_computes_the_same(kind):
    problem = Parts(**kind)
    pack = problem.inputs() | problem.outputs()
    graphs.run(problem.graph("cpu"), pack, [heur_mode.FALLBACK])
    problem.hold(pack)


@pytest.mark.emulate
def test_halves_that_are_turned_with_a_cosine_for_each_column():
    g = graphs.new(device="emulator")
    x, (cos, sin) = (
        g.tensor([5, 256], data_type=BF16, name="x"),
        (g.tensor([5, 1, 64], data_type=FLOAT, name=n) for n in ("cos", "sin")),
    )
    parts = g.reshape(g.softmax(x, axis=1)).set_dim((5, 4, 64))
    g.add(g.mul(parts, cos), g.mul(g.turn_pairs(parts), sin)).set_output().set_name("y").set_data_type(FLOAT)
    pack = {"x": torch.randn(5, 256).bfloat16(), "y": torch.zeros(5, 4, 64)}
    pack |= {n: torch.randn(5, 1, 64) for n in ("cos", "sin")}
    Planned(g, pack).run()
    y = pack["x"].double().softmax(-1).view(5, 4, 64)
    turned = torch.cat((-y[..., 32:], y[..., :32]), -1)
    torch.testing.assert_close(pack["y"].double(), y * pack["cos"] + turned * pack["sin"], rtol=1e-5, atol=1e-6)


def cached(gap: int):
    """Heads of rows that are written to slots of a cache by number, with so many elements between heads."""
    g = graphs.new(device="emulator")
    x, slot = (
        g.tensor([5, 256], data_type=BF16, name="x"),
        g.tensor([5, 1, 1], data_type=data_type.INT64, name="slot"),
    )
    cos, sin = (g.tensor([5, 1, 32], data_type=FLOAT, name=n) for n in ("cos", "sin"))
    y = g.rmsnorm(x, None, EPS, norm_forward_phase=norm_forward_phase.INFERENCE)[0]
    out = g.scatter_rows(g.rotate_pairs(g.reshape(y).set_dim((5, 4, 64)), cos, sin), slot)
    pack = {"x": torch.randn(5, 256).bfloat16(), "cos": torch.randn(5, 1, 32), "sin": torch.randn(5, 1, 32)}
    pack |= {"slot": torch.tensor([3, -1, 0, 7, 5]).view(5, 1, 1), "y": torch.full((8, 4, 64 + gap), 7.0)[..., :64]}
    out.set_dim([8, 4, 64]).set_stride([*pack["y"].stride()]).set_output().set_name("y").set_data_type(FLOAT)
    return g, pack


@pytest.mark.emulate
def test_heads_are_written_to_a_cache_by_number():
    g, pack = cached(gap=0)
    Planned(g, pack).run()
    want = torch.full((8, 4, 64), 7.0).double()
    for token, slot in enumerate((3, -1, 0, 7, 5)):
        if slot >= 0:
            x = pack["x"][token].double()
            heads = (x / (x.square().mean() + EPS).sqrt()).view(4, 64)
            angles = (pack[n][token].expand(4, -1) for n in ("cos", "sin"))
            want[slot] = oracle.rotated(heads, *angles)
    torch.testing.assert_close(pack["y"].double(), want, rtol=1e-5, atol=1e-5)


KNOBS = [
    ByRowKnobs(64, 64),
    ByRowKnobs(64, 64, 2),
    ByRowKnobs(128, 128, 1, 0, 1),
    ByRowKnobs(128, 64),
    ByRowKnobs(32, 64),
    PersistentKnobs(64, 128, 1, 1, 4),
    PersistentKnobs(64, 128, 3, 1, 4),
    PersistentKnobs(128, 64, 1, 1, 4),
]


@pytest.mark.emulate
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("columns, rotary", [(64, 64), (128, 32), (128, 128)])
@pytest.mark.parametrize("knobs", KNOBS, ids=str)
def test_bits_are_the_same_with_any_knobs(knobs, columns, rotary, interleaved):
    problem = Parts(512 // columns, columns, rotary, interleaved)
    run, other = problem.planned(knobs), problem.planned()
    run.run(), other.run()
    problem.hold(run.pack)
    assert run.contents() == other.contents()


@pytest.mark.emulate
@pytest.mark.parametrize("build", [Build.ADDRESS, Build.RACE], ids=lambda build: build.name)
@pytest.mark.parametrize("kind", [dict(beyond=True, rotary=32), dict(keys=True, packed=True)], ids=str)
def test_under_sanitizers_in_all_schedules(kind, build):
    problem = Parts(**kind)
    run = problem.planned()
    found = run.check(build)
    run.run()
    assert all(found[name] == run.contents()[name] for name in problem.outputs())


@pytest.mark.emulate
@pytest.mark.parametrize("build", [Build.ADDRESS, Build.RACE], ids=lambda build: build.name)
@pytest.mark.parametrize("knobs", [None, ByRowKnobs(32, 64)], ids=str)
def test_in_place(build, knobs):
    problem = Parts(keys=True, packed=True, out=BF16, heads=8)
    apart = problem.planned(knobs)
    apart.run()
    run = problem.planned(knobs)
    for name in problem.names:
        run.pack[f"{name}_out"] = run.pack[name]
    run.check(build)
    run.run()
    for name in problem.names:
        assert torch.equal(run.pack[name], apart.pack[f"{name}_out"])


def reason(problem: Parts) -> str:
    """What is said of a graph that is no kernel."""
    g = problem.graph()
    with contextlib.suppress(GraphNotSupportedError):
        assert parts_of(g) > 1
    return g.explain()


def parts_of(g) -> int:
    """Kernels of a graph."""
    g.validate()
    g.build_operation_graph()
    g.create_execution_plans([heur_mode.OPENSOURCE])
    return len(g._planner.at(0).parts)


REFUSED = {
    "few pairs": (dict(rotary=8, keys=True), "4 pairs of 192 columns; accepted: a multiple of 8"),
    "parts that no warp has": (
        dict(columns=96, rotary=96, keys=True),
        "pairs of columns that lie apart, in parts of 96 columns; accepted: a power of two up to 512, as a warp has",
    ),
    "long parts": (
        dict(columns=1024, rotary=1024, keys=True, interleaved=False),
        "pairs of columns that lie apart, in parts of 1024 columns; accepted: a power of two up to 512",
    ),
}


@pytest.mark.parametrize("kind, message", REFUSED.values(), ids=REFUSED)
def test_refused(kind, message):
    assert message in reason(Parts(**kind))


def test_results_with_gaps_between_heads_are_written_by_a_kernel_of_their_own():
    """Rows that are whole heads have one stride between columns; rows of all heads have none."""
    assert parts_of(Parts().graph()) == 1 and parts_of(Parts(apart=8).graph()) == 2
    assert parts_of(cached(gap=0)[0]) == 1 and parts_of(cached(gap=8)[0]) == 2


@pytest.mark.parametrize("interleaved", [False, True])
def test_angles_of_each_part_are_not_read(interleaved):
    g = graphs.new(device="emulator")
    x, (cos, sin) = g.tensor([5, 192], data_type=BF16, name="x"), (g.tensor([5, 3, 32], name=n) for n in ("cos", "sin"))
    parts = g.reshape(g.softmax(x, axis=1)).set_dim((5, 3, 64))
    y = g.rotate_pairs(parts, *(t.set_data_type(FLOAT) for t in (cos, sin)), interleaved=interleaved)
    y.set_output().set_data_type(FLOAT)
    g.validate()
    g.build_operation_graph()
    g.create_execution_plans([heur_mode.OPENSOURCE])
    assert len(g._planner.at(0).parts) == 2
    assert "which has other columns for each part of a row" in str(g.explain())


def test_a_part_is_in_one_warp():
    with pytest.raises(GraphNotSupportedError, match="accepted for pairs that lie apart in parts of 64: parts"):
        Parts(heads=2).planned(ByRowKnobs(8, 64))


def test_tuned_knobs_are_those_of_parts():
    keys = [
        repr(RowEngine().problem(Parts(heads, columns, 32).planned().part.facts).key)
        for heads, columns in ((4, 64), (2, 128), (8, 32))
    ]
    assert len(set(keys)) == 3


def test_the_text_holds_no_number_of_tokens():
    few, many = (Parts(keys=True, samples=s, tokens=t).planned() for s, t in ((2, 5), (3, 4)))
    assert few.part.knobs == many.part.knobs and few.source == many.source


BUGS = {
    "the other half of the row": Bug(
        "gf::swap_halves<8, true>", "gf::swap_halves<16, true>", {ADDRESS: WRONG}, ("", "")
    ),
    "cosines of the next piece": Bug(
        "gf::offset(gf::offset(row.i2, row.i2_far), gf::u32(row.thread + at) % 16u % 8u * 16)",
        "gf::offset(gf::offset(row.i2, row.i2_far), gf::u32(row.thread + at + 1) % 16u % 8u * 16)",
        {ADDRESS: WRONG},
        ("", ""),
    ),
}


def report(planned: Planned, right: dict[str, bytes], build, source: str | None = None) -> str:
    try:
        found = planned.check(build, source)
    except KernelFaultError as fault:
        return str(fault)
    return "" if all(found[name] == want for name, want in right.items()) else WRONG


@pytest.mark.emulate
@pytest.mark.parametrize("name, build", each({name: (None, bug) for name, bug in BUGS.items()}), ids=str)
def test_planted_bugs_are_found(name, build):
    planned, bug = Parts(heads=4).planned(ByRowKnobs(32, 64)), BUGS[name]
    planned.run()
    right = planned.contents()
    assert_caught(bug, report(planned, right, build, plant(planned.source, bug)), build, {})
    assert not report(planned, right, build)


@pytest.mark.compile
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a", "sm_120"])
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_machine_code_has_no_local_memory(interleaved, arch):
    problem = Parts(heads=12, columns=128, rotary=128, keys=True, interleaved=interleaved, out=BF16)
    run, device = problem.planned(), for_arch(arch)
    engine, facts = run.part.engine, run.part.facts
    for knobs in engine.propose(facts, device, heur_mode.A):
        assert machine_code.resources(nvrtc.compile(engine.source(facts, knobs), arch, "by_row.cu")).local == 0
