"""Kernel caches: machine code that a user holds, shares between graphs, and stores as JSON.

They are separate from the caches of each process (``runtime.cache``), whose keys contain the NVRTC version. Here a key
has only the kernel's source. So kernels from another machine are found, and NVRTC is not loaded.
"""

import base64
import binascii
import hashlib
import threading
from collections.abc import Callable

from graphfuse.base.device import EMULATOR, Device
from graphfuse.base.errors import GraphStateError, GraphTypeError, SerializedError
from graphfuse.files import json_values
from graphfuse.files.json_values import field
from graphfuse.planning.recipe import ELF, Code

CodeOf = Callable[[str, str, str, Device], Code]
"""Function that returns a kernel's machine code. Arguments: source, name of its entry, name of its file, device."""

VERSION = 1
"""Version of the JSON. Every incompatible change increments it."""

_WHERE = "the kernel cache"
_TEXTS = ("arch", "name", "entry", "source", "cubin")


class KernelCache:
    """Kernels of the graphs that were made with this cache (``pygraph(kernel_cache=...)``). It is thread-safe.

    A graph that is built loads its kernels from here, and stores those here that it had to compile. Kernels contain no
    names and row counts of their graph, so graphs that differ only in these share kernels.
    """

    def __init__(self) -> None:
        self._codes: dict[tuple[str, ...], Code] = {}
        self._used = False
        self._lock = threading.Lock()

    def size(self) -> int:
        """Number of kernels."""
        return len(self._codes)

    def revision(self) -> int:
        """Number of kernels that were stored so far. Look-ups do not change it."""
        return len(self._codes)  # none is ever replaced or dropped

    def serialize(self) -> str:
        """JSON text of all kernels, for ``deserialize`` in another process.

        A digest of each kernel detects damage, but no deliberate change of machine code.
        """
        with self._lock:
            kernels = [_to_data(arch, code) for (arch, *_), code in self._codes.items()]
        return json_values.text({"version": VERSION, "kernels": kernels})

    def deserialize(self, text: str) -> None:
        """Fill this new cache with the kernels of a text that ``serialize`` returned.

        Raises GraphStateError if this cache was used before, SerializedError for any other text. It then stays as it
        is."""
        if not isinstance(text, str):
            raise GraphTypeError(f"deserialize: give the str that serialize() returned, got {type(text).__name__}")
        data = json_values.parse(_WHERE, text)
        version = field(_WHERE, data, "version", int)
        if version != VERSION:
            raise SerializedError(f"{_WHERE} is of version {version}; accepted: {VERSION}; serialize it anew")
        found = dict(_read(f"{_WHERE}, kernel {n}", one) for n, one in enumerate(field(_WHERE, data, "kernels", list)))
        with self._lock:
            if self._used:
                raise GraphStateError("this kernel cache was used before; deserialize into a new one")
            self._codes, self._used = found, True

    def finding(self, compiled: CodeOf) -> CodeOf:
        """Function that returns a kernel's machine code from this cache, or makes it with `compiled` and stores it."""
        self._used = True

        def find(source: str, entry: str, name: str, device: Device) -> Code:
            key = _key(device.kind if device.kind == EMULATOR.kind else device.arch, Code.of(source, entry, name, b""))
            if key not in self._codes:
                made = compiled(source, entry, name, device)
                with self._lock:
                    self._codes.setdefault(key, made)
            return self._codes[key]

        return find


def create_kernel_cache() -> KernelCache:
    """A new kernel cache, empty."""
    return KernelCache()


def _key(arch: str, code: Code) -> tuple[str, ...]:
    return arch, code.name, code.entry, code.source


def _to_data(arch: str, code: Code) -> dict[str, str]:
    cubin = base64.b64encode(code.cubin).decode()
    fields = {"arch": arch, "name": code.name, "entry": code.entry, "source": code.source, "cubin": cubin}
    return {**fields, "digest": _digest(fields)}


def _read(where: str, data: object) -> tuple[tuple[str, ...], Code]:
    fields = {name: str(field(where, data, name, str)) for name in _TEXTS}
    if field(where, data, "digest", str) != _digest(fields):
        raise SerializedError(f"{where} is damaged: its digest does not agree")
    try:
        cubin = base64.b64decode(fields["cubin"], validate=True)
    except binascii.Error as error:
        raise SerializedError(f"{where}: cubin is not in base 64: {error}") from None
    if fields["arch"] != EMULATOR.kind and not cubin.startswith(ELF):
        raise SerializedError(f"{where} is no machine code of a GPU")
    code = Code(fields["name"], fields["entry"], fields["source"], cubin)
    return _key(fields["arch"], code), code


def _digest(fields: dict[str, str]) -> str:
    return hashlib.sha256(json_values.text([fields[name] for name in _TEXTS]).encode()).hexdigest()
