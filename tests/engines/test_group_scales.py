"""FP8 and INT8 with scales of their own, of a norm, of SiLU times a tensor and of what is read: one kernel each, bit
for bit what the value before quantization says, with any knobs; bugs planted into it are found."""

import numpy as np
import pytest
import torch

from graphfuse import GraphNotSupportedError, heur_mode, norm_forward_phase, reduction_mode
from graphfuse.base.device import for_arch
from graphfuse.base.errors import KernelFaultError
from graphfuse.codegen.render import template
from graphfuse.engines.rows import RowEngine
from graphfuse.engines.rows.by_row import ByRowKnobs
from support import graphs, oracle, quantized
from support.bugs import ADDRESS, RACE, WRONG, Bug, assert_caught, each, plant
from support.emulation import Planned, Varies
from support.graphs import BF16, E4M3, E5M2, FLOAT, HALF
from support.quantized import E8M0, INT8, Quantized

DEVICE = for_arch("sm_90a")
ALL = ("x", "silu", "norm")
SHAPES = [(1, 128), (3, 256), (130, 1536), (3, 7168), (1, 14336), (130, 128)]


@pytest.mark.emulate
@pytest.mark.parametrize("rows, columns", SHAPES)
@pytest.mark.parametrize("by_columns", [False, True], ids=["by rows", "by columns"])
@pytest.mark.parametrize("of", ALL)
def test_groups(of, by_columns, rows, columns):
    quantized.check(Quantized(rows, columns, of, by_columns=by_columns))


@pytest.mark.emulate
@pytest.mark.parametrize("rows, columns", SHAPES)
@pytest.mark.parametrize("element", [E4M3, INT8])
@pytest.mark.parametrize("of", ALL)
def test_a_scale_for_each_row(of, element, rows, columns):
    quantized.check(Quantized(rows, columns, of, None, element=element))


@pytest.mark.emulate
@pytest.mark.parametrize("element, scale", [(E4M3, FLOAT), (E5M2, FLOAT), (E4M3, E8M0), (E5M2, E8M0)])
@pytest.mark.parametrize("x", [FLOAT, HALF, BF16], ids=lambda x: x.name)
@pytest.mark.parametrize("beside", [None, BF16, FLOAT])
def test_types(x, element, scale, beside):
    quantized.check(Quantized(5, 384, "norm", 128, x, element, scale, scale is E8M0, beside))


@pytest.mark.parametrize("of", ALL)
@pytest.mark.parametrize("size, element", [(None, E4M3), (None, INT8), (128, E4M3)])
def test_the_reference_engine(of, size, element):
    case = Quantized(5, 384, of, size, element=element, by_columns=size is not None)
    quantized.check(case, [heur_mode.FALLBACK], "cpu")


MAGNITUDES = [0.0, 2.0**-149, 2.0**-127, 2.0**-118, 1e-30, 1.0, 3e38, float("inf"), float("nan")]


@pytest.mark.parametrize("element", [E4M3, E5M2])
@pytest.mark.parametrize("device", ["cpu", pytest.param("emulator", marks=pytest.mark.emulate)])
def test_every_magnitude(element, device):
    """Zeros have the smallest scale; what is infinite or no number stays so for a reader."""
    case = Quantized(1, 128 * len(MAGNITUDES), "x", 128, FLOAT, element)
    pack, outputs = case.inputs(), case.outputs()
    pack["x"] = torch.randn(len(MAGNITUDES), 128).clamp(-1, 1)
    pack["x"][:, 7] = 1
    pack["x"] *= torch.tensor(MAGNITUDES).nan_to_num(1.0, 1.0)[:, None]
    pack["x"][-2:, 9] = torch.tensor(MAGNITUDES[-2:])
    pack["x"] = pack["x"].reshape(1, -1)
    graphs.run(
        case.graph(device), pack | outputs, [heur_mode.OPENSOURCE if device == "emulator" else heur_mode.FALLBACK]
    )
    for name, want in case.quantized(pack["x"].numpy()).items():
        found = outputs[name] if name == "scale" else outputs[name].view(torch.uint8)
        np.testing.assert_array_equal(found.numpy(), want, err_msg=name)
    scale, codes = outputs["scale"][0], outputs["out"].view(torch.uint8).view(-1, 128)
    assert scale[0] == 2.0**-126 and (codes[0] & 0x7F == 0).all()
    assert scale[-2] == float("inf") and codes[-2, 9] & 0x7F == 0x7F and (codes[-2, 10:] & 0x7F == 0).all()
    assert scale[-1].isnan() and (codes[-1] == 0x7F).all()


