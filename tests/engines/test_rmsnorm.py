"""What the RMSNorm engine accepts, proposes and passes, and that its source depends on the problem alone."""

import dataclasses
import re

import pytest

from graphfuse import match
from graphfuse.device import ARCHES, CPU, Device, for_arch
from graphfuse.dtypes import data_type
from graphfuse.engine import Address, Constant, HostScalar
from graphfuse.engines.rmsnorm import RmsNormEngine, RmsNormKnobs
from graphfuse.enums import heur_mode, norm_forward_phase
from graphfuse.freeze import freeze
from graphfuse.graph import pygraph
from graphfuse.lower import lower
from graphfuse.patterns import rmsnorm
from graphfuse.patterns.rmsnorm import RmsNormFacts, View
from graphfuse.pointwise import Chain, Program, Scalar, Step

ENGINE = RmsNormEngine()
H200 = for_arch("sm_90a")
X, W, B, EPS, Y, RMS, SCALES, FACTOR = range(8)


def facts(columns=1024, rows=100, x=data_type.BFLOAT16, y=data_type.BFLOAT16, **changes) -> RmsNormFacts:
    """RMSNorm + SiLU on packed tensors; `changes` replaces fields."""
    block = 16 if y is data_type.FP4_E2M1 else 0
    base = RmsNormFacts(
        node="norm",
        rows=rows,
        columns=columns,
        input=View(X, "x", x, ((rows, columns),), 1, 16),
        weight=View(W, "w", data_type.BFLOAT16, (), 1, 16),
        bias=None,
        epsilon=Scalar(EPS, "eps", data_type.FLOAT, True),
        epilogue=Program((Step("swish", (("input", Chain(0)),), (("swish_beta", 1.0),)),)),
        output=View(Y, "y", y, ((rows, columns),), 1, 16),
        block_scale=View(SCALES, "s", data_type.FP8_E4M3, ((rows, columns // 16),), 1, 16) if block else None,
        block_size=block,
    )
    return dataclasses.replace(base, **changes)


def with_view(base: RmsNormFacts, field: str, **changes) -> RmsNormFacts:
    return dataclasses.replace(base, **{field: dataclasses.replace(getattr(base, field), **changes)})


BASE, FP4 = facts(), facts(y=data_type.FP4_E2M1)
BIAS = View(B, "b", data_type.HALF, (), 1, 16)
INVERSE = View(RMS, "r", data_type.FLOAT, ((100, 1),), 1, 16)
INT_SCALAR = Program(
    (Step("mul", (("a", Chain(0)), ("b", Scalar(FACTOR, "factor", data_type.INT32, False)))),),
)

DECLINED = [
    (BASE, CPU, "needs a CUDA device; got cpu"),
    (BASE, Device("cuda", compute_capability=(7, 5)), "needs SM80 or newer; cuda:0 is SM75"),
    (BASE, Device("cuda", 3, compute_capability=(13, 0)), "cuda:3 is SM130, for which .* accepted: SM80, .*SM120"),
    (with_view(BASE, "input", dtype=data_type.INT8), H200, "input 'x' is INT8; accepted: FLOAT, HALF, BFLOAT16$"),
    (with_view(BASE, "weight", dtype=data_type.FP8_E4M3), H200, "weight 'w' is FP8_E4M3; accepted"),
    (facts(bias=dataclasses.replace(BIAS, dtype=data_type.DOUBLE)), H200, "bias 'b' is DOUBLE; accepted"),
    (with_view(BASE, "output", dtype=data_type.INT32), H200, "output 'y' is INT32; accepted: .*FP8_E5M2, FP4_E2M1"),
    (facts(inverse_rms=dataclasses.replace(INVERSE, dtype=data_type.HALF)), H200, "inverse RMS 'r' is HALF"),
    (facts(epilogue=INT_SCALAR), H200, "scalar 'factor' in device memory is INT32; accepted"),
    (with_view(BASE, "input", column_stride=100), H200, "input 'x' has stride 100 between columns; accepted: 1"),
    (with_view(BASE, "output", column_stride=2), H200, "output 'y' has stride 2 between columns"),
    (with_view(BASE, "weight", column_stride=4), H200, "weight 'w' has stride 4 between columns"),
    (with_view(BASE, "weight", rows=((100, 1024),)), H200, r"weight 'w' varies over rows .*\(100, 1024\); .* one"),
    (
        with_view(BASE, "input", rows=((10, 99999), (10, 1024))),
        H200,
        r"input 'x' has rows with several strides .*\(10, 99999\), \(10, 1024\); accepted: one",
    ),
    (
        dataclasses.replace(BASE, epsilon=Scalar(EPS, "e", data_type.FLOAT, False, 2)),
        H200,
        "scalar 'e' in device memory is aligned to 2 bytes; accepted: a multiple of 4",
    ),
    (with_view(BASE, "input", rows=((100, -1024),)), H200, "input 'x' has row stride -1024; accepted: at least 0"),
    (with_view(BASE, "output", rows=((100, 0),)), H200, "output 'y' has row stride 0; accepted: at least 1024"),
    (with_view(BASE, "output", rows=((100, 1023),)), H200, "output 'y' has row stride 1023; accepted: at least 1024"),
    (facts(inverse_rms=dataclasses.replace(INVERSE, rows=((100, 0),))), H200, "'r' has row stride 0; .* at least 1$"),
    (facts(inverse_rms=dataclasses.replace(INVERSE, alignment=2)), H200, "'r' is aligned to 2 bytes"),
    (facts(columns=24, y=data_type.FP4_E2M1), H200, "output 'y' has 24 columns; accepted: a multiple of 16"),
    (with_view(FP4, "output", rows=((100, 1025),)), H200, "output 'y' has row stride 1025; accepted: even"),
    (dataclasses.replace(FP4, block_size=32), H200, "output 'y' is FP4_E2M1 in blocks of 32; accepted: blocks of 16"),
    (dataclasses.replace(BASE, block_size=16), H200, "output 'y' is BFLOAT16 in blocks of 16; accepted: blocks of 0"),
    (dataclasses.replace(FP4, block_scale=None), H200, "output 'y' is FP4_E2M1 and has no tensor for its block scales"),
    (with_view(FP4, "block_scale", dtype=data_type.FP8_E5M2), H200, "block scale 's' is FP8_E5M2; accepted: FP8_E4M3"),
    (with_view(FP4, "block_scale", rows=((100, 63),)), H200, "block scale 's' has row stride 63; .* at least 64"),
]


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
        with_view(BASE, "input", rows=((100, 0),)),
        with_view(facts(rows=1), "output", rows=()),
        facts(rows=0),
        facts(bias=BIAS, inverse_rms=INVERSE),
        facts(columns=2**20),
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
            assert few[0] == ENGINE.propose(facts(columns, rows=7, x=x, y=y), device, heur_mode.A)[0]


def test_measured_best_comes_first():
    assert ENGINE.propose(facts(1024), H200, heur_mode.A)[0] == RmsNormKnobs(64, 128)
    assert ENGINE.propose(facts(64), H200, heur_mode.A)[0] == RmsNormKnobs(8, 128)


@pytest.mark.parametrize(
    "problem, knobs, reason",
    [
        (BASE, (48, 128), "threads_per_row is 48; accepted: a power of two"),
        (BASE, (64, 100), "threads is 100; accepted: a power of two"),
        (BASE, (0, 128), "threads_per_row is 0"),
        (BASE, (8, 16), "threads is 16; accepted: 32 to 1024"),
        (BASE, (64, 2048), "threads is 2048; accepted: 32 to 1024"),
        (BASE, (256, 128), "threads_per_row 256 exceeds threads 128"),
        (BASE, (64, 128, -1), "max_ctas is -1"),
        (facts(8192), (32, 128), "threads_per_row 32 needs 128 registers a thread to hold 8192 columns; .* at most 64"),
        (facts(2**20), (512, 512), "threads_per_row is 512; rows of 1048576 columns are read twice, which takes 1024"),
        (FP4, (1, 1024), "needs 512 registers"),
        (facts(32, y=data_type.FP4_E2M1), (1, 128), "blocks of 16 elements take at least 2"),
    ],
)
def test_illegal_knobs(problem, knobs, reason):
    with pytest.raises(AssertionError, match=reason):
        answer = ENGINE.illegal(problem, RmsNormKnobs(*knobs), H200)
        assert answer is None, answer.reason


def test_a_single_strided_row_has_the_source_of_many():
    sources = set()
    for rows in (1, 2, 500):
        g = pygraph(io_data_type=data_type.BFLOAT16, intermediate_data_type=data_type.FLOAT)
        x, scale = g.tensor([rows, 64], [67, 1]), g.tensor([1, 64])
        g.rmsnorm(x, scale, 1e-5, norm_forward_phase=norm_forward_phase.INFERENCE)[0].set_output()
        (region,) = match.find(rmsnorm.PATTERN, lower(freeze(g)))
        sources.add(ENGINE.source(region.facts, RmsNormKnobs(8, 128)))
    assert len(sources) == 1


def test_rows_names_and_grid_do_not_enter_the_source():
    knobs = RmsNormKnobs(64, 128)
    source = ENGINE.source(BASE, knobs)
    assert source == ENGINE.source(facts(rows=399360), knobs)
    assert source == ENGINE.source(BASE, dataclasses.replace(knobs, max_ctas=132))
    renamed = BASE
    for field in ("input", "weight", "output"):
        renamed = with_view(renamed, field, tensor=getattr(BASE, field).tensor + 10, name='"#error')
    renamed = dataclasses.replace(renamed, node="other", epsilon=Scalar(99, "other", data_type.FLOAT, True))
    assert source == ENGINE.source(renamed, knobs)
    assert source != ENGINE.source(facts(columns=512), knobs)


def prelude(problem: RmsNormFacts, name: str) -> str:
    source = ENGINE.source(problem, ENGINE.propose(problem, H200, heur_mode.A)[0])
    return source.split(f" {name} = ", 1)[1].split(";", 1)[0]


@pytest.mark.parametrize(
    "problem, field, access",
    [
        (BASE, "INPUT", 16),
        (with_view(BASE, "input", alignment=8), "INPUT", 8),
        (with_view(BASE, "input", alignment=2), "INPUT", 2),
        (with_view(BASE, "input", alignment=2), "OUTPUT", 16),
        (with_view(BASE, "input", rows=((100, 1026),)), "INPUT", 4),
        (with_view(BASE, "input", rows=((100, 1025),)), "INPUT", 2),
        (with_view(BASE, "output", rows=((100, 1028),)), "OUTPUT", 8),
        (with_view(BASE, "weight", alignment=4), "WEIGHT", 4),
        (facts(columns=7), "INPUT", 2),
        (facts(columns=3420), "OUTPUT", 8),
        (facts(y=data_type.FLOAT), "OUTPUT", 16),
        (facts(y=data_type.FP8_E4M3), "OUTPUT", 8),
        (FP4, "OUTPUT", 4),
        (with_view(FP4, "output", rows=((100, 1026),)), "OUTPUT", 1),
        (facts(x=data_type.FLOAT, y=data_type.FP4_E2M1), "OUTPUT", 2),
        (facts(bias=BIAS), "BIAS", 16),
    ],
)
def test_access_width_is_each_tensors_own(problem, field, access):
    assert prelude(problem, f"{field}_ACCESS") == str(access)


def test_launch_passes_strides_in_bytes_and_scalars():
    factor = Scalar(FACTOR, "factor", data_type.HALF, False)
    program = Program((Step("mul", (("a", Chain(0)), ("b", factor))),))
    problem = dataclasses.replace(FP4, epilogue=program, bias=BIAS, inverse_rms=INVERSE, rows=100)
    launch = ENGINE.launch(problem, RmsNormKnobs(64, 128))
    assert (launch.grid, launch.block, launch.shared_bytes, launch.scratch_bytes) == (50, 128, 0, 0)
    assert launch.arguments == (
        *map(Address, (X, W, B, Y, RMS, SCALES)),
        *(Constant("int64", value) for value in (100, 2048, 512, 4, 64)),
        HostScalar(EPS),
        Address(FACTOR),
    )


def test_launch_passes_null_for_what_is_absent():
    arguments = ENGINE.launch(BASE, RmsNormKnobs(64, 128)).arguments
    assert arguments[2] == arguments[4] == arguments[5] == Constant("pointer", 0)


@pytest.mark.parametrize(
    "rows, max_ctas, grid", [(0, 0, 0), (1, 0, 1), (2, 0, 1), (3, 0, 2), (1000, 132, 132), (3, 132, 2)]
)
def test_grid(rows, max_ctas, grid):
    assert ENGINE.launch(facts(rows=rows), RmsNormKnobs(64, 128, max_ctas)).grid == grid


def test_notes_tell_instruction_from_software():
    def notes(problem, arch):
        device = for_arch(arch)
        return " | ".join(ENGINE.notes(problem, ENGINE.propose(problem, device, heur_mode.A)[0], device))

    fp8 = facts(y=data_type.FP8_E5M2)
    assert "FP8 conversion: software, bit-identical" in notes(fp8, "sm_86")
    assert "FP8 conversion: instruction" in notes(fp8, "sm_90a")
    assert "FP4 conversion: software" in notes(FP4, "sm_90a")
    assert "FP4 conversion: instruction" in notes(FP4, "sm_103a")
    assert "max(scale, amax - 6 * scale)" in notes(FP4, "sm_90a")
    assert "conversion" not in notes(BASE, "sm_80")
    assert "not rounded" in notes(BASE, "sm_80")
    assert "read twice" in notes(facts(65537), "sm_90a") and "read twice" not in notes(BASE, "sm_90a")


def test_in_place_needs_one_layout_and_type():
    knobs = RmsNormKnobs(64, 128)
    assert ENGINE.in_place(BASE, knobs) == ((X, Y),)
    assert ENGINE.in_place(facts(y=data_type.HALF), knobs) == ()
    assert ENGINE.in_place(with_view(BASE, "output", rows=((100, 2048),)), knobs) == ()
