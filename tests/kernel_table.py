"""The checked-in table of what every kernel variant uses on every chip. Run it to write the table anew."""

import csv
import functools
import io
import re
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest

from graphfuse.runtime import cache, nvrtc, toolkit
from support import cubin
from support.variants import FIRST, TARGETS, VARIANTS, Variant

PATH = Path(__file__).resolve().parent.parent / "docs" / "records" / "kernel-resources.csv"
PINS = PATH.parent.parent.parent / "kernel-table.txt"
COMMAND = "make kernel-table"
_COLUMNS = "variant,arch,threads,registers,shared,stack,local,spills,instructions,load,read_only,store".split(",")
_HEAD = "# NVRTC "


@dataclass(frozen=True)
class Table:
    """nvrtc: the version that compiled the kernels. rows: by variant and chip, numbers as in `row`."""

    nvrtc: str
    rows: dict[tuple[str, str], tuple[int, ...]]


@functools.cache
def compiler() -> str:
    """The version of NVRTC in use, as precisely as it can be told."""
    kit = toolkit.find()
    file = kit.nvrtc.resolve()
    for wheel in metadata.distributions(name="nvidia-cuda-nvrtc"):
        if any(Path(str(f.locate())).resolve() == file for f in wheel.files or ()):
            return wheel.version
    return kit.version


def pinned() -> str:
    """The version of NVRTC that the command brings."""
    return re.search(r"^nvidia-cuda-nvrtc==(\S+)", PINS.read_text(), re.MULTILINE)[1]


@functools.cache
def compiled(names: tuple[str, ...], arch: str) -> dict[str, cubin.Code]:
    """Variants' machine code for one of TARGETS. AssertionError where NVRTC warns."""
    return dict(zip(names, cubin.read([_compiled(name, arch) for name in names], arch), strict=True))


@functools.cache
def _compiled(name: str, arch: str) -> bytes:
    """From the disk if it was compiled before without a warning: as what it is kept there, its name says."""
    variant, log = VARIANTS[name], io.StringIO()
    source, place = variant.source(TARGETS[arch]), f"{variant.engine.name}.cu"
    key = cache.key(source, arch, f"{place} without a warning", nvrtc.needs(source))
    code = cache._read(key)
    if code is None:
        code = nvrtc.compile(source, arch, place, log)
        assert not log.getvalue().strip("\0 \n"), f"{name!r} for {arch}: {log.getvalue()}"
        cache._write(key, code)
    return code


CHECKED = {
    arch: tuple(name for name in VARIANTS if arch == "sm_90a" or (zlib.crc32(name.encode()) + place) % 8 == 0)
    for place, arch in enumerate(TARGETS)
}
"""What tests compile: every variant for SM90 and, for time's sake, an eighth of them for each other chip. The name says
which, so that a new variant does not move the others."""


def chips() -> list:
    """Each of TARGETS and whether it is the first variants or the others, as parameters (arch, first) of a test that
    looks at the `code` of these."""
    return [
        pytest.param(arch, first, marks=[pytest.mark.xdist_group(arch), *([] if first else [pytest.mark.further])])
        for arch in CHECKED
        for first in (True, False)
    ]


def checked() -> list:
    """CHECKED, as parameters (name, arch) of a test that looks at `code`; the tests of one chip run in one process."""
    return [pytest.param(n, c.values[0], marks=c.marks) for c in chips() for n in among(*c.values)]


@functools.cache
def among(arch: str, first: bool) -> tuple[str, ...]:
    """Those of CHECKED that `make test` compiles, or the others. Of a chip that is not SM90 it is every second one of
    the first variants."""
    chosen = [name for name in CHECKED[arch] if name in FIRST][:: 1 if arch == "sm_90a" else 2]
    return tuple(name for name in CHECKED[arch] if (name in chosen) == first)


def code(name: str, arch: str) -> cubin.Code:
    """One of CHECKED, compiled with all others for the chip that are in its lane."""
    return compiled(among(arch, name in among(arch, True)), arch)[name]


def row(variant: Variant, arch: str, code: cubin.Code) -> tuple[int, ...]:
    """The numbers of one line: threads a CTA, what the code uses, and its widest accesses in bytes."""
    threads = variant.engine.launch(variant.facts(), variant.knobs_on(TARGETS[arch])).block
    used = (code.registers, code.shared, code.stack, code.local, code.spills, len(code.opcodes))
    return (threads, *used, max(code.loads, default=0), max(code.read_only, default=0), max(code.stores))


@functools.cache
def read() -> Table:
    """The table as checked in."""
    head, _, *lines = PATH.read_text().splitlines()
    rows = {(name, arch): tuple(map(int, numbers)) for name, arch, *numbers in csv.reader(lines)}
    return Table(head.removeprefix(_HEAD), rows)


def difference(name: str, arch: str, now: tuple[int, ...]) -> str:
    """How a row differs from the table, in words; empty if it does not."""
    before = read().rows.get((name, arch))
    if before is None:
        return f"{name!r} for {arch} is not in {PATH.name}: run {COMMAND}"
    changes = [f"{c} {a} -> {b}" for c, a, b in zip(_COLUMNS[2:], before, now, strict=True) if a != b]
    if not changes:
        return ""
    return f"{name!r} for {arch}: {', '.join(changes)}. If that is meant, run {COMMAND} and commit {PATH.name}"


def main() -> None:
    import cuda.core  # noqa: F401 - before the threads: two first imports of it at once fail

    if compiler() != pinned():
        raise SystemExit(f"this is NVRTC {compiler()}; {PINS.name} pins {pinned()}: run {COMMAND}")
    with ThreadPoolExecutor() as pool:
        codes = dict(zip(TARGETS, pool.map(functools.partial(compiled, tuple(VARIANTS)), TARGETS), strict=True))
    keys = [(name, arch) for name in VARIANTS for arch in TARGETS]
    lines = [[name, arch, *row(VARIANTS[name], arch, codes[arch][name])] for name, arch in keys]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([_COLUMNS, *lines])
    PATH.parent.mkdir(parents=True, exist_ok=True)
    PATH.write_text(f"{_HEAD}{compiler()}\n{text.getvalue()}")
    print(f"{PATH}: {len(lines)} kernels")


if __name__ == "__main__":
    main()
