"""What the RMSNorm engine accepts, proposes and passes, and that its source depends on the problem alone."""

import dataclasses
import re

import pytest

from graphfuse.api import pygraph
from graphfuse.base.device import ARCHES, CPU, EMULATOR, Device, for_arch
from graphfuse.base.dtypes import data_type
from graphfuse.base.enums import heur_mode, norm_forward_phase
from graphfuse.contract import match
from graphfuse.contract.engine import Address, Constant, HostScalar, RowCount
from graphfuse.engines.rows import RowEngine
from graphfuse.engines.rows.by_row import ByRowKnobs
from graphfuse.engines.rows.persistent import PersistentKnobs
from graphfuse.op_graph.freeze import freeze
from graphfuse.op_graph.lower import lower
from graphfuse.ops import EXPANSIONS
from graphfuse.patterns.rows import PATTERN, RowFacts
from graphfuse.rows.emitter import Emitter
from graphfuse.rows.program import RowProgram, Store
from graphfuse.rows.steps import Chain, Join, Load, Scalar, Step
from support.described import Described, Tensor


class Engine(RowEngine):
    """The engine, asked about described problems."""

    def why_not(self, facts, device):
        return super().why_not(facts.facts(), device)

    def propose(self, facts, device, mode):
        return super().propose(facts.facts(), device, mode)

    def illegal(self, facts, knobs, device):
        return super().illegal(facts.facts() if isinstance(facts, Described) else facts, knobs, device)

    def notes(self, facts, knobs, device):
        return super().notes(facts.facts(), knobs, device)

    def in_place(self, facts, knobs):
        return super().in_place(facts.facts(), knobs)

    def source(self, facts, knobs):
        return super().source(facts.facts() if isinstance(facts, Described) else facts, knobs)

    def launch(self, facts, knobs):
        return super().launch(facts.facts(), knobs)


ENGINE = Engine()
H200 = for_arch("sm_90a")
X, W, B, EPS, Y, RMS, SCALES, FACTOR = range(8)


