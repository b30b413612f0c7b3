"""A graph with its built plans as bytes: the device, the graph, a recipe for each plan, and its kernels.

The bytes contain no pickle, and reading evaluates nothing. A digest over all bytes is checked first (``sealed``), then
each field.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from graphfuse.base.device import Device
from graphfuse.base.errors import SerializedError
from graphfuse.base.wording import counted
from graphfuse.files import json_values, sealed
from graphfuse.files.json_values import field, refuse
from graphfuse.op_graph import graph_json, ir
from graphfuse.op_graph.graph_record import GraphRecord
from graphfuse.planning.recipe import ELF, Code, Codes, PartRecipe, Recipe
from graphfuse.runtime import record


@dataclass(frozen=True)
class SerializedGraph:
    """Content of the bytes.

    made_by: the version of graphfuse.
    kind, arch, device: kind, architecture and name of the device that plans were made for; messages have the name.
    graph: data in the format of ``graph_json``.
    key: of the frozen graph (``ir.Graph.key``).
    plans: the built plans.
    selected: the place of the selected plan among them.
    codes: the kernels; None if they are to be compiled when the graph is read.
    """

    made_by: str
    kind: str
    arch: str
    device: str
    graph: object
    key: str
    plans: tuple[Recipe, ...]
    selected: int
    codes: tuple[Code, ...] | None

    def to_bytes(self, key: bytes | None = None) -> bytes:
        """The content as bytes with a digest. key: if given, making the digest requires it."""
        kernels = [{"name": c.name, "entry": c.entry, "source": c.source} for c in self.codes or ()]
        plans = [[part.to_data() for part in plan] for plan in self.plans]
        head = {**vars(self), "plans": plans, "codes": None if self.codes is None else kernels}
        cubins = [code.cubin for code in self.codes or ()]
        return sealed.seal(json_values.text(head).encode(), cubins, key)

    @classmethod
    def from_bytes(cls, blob: bytes, key: bytes | None = None) -> "SerializedGraph":
        """The content of bytes. Raises SerializedError for damaged or invalid bytes, and those of another version."""
        where = "the serialized graph"
        head, cubins = sealed.open_sealed(blob, key)
        data = json_values.parse(where, head)
        texts = {name: field(where, data, name, str) for name in ("made_by", "kind", "arch", "device", "key")}
        plans = tuple(_plan(f"plan {n}", parts) for n, parts in enumerate(field(where, data, "plans", list)))
        selected = field(where, data, "selected", int)
        if not 0 <= selected < len(plans):
            refuse(f"{where}: selected", selected, f"the place of one of its {len(plans)} plans")
        kernels = field(where, data, "codes", list, type(None))
        if len(kernels or ()) != len(cubins):
            raise SerializedError(f"{where} describes {counted(len(kernels or ()), 'kernel')} and has {len(cubins)}")
        pairs = enumerate(zip(kernels or (), cubins, strict=True))
        codes = tuple(_code(f"kernel {n}", *pair, texts["kind"]) for n, pair in pairs)
        graph = field(where, data, "graph", dict)
        return cls(graph=graph, plans=plans, selected=selected, codes=None if kernels is None else codes, **texts)

    def check_device(self, device: Device) -> None:
        """Raises SerializedError unless the plans were made for a device of this kind and architecture."""
        if (self.kind, self.arch) != (device.kind, device.arch):
            made, here = _words(self.kind, self.arch, self.device), _words(device.kind, device.arch, device.name)
            raise SerializedError(
                f"the serialized graph was made for {made}, and is to run on {here}; accepted: the handle of a device "
                "like the first, or a graph that was serialized for the second"
            )

    def check_key(self, key: str) -> None:
        """Raises SerializedError unless the graph that was read has the key of the graph that was planned."""
        if self.key != key:
            raise SerializedError(
                f"the serialized graph is another one here: graphfuse {self.made_by} inferred {self.key[:16]} of it, "
                f"this version {key[:16]}; serialize it anew"
            )

    @property
    def kernels(self) -> Codes | None:
        return None if self.codes is None else Codes(self.codes, self.made_by)


def of(
    graph: GraphRecord,
    lowered: ir.FrozenGraph,
    device: Device,
    plans: Sequence[Recipe],
    selected: int,
    codes: Sequence[Code] | None,
) -> SerializedGraph:
    """Content for a graph with plans. lowered: the planned graph, whose node numbers recipes have. codes: the kernels
    of all plans."""
    return SerializedGraph(
        made_by=record.version("graphfuse") or "",
        kind=device.kind,
        arch=device.arch,
        device=device.name,
        graph=graph_json.to_data(graph),
        key=lowered.key(),
        plans=tuple(plans),
        selected=selected,
        codes=None if codes is None else tuple(dict.fromkeys(codes)),  # plans share kernels
    )


def _plan(where: str, parts: object) -> Recipe:
    if type(parts) is not list:
        refuse(where, parts, "a list of parts")
    return tuple(PartRecipe.parse(f"{where}, part {n}", part) for n, part in enumerate(parts))


def _code(where: str, data: object, cubin: bytes, kind: str) -> Code:
    if kind == "cuda" and not cubin.startswith(ELF):
        raise SerializedError(f"{where} is no machine code of a GPU")
    return Code(*(field(where, data, name, str) for name in ("name", "entry", "source")), cubin)


def _words(kind: str, arch: str, name: str) -> str:
    return f"{kind} {arch} ({name})" if kind == "cuda" else kind
