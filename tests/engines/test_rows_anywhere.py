"""Rows of any number of columns that begin anywhere: what is computed, in which order it is summed, and that nothing
beside them is written."""

import ctypes
import dataclasses

import numpy as np
import pytest
import torch

from graphfuse import pygraph, reduction_mode
from graphfuse.codegen.phase_plan import PhasePlan, Vectors
from graphfuse.dtypes import data_type
from graphfuse.emulator.compiler import Build
from graphfuse.engines.rows.by_row import ByRowKnobs
from graphfuse.engines.rows.by_row.split import plan_of
from support import graphs
from support.emulation import Planned, checked, extent
from support.graphs import BF16, E4M3, FLOAT, HALF
from support.rmsnorm_problem import DEVICE, ENGINE, RMS, Problem, W, X, Y, assert_close
from support.rows import Case

emulated = pytest.mark.emulate

CANARY = 0x5A


def plan(problem: Problem, knobs: ByRowKnobs = ByRowKnobs(32, 64)) -> PhasePlan:
    return plan_of(problem.facts, knobs)


def vectors(problem: Problem, knobs: ByRowKnobs = ByRowKnobs(32, 64)) -> list[Vectors | None]:
    """How input, weight and output are accessed; None as they are."""
    made = plan(problem, knobs)
    return [made.vectors(view) for view in (*made.program.inputs, *(s.view for s in made.program.stores))]


def around(problem: Problem, tensor: int) -> np.ndarray:
    """The bytes of a tensor's memory that are not its rows'."""
    array = problem.buffers[tensor]
    owner = array
    while owner.base is not None:
        owner = owner.base
    first = array.ctypes.data - owner.ctypes.data
    outside = np.ones(owner.nbytes, bool)
    for row in range(len(array)):
        begin = first + row * array.strides[0]
        outside[begin : begin + array.shape[1] * array.itemsize] = False
    return owner.view(np.uint8)[outside]


def hold(problem: Problem, knobs: ByRowKnobs | None = None) -> None:
    """Values against float64 (of FP8 against the kernel's own as float32), and all else as it was."""
    found = problem.run(knobs)
    assert (around(problem, Y) == CANARY).all()
    if problem.y not in (data_type.FP8_E4M3, data_type.FP8_E5M2):
        assert_close(found, problem.expected(), problem.y)
        return
    exact = dataclasses.replace(problem, y=FLOAT)
    exact.buffers[X][:], exact.buffers[W][:] = problem.buffers[X], problem.buffers[W]
    limit = problem.y.facts.max
    assert (np.clip(exact.run(), -limit, limit).astype(found.dtype).view(np.uint8) == found.view(np.uint8)).all()


def test_which_rows_are_accessed_as_they_are():
    assert vectors(Problem(3, 1000, y=BF16)) == [None, None, None]
    assert vectors(Problem(3, 1000, y=BF16, gap=8)) == [None, None, None]
    # Half a chunk for each thread, whose accesses of 8 bytes lie side by side.
    assert plan(Problem(3, 1004, y=BF16)).piece == 4
    assert vectors(Problem(3, 1004, y=BF16)) == [None, None, None]
    # Rows that are aligned, but no whole pieces.
    assert vectors(Problem(3, 1001, y=BF16, gap=7)) == [Vectors(16, 16, 2)] * 3
    assert vectors(Problem(3, 1004, y=BF16, gap=4)) == [Vectors(16, 16, 8)] * 3


@pytest.mark.parametrize(("columns", "grain"), [(1001, 2), (1002, 4), (1006, 4)])
def test_unaligned_rows_are_accessed_in_whole_vectors(columns, grain):
    shifted = Vectors(16, grain, grain)
    assert vectors(Problem(3, columns, y=BF16)) == [shifted, Vectors(16, 16, grain), shifted]
    source = ENGINE.source(Problem(3, columns, y=BF16).facts, ByRowKnobs(32, 64))
    assert f"gf::load_around<16, 8, {grain}, {grain}, ROW_READS>" in source
    assert f"gf::load_around<16, 16, 16, {grain}, COLUMN_READS>" in source
    assert f"gf::store_around<16, {grain}, {grain}, " in source
    assert "gf::load<" not in source.split("namespace problem")[1]


