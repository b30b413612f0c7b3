"""FP4 with scales that are powers of two, and scales without their elements: kernels on the emulator, bit for bit what
the value before quantization says, with any knobs; bugs planted into them are found."""

import io
import itertools
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from graphfuse import data_type, heur_mode, norm_forward_phase, tensor_reordering
from graphfuse.base.device import ARCHES, for_arch
from graphfuse.base.errors import KernelFaultError
from graphfuse.codegen.render import template
from graphfuse.engines.rows import RowEngine
from graphfuse.engines.rows.by_row import ByRowKnobs
from graphfuse.runtime import nvrtc
from graphfuse.runtime.handle import Handle
from support import cubin, graphs, oracle
from support.bugs import ADDRESS, RACE, WRONG, Bug, assert_caught, plant
from support.emulation import Planned, Varies
from support.graphs import BF16, E4M3, FLOAT, FP4, HALF

E8M0 = data_type.FP8_E8M0
DEVICE = for_arch("sm_90a")


@dataclass(frozen=True)
class Blocks:
    """rmsnorm(x) * weight in blocks. layouts: of the scales, which are written once for each; elements: whether these
    are written."""

    size: int = 32
    scale: data_type = E8M0
    rows: int = 5
    columns: int = 96
    x: data_type = BF16
    layouts: tuple[str, ...] = ("row",)
    elements: bool = True

    def graph(self, device: str = "emulator"):
        g = graphs.new(device=device)
        x = g.tensor([self.rows, self.columns], data_type=self.x, name="x")
        weight = g.tensor([self.columns], name="weight")
        y = g.rmsnorm(x, weight, 0.0, norm_forward_phase=norm_forward_phase.INFERENCE)[0]
        for number, layout in enumerate(self.layouts):
            codes, scales = g.block_scale_quantize(y, block_size=self.size)
            codes.set_data_type(FP4)
            scales.set_data_type(self.scale).set_output().set_name(f"{layout} scales").set_byte_alignment(1)
            if layout == "tiles":
                scales.set_reordering_type(tensor_reordering.F8_128x4)
            if self.elements and number == 0:
                codes.set_output().set_name("codes")
        return g

    def inputs(self) -> dict[str, torch.Tensor]:
        """Rows of every magnitude a block may have: a weight that grows from block to block, past what scales hold."""
        x = torch.randn(self.rows, self.columns, generator=graphs.generator("cpu", self.size)).to(graphs.TORCH[self.x])
        exponents = torch.linspace(-140, 126, self.columns // 16).repeat_interleave(16)
        return {"x": x, "weight": torch.exp2(exponents.double()).float()}

    def outputs(self) -> dict[str, torch.Tensor]:
        blocks = self.columns // self.size
        tiles = -(-self.rows // 128) * 128 * (-(-blocks // 4) * 4)
        shapes = {"row": (self.rows, blocks), "tiles": (tiles,)}
        made = {f"{layout} scales": torch.full(shapes[layout], 0xA5, dtype=torch.uint8) for layout in self.layouts}
        if self.elements:
            made["codes"] = torch.full((self.rows, self.columns // 2), 0xA5, dtype=torch.uint8)
        return made

    def values(self, pack: dict) -> np.ndarray:
        """What is quantized, in float32, by the same engine."""
        g = graphs.new(device="emulator")
        x = g.tensor([self.rows, self.columns], data_type=self.x, name="x")
        weight = g.tensor([self.columns], name="weight")
        y = g.rmsnorm(x, weight, 0.0, norm_forward_phase=norm_forward_phase.INFERENCE)[0]
        y.set_output().set_name("y")
        out = torch.empty(self.rows, self.columns)
        graphs.run(g, pack | {"y": out}, [heur_mode.OPENSOURCE])
        return out.numpy()

    def exact(self, pack: dict) -> dict[str, np.ndarray]:
        y = self.values(pack)
        codes, scales = oracle.nvfp4(y) if self.scale is E4M3 else oracle.mxfp4(y, self.size)
        found = {"row scales": scales, "tiles scales": oracle.swizzled(scales, 0xA5), "codes": codes}
        return {name: found[name] for name in self.outputs()}

    def hold(self, outputs: dict, pack: dict) -> None:
        for name, want in self.exact(pack).items():
            np.testing.assert_array_equal(outputs[name].numpy(), want, err_msg=name)


@pytest.mark.emulate
@pytest.mark.parametrize("size", [16, 32])
@pytest.mark.parametrize("x", [FLOAT, HALF, BF16], ids=lambda x: x.name)
def test_every_magnitude(size, x):
    """And NaN, infinity and zeros. Scales that no factor of a conversion could hold are among them."""
    case = Blocks(size, x=x, rows=6, columns=640)
    pack = case.inputs()
    pack["x"][1, 100], pack["x"][2] = float("nan"), 0
    pack["weight"][3::64] = 0
    pack["weight"][-1] = float("inf")
    outputs = case.outputs()
    graphs.run(case.graph(), pack | outputs, [heur_mode.OPENSOURCE])
    case.hold(outputs, pack)
    scales = outputs["row scales"]
    assert {0, 254, 255} <= {*scales.flatten().tolist()}
    assert (outputs["codes"][1] == 0x77).all() and (scales[1] == 255).all()


@pytest.mark.emulate
def test_tiny_and_huge_scales_are_exact():
    """2^-127 and 2^127 are scales like others: their blocks have the elements of any other power of two."""
    case = Blocks(rows=1, columns=96, x=FLOAT)
    for power in (-124, 0, 124):
        pack = {"x": torch.ones(1, 96), "weight": torch.tensor([6.0, -4, 3, 2, 1.5, 1, 0.5, -0.0] * 12) * 2.0**power}
        outputs = case.outputs()
        graphs.run(case.graph(), pack | outputs, [heur_mode.OPENSOURCE])
        assert (outputs["codes"].view(-1, 4) == torch.tensor([0xE7, 0x45, 0x23, 0x81], dtype=torch.uint8)).all()
        assert (outputs["row scales"] == 127 + power).all()


@pytest.mark.some(1)
@pytest.mark.emulate
@pytest.mark.parametrize("size, scale", [(16, E8M0), (32, E8M0), (16, E4M3)], ids=str)
@pytest.mark.parametrize("layouts", [("row",), ("tiles", "row"), ("row", "tiles")], ids=" ".join)
@pytest.mark.parametrize("x", [FLOAT, BF16], ids=lambda x: x.name)
def test_any_knobs(size, scale, layouts, x):
    """Every number of lanes that share a block, and of chunks that a thread takes."""
    case = Blocks(size, scale, rows=3, columns=192, x=x, layouts=layouts)
    pack = case.inputs()
    exact, engine = case.exact(pack), RowEngine()
    facts = Planned(case.graph(), pack).part.facts
    knobs = [ByRowKnobs(1 << p, max(32, 1 << p), chunks) for p in range(6) for chunks in (1, 2, 4)]
    knobs = [k for k in knobs if engine.illegal(facts, k, DEVICE) is None]
    assert {k.chunks for k in knobs} == ({1, 2} if size == 16 else {1, 2, 4})
    for choice in knobs:
        outputs = case.outputs()
        Planned(case.graph(), pack | outputs, choice).run()
        for name, want in exact.items():
            np.testing.assert_array_equal(outputs[name].numpy(), want, err_msg=f"{name} {choice}")


@pytest.mark.parametrize("size, scale", [(16, E8M0), (32, E8M0), (16, E4M3)], ids=str)
@pytest.mark.parametrize("elements", [True, False], ids=["elements", "scales alone"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("emulator", marks=pytest.mark.emulate)])
def test_scales_in_both_layouts_and_alone(size, scale, elements, device):
    case = Blocks(size, scale, rows=130, columns=160, layouts=("tiles", "row"), elements=elements)
    pack, outputs = case.inputs(), case.outputs()
    g = case.graph(device)
    graphs.run(g, pack | outputs, [heur_mode.OPENSOURCE if device == "emulator" else heur_mode.FALLBACK])
    assert g.get_workspace_size() == 0 and isinstance(g.get_engine_and_knobs_at_index(0)[0], str)
    for name, want in case.exact(pack).items():
        np.testing.assert_array_equal(outputs[name].numpy(), want, err_msg=name)


def test_engines_say_what_is_wrong_with_scales_alone():
    g = graphs.new(device="emulator")
    y = g.rmsnorm(g.tensor([4, 256]), g.tensor([256]), 0.0, norm_forward_phase=norm_forward_phase.INFERENCE)[0]
    g.block_scale_quantize(y, block_size=128)[1].set_output().set_name("scales").set_byte_alignment(2)
    g.build_operation_graph()
    g.create_execution_plans([heur_mode.A])
    assert "block scale 'scales' is aligned to 2 bytes; accepted: a multiple of 4" in g.explain()


def test_problem_classes_tell_formats_apart():
    """Tuned entries for NVFP4 keep their keys, and no other format has them."""
    engine, keys = RowEngine(), []
    for size, scale, layouts in (
        (16, E4M3, ("row",)),
        (16, E8M0, ("row",)),
        (32, E8M0, ("row",)),
        (16, E4M3, ("row", "tiles")),
    ):
        case = Blocks(size, scale, layouts=layouts)
        keys.append(engine.problem(Planned(case.graph(), case.inputs()).part.facts).key)
    assert all(a != b for a, b in itertools.combinations(keys, 2))
    assert [set(output) for output in keys[0]["outputs"]] == [{"type", "kind", "access", "phase", "block"}]


# What the new headers must not get wrong.

LANES = ByRowKnobs(8, 64)
_STORE = "store_pack<sizeof(typename Blocks<T>::Scale), ACCESS>(scales.of(thread / LANES, at / LANES), {{scale}});\n"
BUGS = {
    "a scale of E8M0 rounded down": (
        Blocks(),
        Bug(
            "return encode_e8m0_up(amax * (1.0f / 6.0f));",
            "return as_bits(amax * (1.0f / 6.0f)) >> 23;",
            {ADDRESS: WRONG},
            ("", ""),
        ),
    ),
    "the scale as a factor of the conversion": (
        Blocks(x=FLOAT, columns=192),
        Bug("encode_e2m1(part, 1.0f);", "encode_e2m1(values, inverse);", {ADDRESS: WRONG}, ("", "")),
    ),
    "NaN left to the conversion": (
        Blocks(x=FLOAT),
        Bug("scale == 0xffu ? 0x77777777u : encode_e2m1", "encode_e2m1", {ADDRESS: WRONG}, ("", "")),
    ),
    "scales alone of half a block": (
        Blocks(layouts=("row", "tiles"), elements=False),
        Bug(
            "  const u32 scale = block_scale<T>(block_amax<BLOCK>(values));\n  if (stored && thread",
            "  const u32 scale = block_scale<T>(max_magnitude(values));\n  if (stored && thread",
            {ADDRESS: WRONG},
            ("", ""),
        ),
    ),
    "scales alone of the row after the last": (
        Blocks(16, E4M3, layouts=("row",), elements=False),
        Bug(
            "if (stored && thread % LANES == 0) {",
            "if (thread % LANES == 0) {",
            {ADDRESS: "(heap-buffer-overflow|use-after-poison)[^$]*WRITE of size 1"},
            ("graphfuse/rows.cuh", "ACCESS>(scales.of("),
        ),
    ),
    "scales alone by every lane": (
        Blocks(16, E4M3, layouts=("row",), elements=False),
        Bug(
            _STORE + "  }\n}",
            _STORE + "  }\n  if (stored) store_pack<1, ACCESS>(scales.of(0, 0), {{scale}});\n}",
            {RACE: "data race"},
            ("graphfuse/rows.cuh", "ACCESS>(scales.of("),
        ),
    ),
}


def bug_problem(case: Blocks) -> tuple[Planned, dict[str, bytes]]:
    pack, outputs = case.inputs(), case.outputs()
    if case.x is FLOAT:
        pack["x"][1, 40] = float("nan")
    right = {name: want.tobytes() for name, want in case.exact(pack).items()}
    return Planned(case.graph(), pack | outputs, LANES), right


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
@pytest.mark.parametrize(
    "name, build", [(name, build) for name, (_, bug) in BUGS.items() for build in bug.found], ids=str
)
def test_planted_bugs_are_found(name, build):
    case, bug = BUGS[name]
    planned, right = bug_problem(case)
    files = {"graphfuse/rows.cuh": template("graphfuse.codegen.headers", "rows.cuh")}
    assert_caught(bug, report(planned, right, build, plant(planned.source, bug)), build, files)
    assert not report(planned, right, build)


@pytest.mark.compile
@pytest.mark.parametrize("arch", [*ARCHES, "sm_120a"])
def test_compiles_for(arch):
    """Without a warning and with all it needs in registers."""
    for case in (
        Blocks(columns=4096, layouts=("tiles", "row")),
        Blocks(16, x=FLOAT, columns=1024),
        Blocks(16, E4M3, elements=False),
    ):
        graph = case.graph("cpu")
        graph.handle = Handle(for_arch(arch.replace("120a", "120")))
        graph.build_operation_graph()
        graph.create_execution_plans([heur_mode.OPENSOURCE])
        (part,) = graph._planner.plans[0].parts
        log = io.StringIO()
        used = cubin.usage(nvrtc.compile(part.engine.source(part.facts, part.knobs), arch, "by_row.cu", log))
        assert not log.getvalue().strip("\0 \n") and used["STACK"] == used["LOCAL"] == 0, (case, used, log.getvalue())
