"""Tensors that are the same for all parts of a row, as cosines are for heads whose norm goes over all of them: one
kernel with the norm, the same bits with any knobs; what is refused, and bugs that are planted into it."""

import pytest
import torch

from graphfuse import GraphNotSupportedError, heur_mode, norm_forward_phase
from graphfuse.base.errors import KernelFaultError
from graphfuse.engines.rows.by_row import ByRowKnobs
from graphfuse.engines.rows.persistent import PersistentKnobs
from support import graphs
from support.bugs import ADDRESS, WRONG, Bug, assert_caught, each, plant
from support.emulation import Planned
from support.graphs import BF16, FLOAT, HALF, TORCH

BATCH, TOKENS = 2, 5


class Turned:
    """The RMS norm of rows of all heads. Each head is turned by angles of its token, and written as y."""

    def __init__(self, heads: int, columns: int, dtype=BF16, kind=FLOAT, each_sample=False, device="emulator", **more):
        self.g = g = graphs.new(device=device, intermediate_rounding="declared")
        rows, self.shape = (BATCH, TOKENS, heads * columns), (BATCH, TOKENS, heads, columns)
        angles = (BATCH if each_sample else 1, TOKENS, 1, columns)
        source = graphs.generator("cpu", columns)
        self.pack = {"x": torch.randn(rows, generator=source).to(TORCH[dtype])}
        self.pack |= {n: torch.randn(angles, generator=source).to(TORCH[kind]) for n in ("cos", "sin")}
        self.pack["y"] = torch.zeros(more.get("dim", self.shape)).to(TORCH[dtype])
        x, cos, sin = (g.tensor(list(t.shape), list(t.stride()), _type(t), name=n) for n, t in self.given())
        norm = g.rmsnorm(x, epsilon=1e-5, norm_forward_phase=norm_forward_phase.INFERENCE)[0].set_data_type(dtype)
        parts = g.reshape(norm).set_dim(self.shape).set_data_type(dtype)
        other = g.turn_pairs(parts, interleaved=more.get("interleaved", True))
        y = g.add(g.mul(parts, cos), g.mul(other, sin))
        y.set_output().set_name("y").set_data_type(dtype)

    def given(self):
        return [(name, self.pack[name]) for name in ("x", "cos", "sin")]

    def exact(self) -> torch.Tensor:
        x, cos, sin = (t.double() for _, t in self.given())
        norm = torch.nn.functional.rms_norm(x, x.shape[-1:], eps=1e-5).to(self.pack["x"].dtype).double()
        parts = norm.view(self.shape)
        other = torch.stack((-parts[..., 1::2], parts[..., ::2]), dim=-1).flatten(-2)
        return parts * cos + other * sin

    def run(self, knobs=None) -> torch.Tensor:
        Planned(self.g, self.pack, knobs).run()
        return self.pack["y"].double()


def _type(t: torch.Tensor):
    return next(kind for kind, dtype in TORCH.items() if dtype is t.dtype)


def report(planned: Planned, right: dict[str, bytes], build, source: str | None = None) -> str:
    try:
        found = planned.check(build, source)
    except KernelFaultError as fault:
        return str(fault)
    return "" if all(found[name] == want for name, want in right.items()) else WRONG


def hold(made: Turned, y: torch.Tensor) -> None:
    step = 2 ** -{torch.bfloat16: 7, torch.float16: 9, torch.float32: 18}[made.pack["y"].dtype]
    torch.testing.assert_close(y, made.exact(), rtol=step, atol=step)


SIZES = [(2, 64), (12, 128), (3, 8), (5, 96), (1, 64), (40, 128)]


@pytest.mark.emulate
@pytest.mark.parametrize("each_sample", [False, True])
@pytest.mark.parametrize("kind", [FLOAT, BF16], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("dtype", [BF16, HALF, FLOAT], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_heads_are_turned_by_the_angles_of_their_token(size, dtype, kind, each_sample):
    made = Turned(*size, dtype, kind, each_sample)
    hold(made, made.run())


KNOBS = [
    ByRowKnobs(64, 64),
    ByRowKnobs(64, 64, 2),
    ByRowKnobs(128, 128, 1, 0, 1),
    ByRowKnobs(128, 64),
    PersistentKnobs(64, 128, 1, 1, 4),
    PersistentKnobs(64, 128, 3, 1, 4),
]


@pytest.mark.emulate
@pytest.mark.parametrize("columns", [32, 96, 768])
@pytest.mark.parametrize("knobs", KNOBS, ids=str)
def test_bits_are_the_same_with_any_knobs(knobs, columns):
    heads = 1536 // columns
    made, other = Turned(heads, columns), Turned(heads, columns)
    y = made.run(knobs)
    hold(made, y)
    assert torch.equal(y, other.run())


def test_the_reference_computes_the_same():
    made = Turned(3, 32, device="cpu")
    graphs.run(made.g, made.pack)
    hold(made, made.pack["y"].double())


def reason(made: Turned) -> str:
    made.g.build_operation_graph()
    with pytest.raises(GraphNotSupportedError) as error:
        made.g.create_execution_plans([heur_mode.OPENSOURCE])
        made.g.check_support()
    return str(error.value)


@pytest.mark.parametrize("columns", [12, 20])
def test_parts_that_cut_pieces_are_refused(columns):
    made = Turned(2, columns)
    made.g.validate()
    assert f"the same for all parts of {columns} columns; accepted: of a multiple of 8" in reason(made)


BUGS = {
    "every part reads the first columns": Bug(
        "row.i1, gf::u32(row.thread + at) % 8u", "row.i1, gf::u32(row.thread + at) % 1u", {ADDRESS: WRONG}, ("", "")
    ),
    "the next thread's columns": Bug(
        "row.i1, gf::u32(row.thread + at) % 8u", "row.i1, gf::u32(row.thread + at + 1) % 8u", {ADDRESS: WRONG}, ("", "")
    ),
}


@pytest.mark.emulate
@pytest.mark.parametrize("name, build", each({name: (None, bug) for name, bug in BUGS.items()}), ids=str)
def test_planted_bugs_are_found(name, build):
    made, bug = Turned(4, 64), BUGS[name]
    planned = Planned(made.g, made.pack, ByRowKnobs(32, 64))
    planned.run()
    right = planned.contents()
    assert_caught(bug, report(planned, right, build, plant(planned.source, bug)), build, {})
    assert not report(planned, right, build)
