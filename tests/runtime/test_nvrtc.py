import pytest

from graphfuse.base.errors import KernelCompileError, ToolkitNotFoundError
from graphfuse.runtime import nvrtc, toolkit

pytestmark = [pytest.mark.compile, pytest.mark.torch]

KERNEL = 'extern "C" __global__ void k(float* p, float a, float b) { p[0] = %s; }\n'


def test_a_cubin_for_the_architecture():
    code = nvrtc.compile(KERNEL % "a * p[0] + b", "sm_90a", "k")
    assert code[:4] == b"\x7fELF" and int.from_bytes(code[18:20], "little") == 190  # EM_CUDA
    assert b".debug_line" in code and b".text.k\x00" in code


def test_the_same_source_gives_the_same_bytes():
    assert nvrtc.compile(KERNEL % "a", "sm_90a", "k") == nvrtc.compile(KERNEL % "a", "sm_90a", "k")


def test_products_and_sums_are_not_contracted():
    # With contraction the two would be the same instruction.
    written = nvrtc.compile(KERNEL % "fmaf(a, b, p[0])", "sm_90a", "k")
    apart = nvrtc.compile(KERNEL % "a * b + p[0]", "sm_90a", "k")
    by_hand = nvrtc.compile(KERNEL % "__fadd_rn(__fmul_rn(a, b), p[0])", "sm_90a", "k")

    def machine_code(cubin: bytes) -> bytes:
        return section(cubin, b".text.k")

    assert machine_code(apart) == machine_code(by_hand) != machine_code(written)


def section(elf: bytes, wanted: bytes) -> bytes:
    """The contents of a section of a little-endian 64-bit ELF file."""
    table = int.from_bytes(elf[40:48], "little")
    size, count, names = (int.from_bytes(elf[at : at + 2], "little") for at in (58, 60, 62))

    def entry(index: int) -> tuple[int, int, int]:
        at = table + index * size
        offset, length = (int.from_bytes(elf[at + o : at + o + 8], "little") for o in (24, 32))
        return int.from_bytes(elf[at : at + 4], "little"), offset, length

    strings = entry(names)[1]
    for index in range(count):
        name, offset, length = entry(index)
        start = strings + name
        if elf[start : elf.index(b"\0", start)] == wanted:
            return elf[offset : offset + length]
    raise AssertionError(f"no section {wanted}")


def test_an_error_shows_the_log_with_the_line_that_it_is_about():
    """By the name and number that #line says."""
    source = '#line 1 "first.cuh"\n__device__ int a;\n#line 7 "second.cuh"\n__device__ int f() { return nonsense; }\n'
    with pytest.raises(KernelCompileError) as error:
        nvrtc.compile(source, "sm_90a", "broken")
    message = str(error.value)
    assert "'broken' for sm_90a" in message
    assert (
        'second.cuh(7): error: identifier "nonsense" is undefined\n  __device__ int f() { return nonsense; }' in message
    )
    assert error.value.source == source and "nonsense" in error.value.log


def test_an_architecture_nvrtc_does_not_know():
    with pytest.raises(KernelCompileError, match="'k' for sm_7"):
        nvrtc.compile(KERNEL % "a", "sm_7", "k")


def test_a_failure_leaves_nothing_behind_on_standard_error(python):
    code = """
import gc
from graphfuse.base.errors import KernelCompileError
from graphfuse.runtime import nvrtc
try:
    nvrtc.compile("nonsense", "sm_90a", "k")
except KernelCompileError:
    pass
gc.collect()
"""
    import subprocess
    import sys

    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr == ""


FP16 = "#include <cuda_fp16.h>\n" + KERNEL % "__half2float(__float2half(a))"


def test_headers_are_there_for_sources_that_include_them():
    assert nvrtc.compile(FP16, "sm_90a", "k")[:4] == b"\x7fELF"


def test_bundled_headers_serve_where_there_are_no_others(monkeypatch, tmp_path):
    kit = toolkit.load()
    if not toolkit._has_bundled_headers(kit):
        pytest.skip(f"NVRTC {kit.version} carries no headers, or this cuda.core cannot ask for them")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(toolkit, "_wheel_roots", lambda: ())
    assert nvrtc.needs(FP16).bundled
    assert nvrtc.compile(FP16, "sm_90a", "k")[:4] == b"\x7fELF"


def test_missing_headers_are_told_before_compiling(monkeypatch, tmp_path):
    toolkit.load()
    monkeypatch.setattr(toolkit, "_wheel_roots", lambda: ())
    monkeypatch.setattr(toolkit, "_has_bundled_headers", lambda kit: False)
    monkeypatch.setattr(toolkit, "SYSTEM_ROOT", tmp_path)
    with pytest.raises(ToolkitNotFoundError, match="the source includes headers"):
        nvrtc.compile("  #  include <cuda_fp16.h>\nnonsense", "sm_90a", "k")
    nvrtc.compile("// #include <cuda_fp16.h>\n" + KERNEL % "a", "sm_90a", "k")
