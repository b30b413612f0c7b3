"""The checked-in table of what every kernel variant uses on every chip. Run it to write the table anew."""

import csv
import io
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from importlib import metadata
from pathlib import Path

import cubin
from graphfuse.runtime import nvrtc, toolkit
from variants import TARGETS, VARIANTS, Variant

PATH = Path(__file__).resolve().parent.parent / "docs" / "records" / "kernel-resources.csv"
COMMAND = "make kernel-table"
_COLUMNS = "variant,arch,threads,registers,shared,stack,local,spills,instructions,load,read_only,store".split(",")
_HEAD = "# NVRTC "


@dataclass(frozen=True)
class Table:
    """nvrtc: the version that compiled the kernels. rows: by variant and chip, numbers as in `row`."""

    nvrtc: str
    rows: dict[tuple[str, str], tuple[int, ...]]


def compiler() -> str:
    """The version of NVRTC in use, as precisely as it can be told."""
    kit = toolkit.find()
    return metadata.version("nvidia-cuda-nvrtc") if kit.origin == "pip wheels" else kit.version


def compiled(variant: Variant, arch: str) -> cubin.Code:
    """The variant's machine code for one of TARGETS. AssertionError where NVRTC warns."""
    log = io.StringIO()
    code = nvrtc.compile(variant.source(TARGETS[arch]), arch, f"{variant.engine.name}.cu", log)
    assert not log.getvalue().strip("\0 \n"), log.getvalue()
    return cubin.read(code)


def row(variant: Variant, arch: str, code: cubin.Code) -> tuple[int, ...]:
    """The numbers of one line: threads a CTA, what the code uses, and its widest accesses in bytes."""
    threads = variant.engine.launch(variant.facts(), variant.knobs_on(TARGETS[arch])).block
    *used, loads, read_only, stores, _ = astuple(code)
    return (threads, *used, max(loads), max(read_only, default=0), max(stores))


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

    def line(key: tuple[str, str]) -> list[object]:
        name, arch = key
        return [name, arch, *row(VARIANTS[name], arch, compiled(VARIANTS[name], arch))]

    with ThreadPoolExecutor() as pool:
        lines = list(pool.map(line, ((name, arch) for name in VARIANTS for arch in TARGETS)))
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([_COLUMNS, *lines])
    PATH.parent.mkdir(parents=True, exist_ok=True)
    PATH.write_text(f"{_HEAD}{compiler()}\n{text.getvalue()}")
    print(f"{PATH}: {len(lines)} kernels")


if __name__ == "__main__":
    main()
