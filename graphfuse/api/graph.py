"""``pygraph``: how a graph begins, how it is looked at, and how it is kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from graphfuse.api import targets
from graphfuse.api.checks import check_flag, check_unasked, several
from graphfuse.api.executed import Executed
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


class pygraph(Executed):  # noqa: N801 - cuDNN's spelling
    """A graph of tensors and operations.

    io_data_type: of tensors that are given or output and set none of their own.
    intermediate_data_type: likewise of virtual tensors. compute_data_type: what nodes
    compute in (FLOAT, DOUBLE, or of integers INT32). handle: device and stream to plan and run on; without
    one, the device current when ``build_operation_graph`` is called.

    intermediate_rounding: what nodes read of a virtual tensor. "float32": what its node
    computed, in the node's compute type, whatever type the tensor declares. "declared": that
    rounded to the declared type, as if each node were a kernel of its own. Operands of products
    are of the type they declare, and outputs that other nodes read are read as stored, either way.

    The arguments between are cuDNN's, in its order.

    sm_version: compute capability of the chip to plan for, as 90 for SM90. device_property: the figures of it, which
    ``create_device_properties`` makes. The handle, or the current device, has to be such a chip, else DeviceError.
    Without a handle the chip need not be here: kernels are compiled for it, ``serialize`` keeps them, and execute
    raises DeviceError. kernel_cache: where kernels are looked for before they are compiled, and put
    (``create_kernel_cache``); a graph with one takes overrides, as cuDNN's do.

    is_override_shape_enabled, or is_dynamic_shape_enabled: execute may be given other extents of leading axes.
    is_cuda_graph_replay_expected holds of any graph and changes nothing: execute can be captured. sm_count and
    cuda_graph_retention ask for what is not here: GraphNotSupportedError says what to use instead.
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
        check_unasked(
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
        """Text of planning: the patterns that matched and their nodes, the engines that declined and why, the choice
        and why, bytes moved.

        format: "text", "tree", "json", "mermaid" (a flowchart for Markdown), "dot" (the same for graphviz), "svg"
        (drawn by graphviz; GraphvizError where that is not installed) or "html" (a page with the tree and the
        flowchart, whose drawing needs the network). After ``build_operation_graph``, whether or not the graph can run.
        """
        from graphfuse.explain import FORMATS

        if format not in FORMATS:
            raise GraphTypeError(f"explain: format is {format!r}; accepted: {', '.join(map(repr, FORMATS))}")
        return FORMATS[format](self.explanation())

    def explanation(self) -> Explanation:
        """Data that ``explain`` prints; at the end of a notebook's cell it is a flowchart."""
        from graphfuse.explain import explained

        return explained(self._need(self._planner, "build_operation_graph"))

    def __str__(self) -> str:
        return to_python(self)

    if not TYPE_CHECKING:  # to which every attribute would be there

        def __getattr__(self, name: str) -> NoReturn:
            cudnn_names.refuse("pygraph", name, cudnn_names.PYGRAPH, self)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuses what `copy` and `pickle` would make: a graph that shares its nodes, or plans that are bound to this
        process."""
        raise GraphNotSupportedError(
            f"graph {self.name!r} is neither copied nor pickled; instead: pygraph.from_json(graph.to_json(), handle), "
            "or with its plans pygraph(handle=handle).deserialize(graph.serialize())"
        )

    def to_json(self) -> str:
        """The validated graph, with all that was inferred, as JSON that ``from_json`` makes it of again."""
        self._need(self._ir, "validate")
        return json_values.text(graph_json.to_data(self))

    @classmethod
    def from_json(cls, text: str | bytes, handle: Handle | None = None) -> pygraph:
        """The graph that ``to_json`` wrote down, validated. SerializedError, or another GraphfuseError, for any other
        text."""
        if not isinstance(text, str | bytes):
            raise GraphTypeError(f"from_json: give a str or bytes, got {type(text).__name__}")
        graph = cls(handle=handle)
        graph._read(json_values.parse("the graph", text))
        return graph

    def serialize(
        self, as_bytes: bool = True, include_kernels: bool = True, *, key: bytes | None = None
    ) -> bytes | list[int]:
        """The graph with all plans that are built, which ``deserialize`` takes in another process.

        as_bytes: False for a list of integers in place of bytes. include_kernels: with the machine code of the kernels,
        so that nothing is compiled where it is read; else they are compiled there. key: a secret. Only a graph that was
        serialized with it is then accepted by ``deserialize(..., key=key)``; without one, a digest tells of damage, not
        of whoever made other bytes on purpose.

        GraphStateError before ``build_plans``.
        """
        from graphfuse.planning import serialized

        check_flag("serialize: as_bytes", as_bytes)
        check_flag("serialize: include_kernels", include_kernels)
        key = _checked_key("serialize", key)
        planner = self._need(self._planner, "build_plans")
        plans, selected, codes = planner.recorded()
        kept = codes if include_kernels else None
        content = serialized.of(self, planner.graph, planner.device, plans, selected, kept)
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
        """Make this graph, which has to be empty, the one that was serialized; its plans are then built.

        Called as ``deserialize(data)`` or ``deserialize(handle, data)``; data: what ``serialize`` returned. patterns,
        engines: as of ``build_operation_graph``. key: the one that it was serialized with. enforce_precompiled: refuse
        data without the kernels, which would have to be compiled.

        The digest is checked first, then the device and every field. Machine code is loaded last. Without a key, do not
        load what somebody else may have made: machine code of theirs would run on the GPU.

        SerializedError, or another GraphfuseError, says what cannot be used; the graph then stays empty.
        """
        from graphfuse.planning.planner import Planner
        from graphfuse.planning.serialized import Serialized

        if len(data) not in (1, 2):
            raise GraphTypeError(f"deserialize: give data, or a handle and data; got {len(data)} arguments")
        if self.tensors:
            raise GraphStateError(f"graph {self.name!r} has tensors: deserialize into a new pygraph()")
        check_flag("deserialize: enforce_precompiled", enforce_precompiled)
        content = Serialized.from_bytes(_blob(data[-1]), _checked_key("deserialize", key))
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
        """Become the graph of `data`, as of ``graph_json``, and validate it."""
        settings = graph_json.settings(data)
        if settings["intermediate_rounding"] not in _ROUNDINGS:
            json_values.refuse("intermediate_rounding", settings["intermediate_rounding"], ", ".join(_ROUNDINGS))
        vars(self).update(settings)
        graph_json.fill(self, data)
        self.validate()


def _blob(data: object) -> bytes:
    """Bytes that were serialized, given as bytes or as a list of integers."""
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
