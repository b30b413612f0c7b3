"""Engines that declare dependent_launch: in machine code too, the kernel waits before it touches memory or ends."""

import re

import pytest

import kernel_table
from graphfuse.engines import ALL

_MEMORY = re.compile(r"(LD|LDG|LDGSTS|LDL|ST|STG|STL|RED|REDG|ATOM|ATOMG|UBLKCP|UBLKRED|UTMA\w*)(\.|$)")
_WAIT = "ACQBULK"  # griddepcontrol.wait


def test_some_engine_declares_it():
    assert any(getattr(engine, "dependent_launch", False) for engine in ALL)


@pytest.mark.compile
@pytest.mark.parametrize(("name", "arch"), kernel_table.checked(lambda v, d: v.engine.dependent_launch and d.sm >= 90))
def test_the_kernel_waits_first(name, arch):
    found = kernel_table.code(name, arch).opcodes
    wait = found.index(_WAIT)
    after = [i for i, instruction in enumerate(found) if _MEMORY.match(instruction) or instruction == "EXIT"]
    assert after and wait < min(after), found[: wait + 1]
    # In a straight line from the beginning: every thread comes by. (BSSY is no branch: it names where threads that part
    # after it meet again, and some versions of NVRTC put it before the wait.)
    assert not [i for i in found[:wait] if i.split(".")[0] in ("BRA", "BRX", "JMP", "JMX", "CALL", "RET")]
