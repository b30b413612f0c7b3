"""Engines that declare dependent_launch: in machine code too, the kernel waits before it touches memory or ends."""

import re

import pytest

import cubin
from graphfuse.engines import ALL
from graphfuse.runtime import nvrtc
from variants import TARGETS, VARIANTS

_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", re.MULTILINE)
_MEMORY = re.compile(r"(LD|LDG|LDGSTS|LDL|ST|STG|STL|RED|REDG|ATOM|ATOMG|UBLKCP|UBLKRED|UTMA\w*)(\.|$)")
_WAIT = "ACQBULK"  # griddepcontrol.wait


def test_some_engine_declares_it():
    assert any(getattr(engine, "dependent_launch", False) for engine in ALL)


NEWEST = [arch for arch, device in TARGETS.items() if device.sm >= 90]
# Every variant for SM90, every fourth one, in turns, for each of the others, for time's sake.
CHECKED = [
    (name, arch)
    for number, name in enumerate(name for name, v in VARIANTS.items() if v.engine.dependent_launch)
    for place, arch in enumerate(NEWEST)
    if arch == "sm_90a" or (number + place) % 4 == 0
]


@pytest.mark.compile
@pytest.mark.parametrize(("name", "arch"), CHECKED)
def test_the_kernel_waits_first(name, arch):
    code = nvrtc.compile(VARIANTS[name].source(TARGETS[arch]), arch, "kernel.cu")
    found = _INSTRUCTION.findall(cubin.assembly(code))
    wait = found.index(_WAIT)
    after = [i for i, instruction in enumerate(found) if _MEMORY.match(instruction) or instruction == "EXIT"]
    assert after and wait < min(after), found[: wait + 1]
    # In a straight line from the beginning: every thread comes by.
    assert not [i for i in found[:wait] if i.split(".")[0] in ("BRA", "BRX", "JMP", "CALL", "BSSY")]
