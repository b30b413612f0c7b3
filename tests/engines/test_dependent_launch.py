"""Launches that say that their kernels wait: in machine code too, the kernel waits before it touches memory or ends."""

import re

import pytest

import kernel_table
from graphfuse.device import for_arch
from support.variants import VARIANTS

_MEMORY = re.compile(r"(LD|LDG|LDGSTS|LDL|ST|STG|STL|RED|REDG|ATOM|ATOMG|UBLKCP|UBLKRED|UTMA\w*)(\.|$)")
_WAIT = "ACQBULK"  # griddepcontrol.wait


def test_some_launch_says_so():
    assert any(variant.waits(for_arch("sm_90a")) for variant in VARIANTS.values())


@pytest.mark.compile
@pytest.mark.parametrize(("name", "arch"), kernel_table.checked(lambda v, d: d.sm >= 90 and v.waits(d)))
def test_the_kernel_waits_first(name, arch):
    found = kernel_table.code(name, arch).opcodes
    wait = found.index(_WAIT)
    after = [i for i, instruction in enumerate(found) if _MEMORY.match(instruction) or instruction == "EXIT"]
    assert after and wait < min(after), found[: wait + 1]
    # In a straight line from the beginning: every thread comes by. (BSSY is no branch: it names where threads that part
    # after it meet again, and some versions of NVRTC put it before the wait.)
    assert not [i for i in found[:wait] if i.split(".")[0] in ("BRA", "BRX", "JMP", "JMX", "CALL", "RET")]
