"""Bugs that are planted into kernels, and what the emulator says about them."""

import re
from dataclasses import dataclass

import numpy as np

from graphfuse.base.errors import KernelFaultError
from graphfuse.emulator.compiler import Build
from support import emulation
from support.emulation import Varies

WRONG, VARIES = "a wrong result", "results that vary"
ADDRESS, RACE = Build.ADDRESS, Build.RACE


@dataclass(frozen=True)
class Bug:
    """One change of a kernel's text. found: by which build, with what in its report. at: file, and part of
    the line of it, that the report names."""

    old: str
    new: str
    found: dict[Build, str]
    at: tuple[str, str]


def caught(source: str, entry, launch, arrays, scalars, build: Build, expected: dict[int, np.ndarray]) -> str:
    """What the lane says about a kernel; empty if it finds nothing."""
    try:
        found = emulation.checked(source, entry, launch, arrays, scalars, [build])
    except KernelFaultError as fault:
        return str(fault)
    except Varies:
        return VARIES
    return "" if all(found[n] == a.tobytes() for n, a in expected.items()) else WRONG


def plant(text: str, bug: Bug) -> str:
    assert text.count(bug.old) == 1, f"{text.count(bug.old)} times in the kernel: {bug.old}"
    return text.replace(bug.old, bug.new)


def assert_caught(bug: Bug, report: str, build: Build, files: dict[str, str]) -> None:
    assert report, "nothing was found"
    assert re.search(bug.found[build], report), report
    assert report.count("SUMMARY: ") <= 1, f"the program did not end at the first fault: {report}"
    if report not in (WRONG, VARIES):
        file, part = bug.at
        lines = [n for n, line in enumerate(files[file].replace(bug.old, bug.new).splitlines(), 1) if part in line]
        assert lines, f"{part} is not in {file}"
        assert any(re.search(rf"{re.escape(file)}:{line}\b", report) for line in lines), (lines, report)


def each(bugs: dict) -> list:
    return [(name, build) for name, (_, bug) in bugs.items() for build in bug.found]
