"""Parts of rows that are reduced where the rows are, too: one kernel, the same bits with any knobs; what is refused,
and bugs that are planted into it."""

import pytest
import torch

from graphfuse import GraphNotSupportedError, heur_mode, norm_forward_phase, reduction_mode
from graphfuse.base.errors import KernelFaultError
from graphfuse.codegen.render import template
from graphfuse.engines.rows import RowEngine
from graphfuse.engines.rows.by_row import ByRowKnobs
from graphfuse.engines.rows.persistent import PersistentKnobs
from support import graphs
from support.bugs import ADDRESS, RACE, WRONG, Bug, assert_caught, each, plant
from support.emulation import Planned, Varies
from support.graphs import BF16, E4M3, FLOAT, HALF, TORCH

ADD, MAX, AVG = reduction_mode.ADD, reduction_mode.MAX, reduction_mode.AVG


class Parts:
    """The RMS norm of rows, which is written as y, and seen as parts of so many columns."""

    def __init__(self, rows: int, columns: int, part: int, dtype=BF16, x: torch.Tensor | None = None):
        self.g, self.shape = (
            graphs.new(device="emulator", intermediate_rounding="declared"),
            (rows, columns // part, part),
        )
        if x is None:
            x = torch.randn(rows, columns, generator=graphs.generator("cpu", columns)).to(TORCH[dtype])
        self.pack = {"x": x}
        given = self.g.tensor([rows, columns], [columns, 1], dtype, name="x")
        self.norm = self.g.rmsnorm(given, epsilon=1e-5, norm_forward_phase=norm_forward_phase.INFERENCE)[0]
        self.write(self.norm, "y", dtype, (rows, columns))
        self.parts = self.g.reshape(self.norm).set_dim(self.shape)

    def write(self, t, name: str, dtype=FLOAT, shape=None):
        t.set_output().set_name(name).set_data_type(dtype)
        self.pack[name] = torch.zeros(shape or self.shape).to(TORCH[dtype])
        return t

    def reduced(self, values, mode, name: str, dtype=FLOAT):
        """One value of each part, written."""
        dim = (*self.shape[:2], 1)
        return self.write(self.g.reduction(values, mode=mode).set_dim(dim), name, dtype, dim)

    def quantized(self):
        """By the largest magnitude of each part."""
        scale = self.g.max(self.reduced(self.g.abs(self.parts), MAX, "largest"), 1e-4)
        self.write(self.g.div(self.parts, scale), "quantized", E4M3)
        return self

    def run(self, knobs=None) -> torch.Tensor:
        """What y is in parts, in float32."""
        Planned(self.g, self.pack, knobs).run()
        return self.pack["y"].float().view(self.shape)


SIZES = [
    (3, 256, 128),
    (1, 64, 64),
    (3, 128, 128),
    (5, 384, 8),
    (2, 4096, 1024),
    (1, 96, 32),
    (130, 256, 16),
    (2, 40960, 512),
]


@pytest.mark.emulate
@pytest.mark.parametrize("dtype", [BF16, HALF, FLOAT], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_by_the_largest_of_each_part(size, dtype):
    made = Parts(*size, dtype).quantized()
    parts = made.run()
    largest = parts.abs().amax(-1, keepdim=True)
    assert torch.equal(made.pack["largest"], largest)
    wanted = (parts / largest.clamp(min=1e-4)).to(torch.float8_e4m3fn)
    assert torch.equal(made.pack["quantized"].view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.emulate
def test_what_is_no_number():
    x = torch.ones(4, 64).bfloat16()
    x[0], x[1, 40], x[2, 8] = 0, float("nan"), float("inf")
    made = Parts(4, 64, 16, x=x).quantized()
    largest = made.run().abs().amax(-1, keepdim=True)
    assert largest.isnan().any() and (largest == 0).any()
    torch.testing.assert_close(made.pack["largest"], largest, rtol=0, atol=0, equal_nan=True)


def tree(parts: torch.Tensor) -> torch.Tensor:
    """The sum of each part, neighbours first."""
    while parts.shape[-1] > 1:
        parts = parts[..., ::2] + parts[..., 1::2]
    return parts


KNOBS = [
    None,
    ByRowKnobs(64, 64),
    ByRowKnobs(16, 64, 4),
    ByRowKnobs(32, 128, 2, 0, 1),
    ByRowKnobs(128, 64),
    PersistentKnobs(64, 128, 1, 1, 4),
    PersistentKnobs(128, 128, 3, 1, 4),
]


@pytest.mark.emulate
@pytest.mark.parametrize("knobs", KNOBS, ids=str)
@pytest.mark.parametrize("part", [64, 128, 256])
def test_sums_have_the_same_bits_with_any_knobs(part, knobs):
    made = Parts(3, 1024, part)
    total = made.reduced(made.parts, ADD, "total")
    made.reduced(made.parts, AVG, "mean", BF16)
    made.reduced(made.g.softmax(made.parts, axis=-1), MAX, "likeliest")
    made.write(made.g.mul(made.parts, total), "scaled", BF16)
    parts = made.run(knobs)
    assert torch.equal(made.pack["total"], tree(parts))
    assert torch.equal(made.pack["mean"], (tree(parts) * (1 / part)).bfloat16())
    assert torch.equal(made.pack["scaled"], (parts * tree(parts)).bfloat16())
    torch.testing.assert_close(made.pack["likeliest"], parts.softmax(-1).amax(-1, keepdim=True))


@pytest.mark.emulate
@pytest.mark.parametrize("knobs", [None, PersistentKnobs(64, 128, 2, 1, 4)], ids=str)
def test_rows_are_reduced_behind_their_parts(knobs):
    """By way of parts that are rows again; what parts have in common is kept for that."""
    made = Parts(3, 512, 32)
    unit = made.g.div(made.parts, made.reduced(made.g.abs(made.parts), ADD, "length"))
    again = made.g.reshape(unit).set_dim((3, 512))
    least = made.g.reduction(again, mode=reduction_mode.MIN).set_dim((3, 1))
    made.write(made.g.sub(again, least), "less", FLOAT, (3, 512))
    parts = made.run(knobs)
    unit = (parts / tree(parts.abs())).view(3, 512)
    assert torch.equal(made.pack["less"], unit - unit.amin(-1, keepdim=True))


@pytest.mark.emulate
def test_values_of_parts_are_written_with_any_strides():
    made = Parts(3, 384, 128)
    made.reduced(made.parts, MAX, "by_columns").set_stride((1, 5, 1))
    made.pack["by_columns"] = torch.zeros(3, 5).as_strided((3, 3, 1), (1, 5, 1))
    assert torch.equal(made.pack["by_columns"], made.run().amax(-1, keepdim=True))


@pytest.mark.parametrize(
    "part, counted", [(96, "96 columns"), (4, "4 columns"), (1, "1 column"), (2048, "2048 columns")]
)
def test_lengths_that_are_refused(part, counted):
    made = Parts(3, 6144, part).quantized()
    made.g.validate(), made.g.build_operation_graph()
    told = f"parts of {counted} are reduced; accepted: a power of two from 8 to 1024, as a warp has each part"
    with pytest.raises(GraphNotSupportedError, match=told if part > 1 else "no engine of mode OPENSOURCE takes node"):
        made.g.create_execution_plans([heur_mode.OPENSOURCE])


def test_a_value_for_each_part_is_not_read_from_memory():
    """What does is of the parts alone, and a kernel of its own."""
    made = Parts(3, 256, 64)
    scale = made.g.tensor([3, 4, 1], [4, 1, 1], FLOAT, name="scale")
    made.write(made.g.mul(made.parts, scale), "scaled")
    made.g.validate(), made.g.build_operation_graph()
    made.g.create_execution_plans([heur_mode.OPENSOURCE])
    *_, last = made.g._planner.plans[0].parts
    assert last.region.pattern == "pointwise" and [n.op_name for n in last.region.subgraph.nodes] == ["mul"]


def test_tuned_knobs_are_those_of_parts():
    keys = set()
    for part in (32, 64):
        keys.add(repr(RowEngine().problem(Planned((m := Parts(3, 256, part).quantized()).g, m.pack).part.facts).key))
    assert len(keys) == 2


_STORE = "store_pack<bits_of<T> / 8, ACCESS>(offset(first, at / LANES * apart), {{encode<T>(value)}});"
_LANES = "mask < LANES; mask *= 2) {\n    result ="
BUGS = {
    "the largest of half a part": Bug(_LANES, _LANES.replace("LANES", "LANES / 2"), {ADDRESS: WRONG}, ("", "")),
    "the neighbouring part's too": Bug(_LANES, _LANES.replace("LANES", "2 * LANES"), {ADDRESS: WRONG}, ("", "")),
    "half of a piece": Bug(
        "join_neighbours<Join, PIECE, 0>", "join_neighbours<Join, PIECE / 2, 0>", {ADDRESS: WRONG}, ("", "")
    ),
    "a value by every lane": Bug(
        "if (stored && thread % LANES == 0) {\n    " + _STORE,
        "if (stored) {\n    " + _STORE,
        {RACE: "data race"},
        ("graphfuse/parts.cuh", _STORE),
    ),
    "the value of the row after the last": Bug(
        "if (stored && thread % LANES == 0) {\n    " + _STORE,
        "if (thread % LANES == 0) {\n    " + _STORE,
        {ADDRESS: "(heap-buffer-overflow|use-after-poison)[^$]*WRITE of size 4"},
        ("graphfuse/parts.cuh", _STORE),
    ),
}


def report(planned: Planned, right: dict[str, bytes], build, source: str | None = None) -> str:
    try:
        found = planned.check(build, source)
    except KernelFaultError as fault:
        return str(fault)
    except Varies:
        return "results that vary"
    return "" if all(found[name] == want for name, want in right.items()) else WRONG


@pytest.mark.some(3)
@pytest.mark.emulate
@pytest.mark.parametrize("name, build", each({name: (None, bug) for name, bug in BUGS.items()}), ids=str)
def test_planted_bugs_are_found(name, build):
    made, bug = Parts(3, 384, 128).quantized(), BUGS[name]
    planned = Planned(made.g, made.pack, ByRowKnobs(16, 64))
    planned.run()
    right = planned.contents()
    files = {"graphfuse/parts.cuh": template("graphfuse.codegen.headers", "parts.cuh")}
    assert_caught(bug, report(planned, right, build, plant(planned.source, bug)), build, files)
    assert not report(planned, right, build)
