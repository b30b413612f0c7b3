"""``pygraph``: construction, explanation and serialization of a graph, on top of the classes of the other files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from graphfuse.api import targets
from graphfuse.api.checks import check_flag, check_not_offered, several
from graphfuse.api.executable_graph import ExecutableGraph
from graphfuse.base import cudnn_names
from graphfuse.base.dtypes import data_type
from graphfuse.base.errors import GraphNotSupportedError, GraphStateError, GraphTypeError, SerializedError
from graphfuse.files import json_values
from graphfuse.op_graph import graph_json
from graphfuse.op_graph.printing import to_python
from graphfuse.op_graph.tensor import checked_name, checked_type

if TYPE_CHECKING:
    from graphfuse.explain import Explanation
    from graphfuse.planning.kernel_cache import KernelCache
    from graphfuse.runtime.device_properties import DeviceProperties
    from graphfuse.runtime.handle import Handle

_ROUNDINGS = ("float32", "declared")


class pygraph(ExecutableGraph):  # noqa: N801 - cuDNN's spelling
    """A graph of tensors and operations.

    io_data_type: type of inputs and outputs that set none. intermediate_data_type: type of virtual tensors that set
    none. compute_data_type: type that nodes compute in (FLOAT, DOUBLE, or INT32 for integers). handle: device and
    stream to plan for and run on; without one, the device that is current when ``build_operation_graph`` is called.

    intermediate_rounding: the values of a virtual tensor that nodes read. "float32": the result of its node in the
    node's compute type, whatever type the tensor declares. "declared": this result rounded to the declared type, as if
    each node were a separate kernel. With both, operands of products have the type that they declare, and nodes that
    read an output read it as stored.

    The other arguments are cuDNN's, in its order.

    sm_version: compute capability of the chip to plan for, such as 90 for SM90. device_property: the chip's properties,
    made by ``create_device_properties``. The device of the handle, or the current one, has to be such a chip, else
    DeviceError is raised. Without a handle the chip may be absent: kernels are compiled for it, ``serialize`` keeps
    them, and execute raises DeviceError. kernel_cache: a cache (``create_kernel_cache``) that kernels are looked up in
    before they are compiled, and stored in; a graph with one accepts overrides, as cuDNN's graphs do.

    is_override_shape_enabled, is_dynamic_shape_enabled: execute may be given other extents of leading axes.
    is_cuda_graph_replay_expected: changes nothing, as execute can always be captured. sm_count, cuda_graph_retention:
    not offered; GraphNotSupportedError says what to use instead.
    """

    def __init__(
        self,
        name: str = "graph",
        io_data_type: data_type | Any = data_type.NOT_SET,
        intermediate_data_type: data_type | Any = data_type.NOT_SET,
        compute_data_type: data_type | Any = data_type.FLOAT,
        handle: Handle | None = None,
        sm_count: None = None,
        sm_version: int | None = None,
        kernel_cache: KernelCache | None = None,
        device_property: DeviceProperties | None = None,
        is_dynamic_shape_enabled: bool = False,
        is_override_shape_enabled: bool = False,
        cuda_graph_retention: None = None,
        *,
        is_cuda_graph_replay_expected: bool = False,
        intermediate_rounding: str = "float32",
    ):
        if intermediate_rounding not in _ROUNDINGS:
            raise GraphTypeError(
                f"graph {name!r}: intermediate_rounding must be {' or '.join(map(repr, _ROUNDINGS))}, "
                f"got {intermediate_rounding!r}"
            )
        if handle is not None:
            from graphfuse.runtime.handle import alive

            alive(handle)
        check_not_offered(
            f"graph {name!r}",
            cudnn_names.KEYWORDS,
            {"sm_count": sm_count, "cuda_graph_retention": cuda_graph_retention},
        )
        check_flag(f"graph {name!r}: is_dynamic_shape_enabled", is_dynamic_shape_enabled)
        check_flag(f"graph {name!r}: is_override_shape_enabled", is_override_shape_enabled)
        check_flag(f"graph {name!r}: is_cuda_graph_replay_expected", is_cuda_graph_replay_expected)
        super().__init__(
            checked_name("graph", name),
            checked_type(f"graph {name!r}: io_data_type", io_data_type),
            checked_type(f"graph {name!r}: intermediate_data_type", intermediate_data_type),
            checked_type(f"graph {name!r}: compute_data_type", compute_data_type),
            intermediate_rounding,
        )
        self.handle = handle
        self._target = targets.target(f"graph {name!r}", sm_version, device_property)
        self.kernel_cache = targets.checked_cache(f"graph {name!r}", kernel_cache)
        self.takes_overrides = is_dynamic_shape_enabled or is_override_shape_enabled or kernel_cache is not None
        self._empty()

    def explain(self, format: str = "text") -> str:  # noqa: A002 - what it is called elsewhere
        """Account of planning: patterns that matched, engines that declined and why, the choice and why, bytes moved.

        format: "text", "tree", "json", "mermaid" (a flowchart for Markdown), "dot" (the same for graphviz), "svg"
        (drawn by graphviz; GraphvizError if that is not installed) or "html" (a page with the tree and the flowchart,
        whose drawing needs the network). It is called after ``build_operation_graph``, also if the graph cannot run.
        """
        from graphfuse.explain import FORMATS

        if format not in FORMATS:
            raise GraphTypeError(f"explain: format is {format!r}; accepted: {', '.join(map(repr, FORMATS))}")
        return FORMATS[format](self.explanation())

    def explanation(self) -> Explanation:
        """Data that ``explain`` prints. A notebook shows it as a flowchart."""
        from graphfuse.explain import explained

        return explained(self._need(self._planner, "build_operation_graph"))

    def __str__(self) -> str:
        return to_python(self)

    if not TYPE_CHECKING:  # type checkers would accept any attribute

        def __getattr__(self, name: str) -> NoReturn:
            cudnn_names.refuse("pygraph", name, cudnn_names.PYGRAPH, self)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Raises GraphNotSupportedError: a copy would share nodes, and a pickle would have plans of this process."""
        raise GraphNotSupportedError(
            f"graph {self.name!r} is neither copied nor pickled; instead: pygraph.from_json(graph.to_json(), handle), "
            "or with its plans pygraph(handle=handle).deserialize(graph.serialize())"
        )

    def to_json(self) -> str:
        """JSON text of the validated graph with all that was inferred, for ``from_json``."""
        self._need(self._ir, "validate")
        return json_values.text(graph_json.to_data(self))

    @classmethod
    def from_json(cls, text: str | bytes, handle: Handle | None = None) -> pygraph:
        """The validated graph of a text that ``to_json`` returned.

        Raises SerializedError or another GraphfuseError for any other text."""
        if not isinstance(text, str | bytes):
            raise GraphTypeError(f"from_json: give a str or bytes, got {type(text).__name__}")
        graph = cls(handle=handle)
        graph._read(json_values.parse("the graph", text))
        return graph

    def serialize(
        self, as_bytes: bool = True, include_kernels: bool = True, *, key: bytes | None = None
    ) -> bytes | list[int]:
        """The graph with all plans that are built, for ``deserialize`` in another process.

        as_bytes: bytes if True, a list of integers if False. include_kernels: whether to include the machine code of
        the kernels; without it, ``deserialize`` compiles them. key: a secret; ``deserialize(..., key=key)`` accepts
        only graphs that were serialized with it. Without a key, a digest detects damage, but no deliberate change.

        Raises GraphStateError before ``build_plans``.
        """
        from graphfuse.planning import serialized_graph

        check_flag("serialize: as_bytes", as_bytes)
        check_flag("serialize: include_kernels", include_kernels)
        key = _checked_key("serialize", key)
        planner = self._need(self._planner, "build_plans")
        plans, selected, codes = planner.recorded()
        kept = codes if include_kernels else None
        content = serialized_graph.of(self, planner.graph, planner.device, plans, selected, kept)
        blob = content.to_bytes(key)
        return blob if as_bytes else list(blob)

    def deserialize(
        self,
        *data: object,
        patterns: Sequence[object] = (),
        engines: Sequence[object] = (),
        key: bytes | None = None,
        enforce_precompiled: bool = False,
    ) -> pygraph:
        """Fill this empty graph with one that was serialized, and its built plans.

        It is called as ``deserialize(data)`` or ``deserialize(handle, data)``. data: the result of ``serialize``.
        patterns, engines: as in ``build_operation_graph``. key: the key that the graph was serialized with.
        enforce_precompiled: refuse data without kernels, which would have to be compiled.

        The digest is checked first, then the device and every field. Machine code is loaded last. Without a key, only
        load data that you trust: its machine code runs on the GPU.

        Raises SerializedError or another GraphfuseError, which says what cannot be used. The graph then stays empty.
        """
        from graphfuse.planning.planner import Planner
        from graphfuse.planning.serialized_graph import SerializedGraph

        if len(data) not in (1, 2):
            raise GraphTypeError(f"deserialize: give data, or a handle and data; got {len(data)} arguments")
        if self.tensors:
            raise GraphStateError(f"graph {self.name!r} has tensors: deserialize into a new pygraph()")
        check_flag("deserialize: enforce_precompiled", enforce_precompiled)
        content = SerializedGraph.from_bytes(_blob(data[-1]), _checked_key("deserialize", key))
        if enforce_precompiled and content.codes is None:
            raise SerializedError(
                "the serialized graph has no kernels; accepted with enforce_precompiled: one with them"
            )
        handle: Any = data[0] if len(data) == 2 else self.handle
        before = {name: getattr(self, name) for name in (*graph_json.SETTINGS, "handle")}
        try:
            self.handle = handle
            self._read(content.graph)
            planner = Planner(
                self.frozen,
                handle,
                several("patterns", patterns),
                several("engines", engines),
                self._target,
                self.kernel_cache,
            )
            content.check_device(planner.device)
            content.check_key(planner.graph.key())
            planner.restore(content.plans, content.selected, content.kernels)
        except BaseException:
            self._empty()
            vars(self).update(before)
            raise
        self._planner = planner
        return self

    def _read(self, data: object) -> None:
        """Fill this graph from `data`, in the format of ``graph_json``, and validate it."""
        settings = graph_json.settings(data)
        if settings["intermediate_rounding"] not in _ROUNDINGS:
            json_values.refuse("intermediate_rounding", settings["intermediate_rounding"], ", ".join(_ROUNDINGS))
        vars(self).update(settings)
        graph_json.fill(self, data)
        self.validate()


def _blob(data: object) -> bytes:
    """SerializedGraph bytes that were given as bytes or as a list of integers."""
    try:
        if isinstance(data, list | tuple | bytes | bytearray | memoryview):
            return bytes(data)
    except (ValueError, TypeError):
        pass
    raise GraphTypeError(f"deserialize: give the bytes that serialize() returned, got {type(data).__name__}")


def _checked_key(what: str, key: object) -> bytes | None:
    if key is not None and not (isinstance(key, bytes) and key):
        raise GraphTypeError(f"{what}: key must be bytes, at least one, or None; got {type(key).__name__}")
    return key