LENGTHS = [(columns, BF16, BF16, 32) for columns in (1, 2, 3, 5, 7, 9, 15, 17, 31, 33, 39)]
LENGTHS += [(1000 + k, BF16, BF16, 32) for k in (-1, 1, 2, 3, 4, 6)]
LENGTHS += [(13, HALF, E4M3, 4), (1003, BF16, E4M3, 64), (1005, FLOAT, E4M3, 64), (259, FLOAT, FLOAT, 16)]
LENGTHS += [(1021, BF16, FLOAT, 128), (19, FLOAT, HALF, 1), (23, BF16, BF16, 1), (37, BF16, E4M3, 2)]


@emulated
@pytest.mark.parametrize(("columns", "x", "y", "threads"), LENGTHS, ids=str)
def test_any_length(columns, x, y, threads):
    hold(Problem(7, columns, x=x, y=y), ByRowKnobs(threads, max(64, threads)))


@emulated
@pytest.mark.parametrize(
    "options",
    [
        dict(columns=40, y=BF16, gap=1),
        dict(columns=40, y=E4M3, gap=3),
        dict(columns=35, y=BF16, gap=2),
        dict(columns=104, x=FLOAT, y=BF16, gap=1, bias=HALF),
        dict(columns=40, y=BF16, offset=1, bias=BF16),
        dict(columns=57, y=E4M3, offset=3, gap=6),
        dict(columns=9, y=E4M3, offset=5),
        dict(columns=57, x=FLOAT, w=FLOAT, y=FLOAT, offset=1),
    ],
    ids=str,
)
def test_any_place(options):
    """Rows apart by any distance, memory that begins at any element."""
    hold(Problem(6, **options))


@emulated
@pytest.mark.parametrize("columns", [8193, 40969])
def test_rows_of_clusters_and_rows_that_are_read_again(columns):
    """Neighbours in other CTAs and in other passes."""
    for knobs in (ByRowKnobs(1024, 512), ByRowKnobs(1024, 1024)):
        if ENGINE.illegal(Problem(2, columns, y=BF16).facts, knobs, DEVICE) is None:
            hold(Problem(2, columns, y=BF16), knobs)


@emulated
@pytest.mark.parametrize(("columns", "x"), [(1009, BF16), (1009, FLOAT), (1012, BF16)])
def test_bits_do_not_depend_on_knobs_rows_or_addresses(columns, x):
    """Of one row after another, at another shift each, that hold the same."""
    options = dict(x=x, y=FLOAT, inverse_rms=True)
    problem = Problem(9, columns, **options)
    problem.buffers[X][:] = problem.buffers[X][0]
    choices = [ByRowKnobs(t, max(64, t), c) for t, c in ((8, 1), (32, 2), (64, 1), (128, 1), (16, 4), (1, 4))]
    choices.append(ByRowKnobs(128, 64))
    results = set()
    for knobs in choices:
        if ENGINE.illegal(problem.facts, knobs, DEVICE) is None:
            found = problem.run(knobs)
            results |= {row.tobytes() for row in found} | {row.tobytes() for row in problem.buffers[RMS]}
    assert len(results) == 2  # a row and its inverse RMS
    for alone in (Problem(1, columns, **options), Problem(1, columns, **options, offset=1)):
        alone.buffers[X][:], alone.buffers[W][:] = problem.buffers[X][0], problem.buffers[W]
        assert {alone.run()[0].tobytes(), alone.buffers[RMS][0].tobytes()} == results


class Reduced:
    """Sum of squares and of powers, largest value and largest magnitude of rows; all of them in one kernel, as they are
    added up."""

    def __init__(self, rows: int, columns: int):
        self.rows, self.columns = rows, columns

    def graph(self) -> pygraph:
        g = graphs.new(device="emulator")
        x = g.tensor([self.rows, self.columns], data_type=BF16, name="x")

        def output(value, mode, name):
            made = g.reduction(value, mode=mode).set_dim([self.rows, 1])
            return made.set_output().set_name(name).set_data_type(FLOAT)

        y = g.add(x, output(g.mul(x, x), reduction_mode.ADD, "squares"))
        y = g.add(y, output(g.exp(x), reduction_mode.ADD, "powers"))  # what is beyond the row would be 1 each
        y = g.add(y, output(x, reduction_mode.MAX, "largest"))
        y = g.add(y, output(x, reduction_mode.AMAX, "magnitude"))
        y.set_output().set_name("y").set_data_type(FLOAT)
        return g

    def pack(self) -> dict[str, torch.Tensor]:
        x = -1 - torch.rand(self.rows, self.columns, generator=graphs.generator("cpu", self.columns)) * 3
        names = ("squares", "powers", "largest", "magnitude")
        pack = {"x": x.bfloat16(), "y": torch.empty(self.rows, self.columns)}
        return pack | {name: torch.empty(self.rows, 1) for name in names}


