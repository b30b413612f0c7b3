"""Kernel caches: machine code that a user holds, shares between graphs, and keeps as JSON.

Every process has caches of its own (``runtime.cache``), whose keys name the NVRTC that compiled. A kernel is found here
by its source, so that one from another machine is found, and NVRTC is not looked for.
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
"""Where kernels' machine code comes from: of a source, its entry, its file's name and the device."""

VERSION = 1
"""Of the JSON. It goes up with every change that another version would read wrongly."""

_WHERE = "the kernel cache"
_TEXTS = ("arch", "name", "entry", "source", "cubin")


class KernelCache:
    """Kernels of the graphs that were made with it (``pygraph(kernel_cache=...)``). Any number of threads may use it.

    A graph that is built takes its kernels from here, and puts those here that it had to compile. Kernels have no
    names and numbers of rows of their graph's in them: graphs that differ in these share them.
    """

    def __init__(self) -> None:
        self._codes: dict[tuple[str, ...], Code] = {}
        self._used = False
        self._lock = threading.Lock()

    def size(self) -> int:
        """Number of kernels."""
        return len(self._codes)

    def revision(self) -> int:
        """Number of kernels that were put in. What is looked up does not count."""
        return len(self._codes)  # none is ever replaced or dropped

    def serialize(self) -> str:
        """JSON text of all kernels, which ``deserialize`` reads in another process.

        A digest of each tells of damage, not of whoever made other machine code on purpose.
        """
        with self._lock:
            kernels = [_said(arch, code) for (arch, *_), code in self._codes.items()]
        return json_values.text({"version": VERSION, "kernels": kernels})

    def deserialize(self, text: str) -> None:
        """Become the cache that was serialized. GraphStateError unless this one is new, SerializedError for any other
        text; the cache then stays empty."""
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
        """Finder of a kernel's machine code: what is here, else what `compiled` makes, which is here from then on."""
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


def _said(arch: str, code: Code) -> dict[str, str]:
    cubin = base64.b64encode(code.cubin).decode()
    said = {"arch": arch, "name": code.name, "entry": code.entry, "source": code.source, "cubin": cubin}
    return {**said, "digest": _digest(said)}


def _read(where: str, data: object) -> tuple[tuple[str, ...], Code]:
    said = {name: str(field(where, data, name, str)) for name in _TEXTS}
    if field(where, data, "digest", str) != _digest(said):
        raise SerializedError(f"{where} is damaged: its digest does not agree")
    try:
        cubin = base64.b64decode(said["cubin"], validate=True)
    except binascii.Error as error:
        raise SerializedError(f"{where}: cubin is not in base 64: {error}") from None
    if said["arch"] != EMULATOR.kind and not cubin.startswith(ELF):
        raise SerializedError(f"{where} is no machine code of a GPU")
    code = Code(said["name"], said["entry"], said["source"], cubin)
    return _key(said["arch"], code), code


def _digest(said: dict[str, str]) -> str:
    return hashlib.sha256(json_values.text([said[name] for name in _TEXTS]).encode()).hexdigest()
