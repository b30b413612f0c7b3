"""Launches that say that their kernels wait: in machine code too, the kernel waits before it touches memory or ends."""

import re

import pytest

import kernel_table
from graphfuse.base.device import for_arch
from support.variants import TARGETS, VARIANTS

_MEMORY = re.compile(r"(LD|LDG|LDGSTS|LDL|ST|STG|STL|RED|REDG|ATOM|ATOMG|UBLKCP|UBLKRED|UTMA\w*)(\.|$)")
_WAIT = "ACQBULK"  # griddepcontrol.wait


def test_some_launch_says_so():
    assert any(variant.waits(for_arch("sm_90a")) for variant in VARIANTS.values())


@pytest.mark.compile
@pytest.mark.parametrize(("arch", "first"), kernel_table.chips())
def test_the_kernels_wait_first(arch, first):
    device = TARGETS[arch]
    waiting = [n for n in kernel_table.among(arch, first) if device.sm >= 90 and VARIANTS[n].waits(device)]
    assert {name: why for name in waiting if (why := fault(kernel_table.code(name, arch).opcodes))} == {}
    assert bool(waiting) == (device.sm >= 90)


def fault(found: tuple[str, ...]) -> str:
    """What is wrong with where a kernel's instructions wait; empty if nothing is."""
    if _WAIT not in found:
        return "never waits"
    wait = found.index(_WAIT)
    after = [i for i, instruction in enumerate(found) if _MEMORY.match(instruction) or instruction == "EXIT"]
    if not after or min(after) < wait:
        return f"waits behind {found[min(after, default=-1)]}"
    # In a straight line from the beginning: every thread comes by. (BSSY is no branch: it names where threads that part
    # after it meet again, and some versions of NVRTC put it before the wait.)
    jumps = [i for i in found[:wait] if i.split(".")[0] in ("BRA", "BRX", "JMP", "JMX", "CALL", "RET")]
    return f"jumps before it waits: {jumps[0]}" if jumps else ""


@pytest.mark.parametrize(
    ("opcodes", "said"),
    [
        (("S2R", _WAIT, "LDG.E", "EXIT"), ""),
        (("BSSY", _WAIT, "STG", "EXIT"), ""),
        (("S2R", "LDG.E", "EXIT"), "never waits"),
        (("LDG.E.128", _WAIT, "EXIT"), "waits behind LDG.E.128"),
        (("EXIT", _WAIT, "LDG.E"), "waits behind EXIT"),
        (("BRA", _WAIT, "LDG.E", "EXIT"), "jumps before it waits: BRA"),
    ],
)
def test_faults_are_found(opcodes, said):
    assert fault(opcodes) == said
