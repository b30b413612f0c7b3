"""Every kind of RMSNorm kernel for every architecture through NVRTC: it compiles, spills nothing, and
moves as many bytes an instruction as the plan says."""

import ctypes
import dataclasses
import importlib.metadata
import re
import subprocess

import pytest

from graphfuse.device import ARCHES, for_arch
from graphfuse.dtypes import data_type
from graphfuse.engines.rmsnorm import RmsNormEngine
from graphfuse.enums import heur_mode
from graphfuse.patterns.rmsnorm import RmsNormFacts, View
from graphfuse.pointwise import Chain, Program, Scalar, Step

pytestmark = pytest.mark.compile

ENGINE = RmsNormEngine()
FLOAT, HALF, BF16 = data_type.FLOAT, data_type.HALF, data_type.BFLOAT16
E4M3, E5M2, E2M1 = data_type.FP8_E4M3, data_type.FP8_E5M2, data_type.FP4_E2M1
SILU = Program((Step("swish", (("input", Chain(0)),), (("swish_beta", 1.0),)),))
ALL_OPS = Program(
    (
        Step("gelu", (("input", Chain(0)),)),
        Step("mul", (("a", Chain(1)), ("b", Scalar(7, "factor", BF16, False)))),
        Step("tanh", (("input", Chain(2)),)),
        Step("relu", (("input", Chain(3)),), (("negative_slope", 0.5), ("upper_clip", 6.0))),
        Step("gelu_approx_tanh", (("input", Chain(4)),)),
        Step("sub", (("a", Scalar(8, "top", FLOAT, True)), ("b", Chain(5)))),
    )
)

# columns, input, weight, bias, output, inverse_rms, alignment, epilogue: each type in each
# role, each access width, each level of the reduction, rows in registers and read twice.
VARIANTS = {
    "silu 1024": (1024, BF16, BF16, None, BF16, False, 16, SILU),
    "one column": (1, FLOAT, FLOAT, None, HALF, True, 16, SILU),
    "odd columns": (111, BF16, FLOAT, HALF, BF16, False, 16, SILU),
    "unaligned": (512, HALF, HALF, None, FLOAT, False, 2, Program()),
    "half aligned": (3420, HALF, BF16, BF16, HALF, True, 8, SILU),
    "float": (1024, FLOAT, FLOAT, FLOAT, FLOAT, True, 16, SILU),
    "e4m3": (1024, BF16, BF16, None, E4M3, False, 16, SILU),
    "e5m2": (7168, FLOAT, HALF, BF16, E5M2, True, 16, SILU),
    "odd e4m3": (33, HALF, FLOAT, None, E4M3, False, 4, SILU),
    "nvfp4": (1024, BF16, BF16, None, E2M1, False, 16, SILU),
    "nvfp4 from float": (8192, FLOAT, FLOAT, FLOAT, E2M1, True, 16, SILU),
    "long": (32768, BF16, FLOAT, FLOAT, BF16, True, 16, SILU),
    "longest held": (40960, BF16, BF16, BF16, E4M3, False, 16, SILU),
    "read twice": (65536, FLOAT, FLOAT, FLOAT, E2M1, True, 16, SILU),
    "odd read twice": (65537, BF16, BF16, None, BF16, False, 16, SILU),
    "all ops": (2048, BF16, BF16, None, BF16, False, 16, ALL_OPS),
}