def facts(columns=1024, rows=100, x=data_type.BFLOAT16, y=data_type.BFLOAT16, **changes) -> Described:
    """RMSNorm + SiLU on packed tensors; `changes` replaces fields."""
    block = 16 if y is data_type.FP4_E2M1 else 0
    base = Described(
        rows=rows,
        columns=columns,
        input=Tensor(X, "x", x, columns),
        weight=Tensor(W, "w", data_type.BFLOAT16, None),
        bias=None,
        epsilon=Scalar(EPS, "eps", data_type.FLOAT, True),
        epilogue=(Step("swish", (("input", Chain(0)),), (("swish_beta", 1.0),)),),
        output=Tensor(Y, "y", y, columns),
        block_scale=Tensor(SCALES, "s", data_type.FP8_E4M3, columns // 16) if block else None,
        block_size=block,
    )
    return dataclasses.replace(base, **changes)


def with_view(base: Described, field: str, **changes) -> Described:
    return dataclasses.replace(base, **{field: dataclasses.replace(getattr(base, field), **changes)})


BASE, FP4 = facts(), facts(y=data_type.FP4_E2M1)
BIAS = Tensor(B, "b", data_type.HALF, None)
INVERSE = Tensor(RMS, "r", data_type.FLOAT, 1)
INT_SCALAR = (Step("mul", (("a", Chain(0)), ("b", Scalar(FACTOR, "factor", data_type.INT8, False)))),)

DECLINED = [
    (BASE, CPU, "needs a CUDA device or the emulator; got cpu"),
    (BASE, Device("cuda", compute_capability=(7, 5)), "needs SM80 or newer; cuda:0 is SM75"),
    (BASE, Device("cuda", 3, compute_capability=(13, 0)), "cuda:3 is SM130, for which .* accepted: SM80, .*SM120"),
    (with_view(BASE, "input", dtype=data_type.INT64), H200, "input 'x' is INT64; accepted: FLOAT, HALF, .*BOOLEAN$"),
    (with_view(BASE, "weight", dtype=data_type.INT64), H200, "input 'w' is INT64; accepted"),
    (facts(bias=dataclasses.replace(BIAS, dtype=data_type.DOUBLE)), H200, "input 'b' is DOUBLE; accepted"),
    (with_view(BASE, "output", dtype=data_type.INT32), H200, "output 'y' is INT32; accepted: .*FP8_E4M3, FP8_E5M2"),
    (facts(inverse_rms=dataclasses.replace(INVERSE, dtype=data_type.INT64)), H200, "output 'r' is INT64"),
    (facts(epilogue=INT_SCALAR), H200, "scalar 'factor' in device memory is INT8; accepted"),
    (with_view(BASE, "input", column_stride=100), H200, "input .x. has strides .1024. between rows and 100 between"),
    (with_view(BASE, "output", column_stride=2), H200, "output 'y' has stride 2 between columns"),
    (with_view(BASE, "weight", column_stride=4), H200, "input 'w' has stride 4 between columns"),
    (
        dataclasses.replace(BASE, epsilon=Scalar(EPS, "e", data_type.FLOAT, False, 2)),
        H200,
        "scalar 'e' in device memory is aligned to 2 bytes; accepted: a multiple of 4",
    ),
    (with_view(BASE, "input", row_stride=-1024), H200, "input 'x' has row stride -1024; accepted: at least 0"),
    (with_view(BASE, "output", row_stride=0), H200, "output 'y' has row stride 0; accepted: at least 1024"),
    (with_view(BASE, "output", row_stride=1023), H200, "output 'y' has row stride 1023; accepted: at least 1024"),
    (facts(inverse_rms=dataclasses.replace(INVERSE, row_stride=0)), H200, "'r' has row stride 0; .* at least 1$"),
    (facts(inverse_rms=dataclasses.replace(INVERSE, alignment=2)), H200, "'r' is aligned to 2 bytes"),
    (facts(columns=24, y=data_type.FP4_E2M1), H200, "output 'y' has 24 columns; accepted: a multiple of 16"),
    (with_view(FP4, "output", row_stride=1025), H200, "output 'y' has row strides \\[1025\\]; accepted: even"),
    (dataclasses.replace(FP4, block_size=32), H200, "block scale 's' is FP8_E4M3; accepted: FP8_E8M0"),
    (
        dataclasses.replace(BASE, block_size=16, block_scale=FP4.block_scale),
        H200,
        "output 'y' is BFLOAT16; accepted: FP4_E2M1",
    ),
    (dataclasses.replace(FP4, block_scale=None), H200, "output 'y' is quantized in blocks and has no tensor"),
    (with_view(FP4, "block_scale", dtype=data_type.FP8_E5M2), H200, "block scale 's' is FP8_E5M2; accepted: FP8_E4M3"),
]


def test_more_rows_than_a_grid_can_have_ctas_for_are_taken_by_ctas_that_stay():
    many = facts(columns=1, rows=2**39)
    assert ENGINE.why_not(many, H200) is None
    assert {type(knobs) for knobs in ENGINE.propose(many, H200, heur_mode.A)} == {PersistentKnobs}


@pytest.mark.parametrize("declined, device, reason", DECLINED, ids=[reason for _, _, reason in DECLINED])
def test_the_first_reason_names_what_and_the_limit(declined, device, reason):
    answer = ENGINE.why_not(declined, device)
    assert answer is not None and re.search(reason, answer.reason), answer


@pytest.mark.parametrize(
    "accepted",
    [
        BASE,
        FP4,
        facts(columns=1),
        with_view(facts(columns=1), "input", column_stride=7),
        with_view(BASE, "input", row_stride=0),
        with_view(facts(rows=1), "output", row_stride=0),
        facts(rows=0),
        facts(bias=BIAS, inverse_rms=INVERSE),
        facts(columns=2**20),
        facts(columns=1, rows=2**36),
    ],
)
@pytest.mark.parametrize("arch", ARCHES)
def test_accepted(accepted, arch):
    assert ENGINE.why_not(accepted, for_arch(arch)) is None


COLUMNS = [1, 2, 7, 16, 17, 33, 48, 64, 111, 512, 1024, 3420, 3584, 7168, 8192, 16384, 24576, 32768, 65536, 65537]


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("columns", COLUMNS + [2**31])
def test_proposals_are_legal_and_not_repeated(arch, columns):
    device = for_arch(arch)
    for x in (data_type.FLOAT, data_type.BFLOAT16):
        for y in (data_type.HALF, data_type.FP4_E2M1)[: 1 if columns % 16 else 2]:
            problem = facts(columns, x=x, y=y)
            few = ENGINE.propose(problem, device, heur_mode.A)
            many = ENGINE.propose(problem, device, heur_mode.B)
            assert few[0] == many[0]
            assert 1 <= len(few) <= len(many) == len(set(many))
            assert all(ENGINE.illegal(problem, knobs, device) is None for knobs in many)


def test_the_first_proposal_has_no_idle_threads():
    assert ENGINE.propose(facts(64), H200, heur_mode.A)[0] == ByRowKnobs(8, 128)
    for columns in (64, 512, 1024, 7168):
        for rows in (1, 1560, 399360):
            knobs = ENGINE.propose(facts(columns, rows), H200, heur_mode.A)[0]
            assert knobs.threads_per_row * knobs.chunks * 8 < 2 * columns


@pytest.mark.parametrize(
    "problem, knobs, reason",
    [
        (BASE, (48, 128), "threads_per_row is 48; accepted: a power of two"),
        (BASE, (64, 100), "threads is 100; accepted: a power of two"),
        (BASE, (0, 128), "threads_per_row is 0"),
        (BASE, (8, 16), "threads is 16; accepted: 32 to 1024"),
        (BASE, (64, 2048), "threads is 2048; accepted: 32 to 1024"),
        (
            facts(2**22),
            (2**15, 1024),
            "threads_per_row 32768 exceeds threads 1024; accepted: clusters of up to 16 CTAs",
        ),
        (BASE, (64, 128, -1), "chunks is -1; accepted: a power of two"),
        (BASE, (64, 128, 0), "chunks is 0; accepted: a power of two"),
        (BASE, (64, 128, 3), "chunks is 3; accepted: a power of two"),
        (BASE, (64, 128, 2.0), "chunks is 2.0; accepted: a power of two"),
        (facts(1000), (64, 128, 2), "chunks is 2; accepted: a divisor of the 125 chunks of a row"),
        (facts(24), (1, 128, 4), "chunks is 4; accepted: a divisor of the 3 chunks of a row"),
        (facts(111, x=data_type.FLOAT), (64, 128, 2), "chunks is 2; accepted: a divisor of the 111 chunks"),
        (
            facts(4096),
            (8, 128, 2),
            "threads_per_row 8 needs 256 registers a thread .* at most 64",
        ),
        (facts(8192), (64, 512, 4), "needs 64 registers a thread .* at 512 threads at most 40 may"),
        (facts(8192), (32, 128), "threads_per_row 32 needs 128 registers a thread to hold 8192 columns; .* at most 64"),
        (facts(2**20), (512, 512), "threads_per_row is 512, chunks 1; rows of 1048576 columns .* takes 1024 and 1"),
        (
            facts(2**20),
            (1024, 1024, 2),
            "chunks 2; rows of .* are read again in each phase, which takes 1024 and 1",
        ),
        (FP4, (1, 1024), "needs 512 registers"),
        (
            facts(32, y=data_type.FP4_E2M1),
            (1, 128),
            "each with 8 elements together; .* block of 16, which the threads .* cover",
        ),
        (
            facts(64, y=data_type.FP4_E2M1),
            (2, 128, 4),
            "each with 32 elements together",
        ),
        (facts(64, x=data_type.FLOAT, y=data_type.FP4_E2M1), (1, 128, 4), "each with 32 elements together"),
        (facts(64, x=data_type.FLOAT, y=data_type.FP4_E2M1), (1, 128), "each with 8 elements together"),
        (facts(64, x=data_type.FLOAT, y=data_type.FP4_E2M1), (2, 128), "each with 4 elements together"),
        (facts(64, rows=2**36), (8, 128), "68719476736 rows take more CTAs than a grid can have"),
    ],
)
def test_illegal_knobs(problem, knobs, reason):
    with pytest.raises(AssertionError, match=reason):
        answer = ENGINE.illegal(problem, ByRowKnobs(*knobs), H200)
        assert answer is None, answer.reason


@pytest.mark.parametrize(
    "problem, knobs",
    [
        (FP4, (64, 128, 2)),
        (facts(16, y=data_type.FP4_E2M1), (1, 32, 2)),
        (facts(64, x=data_type.FLOAT, y=data_type.FP4_E2M1), (1, 32, 2)),
        (facts(64, x=data_type.FLOAT, y=data_type.FP4_E2M1), (4, 32, 1)),
        (facts(65536), (4096, 512, 1)),
        (facts(64), (1024, 1024, 2)),
        (facts(64, rows=16 * (2**31 - 1)), (8, 128)),
        (facts(2**20), (1024, 1024)),
    ],
)
def test_legal_knobs(problem, knobs):
    assert ENGINE.illegal(problem, ByRowKnobs(*knobs), H200) is None


def test_a_single_strided_row_has_the_source_of_many():
    sources = set()
    for rows in (1, 2, 500):
        g = pygraph(io_data_type=data_type.BFLOAT16, intermediate_data_type=data_type.FLOAT)
        x, scale = g.tensor([rows, 64], [67, 1]), g.tensor([1, 64])
        g.rmsnorm(x, scale, 1e-5, norm_forward_phase=norm_forward_phase.INFERENCE)[0].set_output()
        region = next(match.find(PATTERN, lower(freeze(g))))
        sources.add(ENGINE.source(region.facts, ByRowKnobs(8, 128)))
    assert len(sources) == 1


def test_rows_and_names_do_not_enter_the_source():
    knobs = ByRowKnobs(64, 128)
    source = ENGINE.source(BASE, knobs)
    assert source == ENGINE.source(facts(rows=399360), knobs)
    renamed = BASE
    for field in ("input", "weight", "output"):
        renamed = with_view(renamed, field, tensor=getattr(BASE, field).tensor + 10, name='"#error')
    renamed = dataclasses.replace(renamed, node="other", epsilon=Scalar(99, "other", data_type.FLOAT, True))
    assert source == ENGINE.source(renamed, knobs)
    assert source != ENGINE.source(facts(columns=512), knobs)


def widths(problem: Described, chunks: int = 1) -> dict[str, int]:
    """Bytes of an access by operand, as the source says."""
    source = ENGINE.source(problem, ByRowKnobs(16, 128, chunks))
    loads = re.findall(r"gf::load<\d+, (\d+), (?:ROW|COLUMN)_READS>\(gf::offset\(row\.i(\d)", source)
    stores = re.findall(r"gf::store_(?:piece<|blocks<[\w:]+, \d+, )(\d+)", source)
    names = ("INPUT", "WEIGHT", "BIAS")
    found = {names[int(i)]: int(width) for width, i in loads}
    return found | ({"OUTPUT": int(stores[-1])} if stores else {})


@pytest.mark.parametrize(
    "problem, field, access",
    [
        (BASE, "INPUT", 16),
        (with_view(BASE, "input", alignment=8), "INPUT", 8),
        (with_view(BASE, "input", alignment=2), "INPUT", 2),
        (with_view(BASE, "input", alignment=2), "OUTPUT", 16),
        (with_view(BASE, "input", row_stride=1026), "INPUT", 4),
        (with_view(BASE, "input", row_stride=1025), "INPUT", 2),
        (with_view(BASE, "output", row_stride=1028), "OUTPUT", 8),
        (with_view(BASE, "weight", alignment=4), "WEIGHT", 4),
        (facts(columns=7), "INPUT", 2),
        (facts(columns=3420), "OUTPUT", 8),
        (facts(y=data_type.FLOAT), "OUTPUT", 16),
        (facts(y=data_type.FP8_E4M3), "OUTPUT", 8),
        (FP4, "OUTPUT", 4),
        (with_view(FP4, "output", row_stride=1026), "OUTPUT", 1),
        (facts(x=data_type.FLOAT), "INPUT", 16),
        (facts(x=data_type.FLOAT, y=data_type.FP4_E2M1), "OUTPUT", 2),
        (facts(bias=BIAS), "BIAS", 16),
    ],
)
def test_access_width_is_each_tensors_own(problem, field, access):
    assert widths(problem)[field] == access


@pytest.mark.parametrize(
    "problem, field, chunks, access",
    [
        (BASE, "INPUT", 2, 16),
        (with_view(BASE, "input", alignment=8), "INPUT", 2, 8),
        (with_view(BASE, "input", row_stride=1026), "INPUT", 4, 4),
        (facts(y=data_type.FP8_E4M3), "OUTPUT", 2, 16),
        (with_view(facts(y=data_type.FP8_E4M3), "output", row_stride=1028), "OUTPUT", 2, 4),
        (FP4, "OUTPUT", 2, 8),
        (with_view(FP4, "output", alignment=4), "OUTPUT", 2, 4),
        (with_view(FP4, "output", row_stride=1026), "OUTPUT", 2, 1),
        (facts(x=data_type.FLOAT, y=data_type.FP4_E2M1), "OUTPUT", 2, 8),
    ],
)
def test_access_width_of_pieces(problem, field, chunks, access):
    assert widths(problem, chunks)[field] == access


@pytest.mark.parametrize(
    "columns, knobs, piece, steps",
    [(1024, (64, 128, 1), 8, 2), (1024, (64, 128, 2), 16, 1), (1024, (16, 128, 4), 32, 2), (1040, (64, 128, 2), 16, 2)],
)
def test_pieces_and_steps(columns, knobs, piece, steps):
    source = ENGINE.source(facts(columns), ByRowKnobs(*knobs))
    assert "int CHUNK = 8;" in source
    assert f"int PIECE = {piece};" in source and f"int STEPS = {steps};" in source


def test_launch_passes_strides_in_bytes_and_scalars():
    factor = Scalar(FACTOR, "factor", data_type.HALF, False)
    program = (Step("mul", (("a", Chain(0)), ("b", factor))),)
    problem = dataclasses.replace(FP4, epilogue=program, bias=BIAS, inverse_rms=INVERSE, rows=100)
    launch = ENGINE.launch(problem, ByRowKnobs(64, 128))
    assert (launch.grid, launch.block, launch.shared_bytes, launch.scratch_bytes) == (50, 128, 0, 0)
    assert launch.arguments == (
        *(Address(X), Constant("int64", 2048), RowCount()),
        *(Address(W), Address(B)),
        *(Address(Y), Constant("int64", 512)),
        *(Address(RMS), Constant("int64", 4)),
        *(Address(SCALES), Constant("int64", 64)),
        *(HostScalar(EPS), Address(FACTOR)),
    )


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("rows, grid", [(0, 0), (1, 1), (2, 1), (3, 2), (1000, 500), (2**32 - 2, 2**31 - 1)])
def test_grid_covers_all_rows(rows, grid, chunks):
    assert ENGINE.launch(facts(rows=rows), ByRowKnobs(64, 128, chunks)).grid == grid


def test_notes_tell_instruction_from_software():
    def notes(problem, arch):
        device = for_arch(arch)
        return " | ".join(ENGINE.notes(problem, ENGINE.propose(problem, device, heur_mode.A)[0], device))

    fp8 = facts(y=data_type.FP8_E5M2)
    assert "FP8 conversion: software, bit-identical" in notes(fp8, "sm_86")
    assert "FP8 conversion: instruction" in notes(fp8, "sm_90a")
    for arch in ("sm_80", "sm_90a"):
        assert "FP4 conversion: software" in notes(FP4, arch) and "multiple of 2^-22" in notes(FP4, arch)
    for arch in ("sm_100a", "sm_103a", "sm_120"):
        assert "FP4 conversion: instruction" in notes(FP4, arch) and "2^-22" not in notes(FP4, arch)
    assert "FP4 conversion: software" in " | ".join(ENGINE.notes(FP4, ByRowKnobs(64, 128), EMULATOR))
    assert "sigmoid of x: relative error below 5e-7 + 8e-8 |x|" in notes(BASE, "sm_90a")
    assert "sigmoid" not in notes(facts(epilogue=()), "sm_90a")
    assert "max(scale, amax - 6 * scale)" in notes(FP4, "sm_90a")
    assert "conversion" not in notes(BASE, "sm_80")
    assert "not rounded" in notes(BASE, "sm_80")
    assert "read again" in notes(facts(65537), "sm_80") and "read again" not in notes(facts(65537), "sm_90a")


def test_in_place_needs_one_layout_and_type():
    knobs = ByRowKnobs(64, 128)
    assert ENGINE.in_place(BASE, knobs) == ((X, Y),)
    assert ENGINE.in_place(facts(y=data_type.HALF), knobs) == ()
    assert ENGINE.in_place(with_view(BASE, "output", row_stride=2048), knobs) == ()


def two_means() -> RowFacts:
    """Facts that no pattern of ours makes: two tensors are normalized, each by its own mean, and added."""
    x, weight, y = BASE.input.view(), BASE.weight.view(), BASE.output.view()
    other = dataclasses.replace(x, tensor=RMS, name="other")
    emitter = Emitter(1024)
    normal = [
        EXPANSIONS["rmsnorm"].of(emitter, dict(input=Load(number), scale=Load(2), epsilon=BASE.epsilon), {})["Y"]
        for number in (0, 1)
    ]
    total = emitter.op("add", a=normal[0], b=normal[1])
    program = RowProgram((x, other, weight), tuple(emitter.steps), (Store(y, total),))
    return RowFacts("norm", (100,), 1024, program)


def with_steps(facts: RowFacts, *steps: Step) -> RowFacts:
    program = facts.program
    last = Chain(len(steps) - 1)
    return dataclasses.replace(
        facts, program=RowProgram(program.inputs, steps, (dataclasses.replace(program.stores[0], value=last),))
    )


def test_sums_of_one_phase_have_places_of_their_own():
    facts = two_means()
    assert RowEngine().why_not(facts, H200) is None
    source = RowEngine().source(facts, RowEngine().propose(facts, H200, heur_mode.A)[0])
    assert "constexpr int SUMS_OF_ROW[] = {2, 0};" in source
    assert len(set(re.findall(r"x\[(\d)\]\[i\] = (\w+)\[i\]", source))) == 2
    assert {"sums[0]", "sums[1]"} <= set(re.findall(r"sums\[\d\]", source))


def test_a_reduction_of_what_is_one_a_row_is_refused():
    emitter = Emitter(1024)
    total = emitter.reduce(Join.SUM, emitter.reduce(Join.SUM, Load(0)))
    emitter.op("mul", a=Load(0), b=total)
    reason = RowEngine().why_not(with_steps(two_means(), *emitter.steps), H200).reason
    assert reason == "norm: a SUM over the row of what is one a row; accepted: of what varies over columns"