@pytest.mark.some(1)
@pytest.mark.emulate
@pytest.mark.parametrize("by_columns", [False, True], ids=["by rows", "by columns"])
@pytest.mark.parametrize("x", [FLOAT, BF16], ids=lambda x: x.name)
def test_any_knobs(x, by_columns):
    """Every number of lanes that share a block, rows that share warps, warps that share rows, clusters."""
    case, engine = Quantized(3, 640, "silu", 128, x, by_columns=by_columns), RowEngine()
    pack = case.inputs()
    exact = case.quantized(case.values(pack, [heur_mode.OPENSOURCE], "emulator"))
    facts = Planned(case.graph("emulator"), pack | case.outputs()).part.facts
    knobs = [ByRowKnobs(1 << p, max(32, min(64, 1 << p)), chunks) for p in range(9) for chunks in (1, 2, 4)]
    knobs = [k for k in knobs if engine.illegal(facts, k, DEVICE) is None]
    pieces = {(4 if x is FLOAT and k.chunks == 1 else 8 * k.chunks, k.threads_per_row) for k in knobs}
    assert all(128 // piece <= threads for piece, threads in pieces)
    assert {128 // piece for piece, _ in pieces} == ({32, 8, 4} if x is FLOAT else {16, 8, 4})
    assert {k.cluster > 1 for k in knobs} == {True, False}
    for choice in knobs:
        outputs = case.outputs()
        Planned(case.graph("emulator"), pack | outputs, choice).run()
        for name, want in exact.items():
            found = outputs[name] if name == "scale" else outputs[name].view(torch.uint8)
            np.testing.assert_array_equal(found.numpy(), want, err_msg=f"{name} {choice}")


def test_fewer_threads_than_a_block_are_refused():
    case = Quantized(3, 640)
    facts = Planned(case.graph("emulator"), case.inputs() | case.outputs()).part.facts
    no = RowEngine().illegal(facts, ByRowKnobs(8, 64), DEVICE)
    assert "threads_per_row is 8, each with 8 elements together" in str(no) and "a block of 128" in str(no)


# What is a kernel without a reduction.


def engines(g) -> list[str]:
    g.validate(), g.build_operation_graph(), g.create_execution_plans([heur_mode.OPENSOURCE])
    return [part.engine.name for part in g._planner.plans[0].parts]


@pytest.mark.parametrize("size, element", [(16, graphs.FP4), (32, E4M3), (32, graphs.FP4), (128, E5M2)])
@pytest.mark.parametrize("of", ALL)
def test_one_kernel_of_one_phase_where_nothing_is_reduced(of, size, element):
    g = graphs.new(device="emulator")
    codes, scale = g.block_scale_quantize(Quantized(4, 256, of).drawn(g), block_size=size)
    codes.set_output().set_data_type(element), scale.set_output()
    assert engines(g) == ["rows"]
    program = g._planner.plans[0].parts[0].facts.program
    assert program.last == (of == "norm")


def test_quantization_beside_a_norm_is_the_norms():
    """Also where more nodes stand before it than around the norm."""
    g = graphs.new(device="emulator")
    x = g.tensor([4, 256], name="x")
    for _ in range(4):
        x = g.swish(x)
    g.rmsnorm(x, epsilon=0.0, norm_forward_phase=norm_forward_phase.INFERENCE)[0].set_output()
    for t in g.block_scale_quantize(x, block_size=128):
        t.set_output()
    assert engines(g) == ["rows"]
    assert len(g._planner.plans[0].parts[0].region.subgraph.node_ids) == 6


def test_rows_that_are_reduced_are_no_part_of_quantization_alone():
    """Where the whole is refused, for a reduction of a kind that no kernel has, the rest is still a kernel."""
    g = graphs.new(device="emulator")
    x = g.tensor([4, 256], name="x")
    product = g.reduction(x, mode=reduction_mode.MUL).set_dim([4, 1]).set_output()
    for t in g.block_scale_quantize(g.add(g.swish(x), product), block_size=128):
        t.set_output()
    g.validate(), g.build_operation_graph(), g.create_execution_plans([heur_mode.A])
    assert sorted(part.engine.name for part in g._planner.plans[0].parts) == ["reference", "rows"]


def test_blocks_across_rows_are_the_reference_engines():
    g = graphs.new(device="emulator")
    for t in g.block_scale_quantize(g.tensor([256, 8], name="x"), block_size=128, axis=0):
        t.set_output()
    with pytest.raises(
        GraphNotSupportedError, match="in blocks along columns that are not contiguous; accepted: without blocks"
    ):
        engines(g)


def test_tuned_knobs_are_kept_apart():
    """Problem classes: by type and order of scales."""
    cases = [Quantized(3, 256), Quantized(3, 256, scale=E8M0), Quantized(3, 256, by_columns=True)]
    keys = [RowEngine().problem(Planned(c.graph("emulator"), c.inputs() | c.outputs()).part.facts).key for c in cases]
    assert len({repr(key) for key in keys}) == 3


# What the kernel must not get wrong.

ROWS, COLUMNS, ALONE = Quantized(3, 384, "silu"), Quantized(3, 384, "silu", by_columns=True), Quantized(3, 384, "x")
LANES = ByRowKnobs(16, 64)
_STORE = "store_pack<sizeof(typename Blocks<T>::Scale), ACCESS>(scales.of(thread / LANES, at / LANES), {{scale}});"
BUGS = {
    "scales stored transposed": (
        COLUMNS,
        Bug("return offset(first, blocks * apart);", "return offset(first, blocks * 4);", {ADDRESS: WRONG}, ("", "")),
    ),
    "a row's first scale at its last row's place": (
        COLUMNS,
        Bug(
            "index * a.b0_stride0",
            "index * a.b0_apart",
            {ADDRESS: "(heap-buffer-overflow|use-after-poison)[^$]*WRITE of size 4"},
            ("graphfuse/rows.cuh", "ACCESS>(scales.of("),
        ),
    ),
    "the largest of half a block": (
        ROWS,
        Bug("mask < LANES; mask *= 2", "mask < LANES / 2; mask *= 2", {ADDRESS: WRONG}, ("", "")),
    ),
    "the largest of the neighbouring block too": (
        ROWS,
        Bug("mask < LANES; mask *= 2", "mask < 2 * LANES; mask *= 2", {ADDRESS: WRONG}, ("", "")),
    ),
    "a scale of zero": (
        ALONE,
        Bug("as_bits(max(scale, 0x1p-126f))", "as_bits(scale)", {ADDRESS: WRONG}, ("", "")),
    ),
    "the other element's largest": (
        ROWS,
        Bug("float_scale(amax * (1.0f / 448.0f))", "float_scale(amax * (1.0f / 57344.0f))", {ADDRESS: WRONG}, ("", "")),
    ),
    "an approximate inverse of the scale": (
        ALONE,
        Bug(
            "return 1.0f / as_float(code);",
            "return rsqrt(as_float(code) * as_float(code));",
            {ADDRESS: WRONG},
            ("", ""),
        ),
    ),
    "the scale of the row after the last": (
        ROWS,
        Bug(
            "    if (thread % LANES == 0) {\n      " + _STORE + "\n    }\n  }",
            "  }\n  if (thread % LANES == 0) {\n    " + _STORE + "\n  }",
            {ADDRESS: "(heap-buffer-overflow|use-after-poison)[^$]*WRITE of size 4"},
            ("graphfuse/rows.cuh", "ACCESS>(scales.of("),
        ),
    ),
    "a scale by every lane": (
        ROWS,
        Bug("    if (thread % LANES == 0) {", "    if (true) {", {RACE: "data race"}, ("graphfuse/rows.cuh", _STORE)),
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


@pytest.mark.some(4)
@pytest.mark.emulate
@pytest.mark.parametrize("name, build", each(BUGS), ids=str)
def test_planted_bugs_are_found(name, build):
    case, bug = BUGS[name]
    pack, outputs = case.inputs(), case.outputs()
    planned = Planned(case.graph("emulator"), pack | outputs, LANES)
    planned.run()
    for output, want in case.quantized(case.values(pack, [heur_mode.OPENSOURCE], "emulator")).items():
        found = outputs[output] if output == "scale" else outputs[output].view(torch.uint8)
        np.testing.assert_array_equal(found.numpy(), want)
    right = {name: content for name, content in planned.contents().items() if name in outputs}
    files = {"graphfuse/rows.cuh": template("graphfuse.codegen.headers", "rows.cuh")}
    assert_caught(bug, report(planned, right, build, plant(planned.source, bug)), build, files)
    assert not report(planned, right, build)


def test_the_oracle_is_what_its_parts_say():
    """By search for the nearest code, in float64 where float32 is asked for by name."""
    values = np.random.default_rng(0).standard_normal((2, 256)).astype(np.float32)
    codes, scales = oracle.fp8_by_groups(values, "e4m3")
    for row, block in np.ndindex(2, 2):
        part = values[row, 128 * block : 128 * (block + 1)]
        scale = np.float32(np.abs(part).max() * np.float32(1 / np.float32(448)))
        assert scales[row, block] == scale
        scaled = torch.from_numpy(part * np.float32(1 / scale))
        assert torch.equal(
            torch.from_numpy(codes[row, 128 * block : 128 * (block + 1)]), oracle.fp8_search(scaled, "e4m3")
        )