def facts(name: str) -> RmsNormFacts:
    columns, x, w, b, y, inverse_rms, alignment, program = VARIANTS[name]
    rows = 1000

    def view(tensor, dtype, columns):
        return View(tensor, "t", dtype, ((rows, columns),), 1, alignment)

    return RmsNormFacts(
        node="norm",
        rows=rows,
        columns=columns,
        input=view(0, x, columns),
        weight=dataclasses.replace(view(1, w, columns), rows=()),
        bias=dataclasses.replace(view(2, b, columns), rows=()) if b else None,
        epsilon=Scalar(3, "eps", FLOAT, inverse_rms),
        epilogue=program,
        output=view(4, y, columns),
        inverse_rms=view(5, FLOAT, 1) if inverse_rms else None,
        block_scale=view(6, data_type.FP8_E4M3, columns // 16) if y is E2M1 else None,
        block_size=16 if y is E2M1 else 0,
    )


@pytest.fixture(scope="module")
def compile_kernel():
    """source, arch -> (cubin, PTX)."""
    for file in importlib.metadata.distribution("nvidia-cuda-nvrtc").files:
        if file.name.startswith("libnvrtc.so"):
            ctypes.CDLL(str(file.locate()), mode=ctypes.RTLD_GLOBAL)
    from cuda.bindings import nvrtc

    def check(answer):
        error, *rest = answer
        assert error == nvrtc.nvrtcResult.NVRTC_SUCCESS, error
        return rest[0] if rest else None

    def compile_(source: str, arch: str) -> tuple[bytes, str]:
        program = check(nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, [], []))
        options = [f"--gpu-architecture={arch}".encode(), b"--std=c++17", b"--fmad=false"]
        (error,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        log = b" " * check(nvrtc.nvrtcGetProgramLogSize(program))
        check(nvrtc.nvrtcGetProgramLog(program, log))
        assert error == nvrtc.nvrtcResult.NVRTC_SUCCESS, log.decode()
        assert not log.strip(b" \0"), log.decode()  # no warnings either
        cubin = b" " * check(nvrtc.nvrtcGetCUBINSize(program))
        ptx = b" " * check(nvrtc.nvrtcGetPTXSize(program))
        check(nvrtc.nvrtcGetCUBIN(program, cubin))
        check(nvrtc.nvrtcGetPTX(program, ptx))
        check(nvrtc.nvrtcDestroyProgram(program))
        return cubin, ptx.decode()

    return compile_


@pytest.fixture(scope="module")
def resources(tmp_path_factory):
    """cubin -> registers, and bytes of stack and local memory, of its kernel."""
    files = importlib.metadata.distribution("nvidia-cuda-cuobjdump").files
    tool = next(str(file.locate()) for file in files if file.name == "cuobjdump")
    path = tmp_path_factory.mktemp("cubin") / "kernel.cubin"

    def read(cubin: bytes) -> dict[str, int]:
        path.write_bytes(cubin)
        out = subprocess.run([tool, "-res-usage", str(path)], capture_output=True, text=True, check=True).stdout
        line = re.search(r"REG:\d+ .*", out)[0]
        return {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", line)}

    return read


@pytest.mark.parametrize("arch", [*ARCHES, "sm_120a"])
@pytest.mark.parametrize("name", VARIANTS)
def test_compiles_without_spills(compile_kernel, resources, name, arch):
    problem, device = facts(name), for_arch(arch.replace("120a", "120"))
    assert ENGINE.why_not(problem, device) is None
    knobs = ENGINE.propose(problem, device, heur_mode.A)[0]
    used = resources(compile_kernel(ENGINE.source(problem, knobs), arch)[0])
    assert used["STACK"] == used["LOCAL"] == 0, used
    assert used["REG"] * knobs.threads <= 65536


@pytest.mark.parametrize("name", ["silu 1024", "float", "e5m2", "nvfp4 from float", "longest held"])
def test_no_proposed_knobs_spill(compile_kernel, resources, name):
    problem, device = facts(name), for_arch("sm_90a")
    # Threads a CTA and how much a thread holds decide; one of each pair will do.
    held = {}
    for knobs in ENGINE.propose(problem, device, heur_mode.B):
        held[knobs.threads_per_row, knobs.threads >= 512 and knobs.threads] = knobs
    for knobs in held.values():
        used = resources(compile_kernel(ENGINE.source(problem, knobs), "sm_90a")[0])
        assert used["STACK"] == used["LOCAL"] == 0, (knobs, used)


@pytest.mark.parametrize(
    "name, loads, stores",
    [
        ("silu 1024", "ld.global.v4", "st.global.v4"),
        ("unaligned", "ld.global.u16", "st.global.u16"),
        ("half aligned", "ld.global.v2", "st.global.v2"),
        ("float", "ld.global.v4", "st.global.v4"),
        ("e4m3", "ld.global.v4", "st.global.v2"),
        ("nvfp4", "ld.global.v4", "st.global.u32"),
        ("odd columns", "ld.global.u16", "st.global.u16"),
    ],
)
def test_width_of_accesses(compile_kernel, name, loads, stores):
    problem = facts(name)
    knobs = ENGINE.propose(problem, for_arch("sm_90a"), heur_mode.A)[0]
    ptx = compile_kernel(ENGINE.source(problem, knobs), "sm_90a")[1]
    # Weight and bias go the read-only way (ld.global.nc); scales and inverse RMS are stores of their own.
    found = set(re.findall(r"\b((?:ld|st)\.global(?!\.nc)\.(?:v\d\.)?[a-z]\d+)", ptx))
    widths = {re.sub(r"(v\d)\..*", r"\1", access).replace(".b", ".u") for access in found}
    assert widths - {"st.global.u8", "st.global.f32"} == {loads, stores}, found


def test_hardware_conversions_are_used_where_the_chip_has_them(compile_kernel):
    def ptx(name, arch):
        problem = facts(name)
        knobs = ENGINE.propose(problem, for_arch("sm_90a"), heur_mode.A)[0]
        return compile_kernel(ENGINE.source(problem, knobs), arch)[1]

    assert "cvt.rn.bf16x2.f32" in ptx("silu 1024", "sm_80")
    for arch in ARCHES:
        hardware = int(arch[3:].rstrip("a")) >= 89
        assert ("satfinite.e4m3x2.f32" in ptx("e4m3", arch)) == hardware
    for arch in (*ARCHES, "sm_120a"):
        assert ("satfinite.e2m1x2.f32" in ptx("nvfp4", arch)) == (arch in ("sm_100a", "sm_103a", "sm_120a"))
