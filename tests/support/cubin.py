"""What the machine code of a kernel uses and how wide its memory accesses are, by NVIDIA's disassemblers from pip."""

import bisect
import re
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from itertools import accumulate
from pathlib import Path

# "@!P0 LDG.E.128.CONSTANT R4, desc[...]": global (G), local (L) and generic accesses and their modifiers.
_ACCESS = re.compile(r"\b(LDG?|STG?|LDL|STL)((?:\.\w+)*) ")
_COPY = re.compile(r"\bLDGSTS((?:\.\w+)*) ")
_CONVERSION = re.compile(r"\bF2FP((?:\.\w+)*) ")
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", re.MULTILINE)
_ADDRESS = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/")
_PACKED = {"F16", "BF16", "E4M3", "E5M2", "E2M1"}
_NARROW = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}


@dataclass(frozen=True)
class Code:
    """One kernel as compiled. registers: a thread's. shared: static bytes a CTA. stack, local: bytes
    a thread. spills: instructions that access local memory. opcodes: its instructions' names, in order.
    loads, read_only, stores: the widths, in bytes, of global accesses; read_only are those that go the way
    of ``ld.global.nc``. copies: those of copies to shared memory that run beside. conversions: types that float32 is
    packed into by an instruction, "E4M3" for one."""

    registers: int
    shared: int
    stack: int
    local: int
    spills: int
    opcodes: tuple[str, ...]
    loads: frozenset[int]
    read_only: frozenset[int]
    stores: frozenset[int]
    copies: frozenset[int]
    conversions: frozenset[str]


def usage(cubin: bytes) -> dict[str, int]:
    """What cuobjdump says of the only kernel of a cubin: REG, STACK, SHARED, LOCAL, ..."""
    (line,) = re.findall(r"REG:\d+ .*", _run(cubin, "cuobjdump", "-res-usage"))
    return {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", line)}


def read(cubins: Sequence[bytes], arch: str) -> list[Code]:
    """All there is to know about the only kernel of each cubin, all of them for one chip."""
    return [_code(usage(cubin), text) for cubin, text in zip(cubins, _assembly(cubins, arch), strict=True)]


def _code(used: dict[str, int], text: str) -> Code:
    loads, read_only, stores, spills = set(), set(), set(), 0
    for name, suffix in _ACCESS.findall(text):
        modifiers, width = suffix.split("."), _width(suffix)
        if name in ("LDL", "STL"):
            spills += 1
        elif name.startswith("ST"):
            stores.add(width)
        else:
            (read_only if "CONSTANT" in modifiers else loads).add(width)
    return Code(
        used["REG"],
        used["SHARED"],
        used["STACK"],
        used["LOCAL"],
        spills,
        tuple(_INSTRUCTION.findall(text)),
        *map(frozenset, (loads, read_only, stores, map(_width, _COPY.findall(text)))),
        frozenset(m for suffix in _CONVERSION.findall(text) for m in suffix.split(".") if m in _PACKED),
    )


def _width(suffix: str) -> int:
    return next((_NARROW[m] for m in suffix.split(".") if m in _NARROW), 4)


def _assembly(cubins: Sequence[bytes], arch: str) -> list[str]:
    """The instructions of each, a line each. Disassembled as one piece: nvdisasm takes a hundred times longer
    to start than for a kernel."""
    kernels = [_instructions(cubin) for cubin in cubins]
    ends = list(accumulate(map(len, kernels)))
    lines: list[list[str]] = [[] for _ in kernels]
    for line in _run(b"".join(kernels), "nvdisasm", "-b", arch.replace("sm_", "SM"), "-ndf").splitlines():
        if address := _ADDRESS.match(line):
            lines[bisect.bisect_right(ends, int(address[1], 16))].append(line)
    return ["\n".join(found) for found in lines]


def _instructions(cubin: bytes) -> bytes:
    """The .text section of a cubin, which is an ELF file, with one kernel."""
    (headers,), (size, count, names) = struct.unpack_from("<Q", cubin, 40), struct.unpack_from("<3H", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQ", cubin, headers + n * size) for n in range(count)]  # name, ..., at, bytes
    found = [s for s in sections if cubin.startswith(b".text.", sections[names][4] + s[0])]
    ((*_, at, length),) = found
    return cubin[at : at + length]


def _run(cubin: bytes, tool: str, *options: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        return subprocess.run([_tool(tool), *options, str(path)], capture_output=True, text=True, check=True).stdout


@cache
def _tool(name: str) -> str:
    """The program's file as its wheel was installed, which need not be on the PATH."""
    files = metadata.distribution(f"nvidia-cuda-{name}").files or ()
    return next(str(file.locate()) for file in files if file.name == name)