def tree(products: np.ndarray) -> np.ndarray:
    """Over rows padded with zeros to whole chunks of 8: each half of a chunk in order, then pairs that differ in the
    highest bit of their numbers first. products: exact in float32."""
    rows, columns = products.shape
    padded = np.zeros((rows, -(-columns // 8) * 8), np.float32)
    padded[:, :columns] = products
    halves = np.zeros((rows, padded.shape[1] // 4), np.float32)
    for i in range(4):
        halves += padded[:, i::4]
    parts = halves[:, ::2] + halves[:, 1::2]
    while (count := parts.shape[1]) > 1:
        joined = 1 << (count - 1).bit_length() - 1
        parts[:, : count - joined] += parts[:, joined:]
        parts = parts[:, :joined]
    return parts[:, 0]


@emulated
@pytest.mark.parametrize(("columns", "knobs"), [(1, (1, 32)), (6, (2, 64)), (1003, (64, 64)), (1004, (32, 128))])
def test_the_order_is_that_of_the_row_padded_with_zeros(columns, knobs):
    reduced = Reduced(5, columns)
    pack = reduced.pack()
    Planned(reduced.graph(), pack, ByRowKnobs(*knobs)).run()
    x = pack["x"].float().numpy()
    assert (pack["squares"].numpy()[:, 0] == tree(x * x)).all()
    np.testing.assert_allclose(pack["powers"].numpy()[:, 0], np.exp(x.astype(np.float64)).sum(1), rtol=1e-5)
    assert (pack["largest"].numpy()[:, 0] == x.max(1)).all()
    assert (pack["magnitude"].numpy()[:, 0] == np.abs(x).max(1)).all()


@emulated
def test_the_largest_of_all_is_of_rows_alone():
    """A logarithm of what is beyond a row would be infinite."""
    g = graphs.new(device="emulator")
    x = g.tensor([3, 29], data_type=BF16, name="x")
    y = g.log(g.mul(x, g.rsqrt(g.reduction(g.mul(x, x), mode=reduction_mode.ADD).set_dim([3, 1]))))
    g.reduction(y, mode=reduction_mode.AMAX).set_output().set_name("amax").set_data_type(FLOAT)
    g.identity(y).set_output().set_name("y").set_data_type(FLOAT)
    values = torch.rand(3, 29, generator=graphs.generator("cpu", 0)) + 0.5
    pack = {"x": values.bfloat16(), "y": torch.empty(3, 29), "amax": torch.empty(1, 1)}
    Planned(g, pack).run()
    assert pack["amax"].item() == pack["y"].abs().max().item() > 0


@emulated
@pytest.mark.parametrize("over", [{"sum": "residual"}, {"sum": "x", "out": "residual"}], ids=str)
@pytest.mark.parametrize(("columns", "knobs"), [(203, (32, 64)), (779, (128, 64)), (17, (4, 64))])
def test_in_place(columns, knobs, over):
    """What threads write is nothing that others have yet to read, though their vectors overlap."""
    case = Case(True, "plain", "none", "bf16", "some", rows=5, columns=columns)
    apart, same = (
        Planned(case.graph("emulator"), case.inputs() | case.outputs(), ByRowKnobs(*knobs)) for _ in range(2)
    )
    same.pack |= {output: same.pack[name] for output, name in over.items()}
    apart.run()
    wanted = apart.contents()
    for build in (Build.ADDRESS, Build.RACE):
        found = same.check(build)
        assert all(found[name] == wanted[name] for name in case.outputs())


@emulated
@pytest.mark.parametrize("options", [dict(columns=57, y=E4M3), dict(columns=101, y=BF16, offset=1, gap=2)], ids=str)
def test_sanitizers_find_nothing(options):
    problem = Problem(5, **options)
    source, entry, launch, arrays, scalars = problem.plan(ByRowKnobs(8, 64))
    found = checked(source, entry, launch, arrays, scalars)
    problem.run(ByRowKnobs(8, 64))
    assert found[Y] == ctypes.string_at(*extent(problem.buffers[Y]))
