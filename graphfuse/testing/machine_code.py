"""Resources of a kernel's machine code, read from the cubin."""

import struct
from dataclasses import dataclass

_SVAL, _REGISTERS, _FRAME = 4, 0x2F, 0x11
"""Codes in .nv.info: the format of attributes with a length, and the attributes of registers and local memory per
symbol."""


@dataclass(frozen=True)
class CompiledResources:
    """Resources per thread. registers: their number. local: bytes of local memory, which holds spilled registers."""

    registers: int
    local: int


def resources(cubin: bytes) -> CompiledResources:
    """Resources of a cubin with one kernel; the maximum if there are several. Raises ValueError if it is not a
    cubin."""
    if cubin[:4] != b"\x7fELF":
        raise ValueError("not a cubin: it does not begin as an ELF file does")
    found: dict[int, list[int]] = {_REGISTERS: [0], _FRAME: [0]}
    info = _section(cubin, b".nv.info")
    at = 0
    while at + 4 <= len(info):
        form, attribute, value = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == _SVAL:
            if attribute in found:
                found[attribute].append(struct.unpack_from("<II", info, at)[1])
            at += value
    return CompiledResources(max(found[_REGISTERS]), max(found[_FRAME]))


def _section(cubin: bytes, name: bytes) -> bytes:
    (headers,), (size, count, names) = struct.unpack_from("<Q", cubin, 40), struct.unpack_from("<3H", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQ", cubin, headers + n * size) for n in range(count)]
    texts = sections[names][4]
    for text, *_, at, length in sections:
        if cubin.startswith(name + b"\0", texts + text):
            return cubin[at : at + length]
    return b""
