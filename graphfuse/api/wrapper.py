"""``Graph``: a graph that accepts arrays in place of tensors, builds itself, and is called like a function.

    with graphfuse.Graph(inputs=["norm::input", "norm::scale"], outputs=["y"]) as graph:
        y, _ = graph.rmsnorm(input=x, scale=w, epsilon=1e-5, norm_forward_phase=INFERENCE, name="norm")
        y.set_output().set_name("y").set_data_type(data_type.BFLOAT16)
    z = graph(x, w)

Names and behaviour follow the cuDNN frontend's wrapper of this name. ``pygraph`` does the work. This file maps names to
tensors, and allocates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from graphfuse.api import pygraph
from graphfuse.base import dtypes
from graphfuse.base.enums import heur_mode
from graphfuse.base.errors import (
    GraphStateError,
    GraphTypeError,
    GraphValidationError,
    VariantPackError,
    WorkspaceError,
)
from graphfuse.base.wording import counted, with_article
from graphfuse.op_graph.tensor import Tensor
from graphfuse.ops import OPS, SPELLINGS

if TYPE_CHECKING:
    import torch

_OPS = {*OPS, *SPELLINGS, "concatenate"}
_TENSORS = ("tensor", "tensor_like", "tensor_scalar")
_QUERIES = (
    "explain",
    "explanation",
    "get_workspace_size",
    "key",
    "query_tensor_attributes_of_uid",
    "serialize",
    "to_json",
)
_ARRAY = ("__dlpack__", "__array_interface__", "__cuda_array_interface__")


class Graph:
    """A graph of operations on arrays, built at the end of its ``with`` block.

    Inside the block it has the operations of ``pygraph``, which accept torch tensors and other arrays as well as graph
    tensors. The same array always stands for the same tensor. Only its shape, strides and type are used.

    handle: as in ``pygraph``; "auto" is the same as None. inputs, outputs: arguments of ``set_io_tuples``. heuristics:
    modes to plan in, A and FALLBACK if None. workspace_alloc: whether to allocate the workspace; otherwise every call
    is given one. graph_arguments: as in ``pygraph``.

    A tensor is named by itself, its uid, its name, the array it was made of, or "NODE::PORT", where PORT may be the
    port's position. A node without a name is called "OP.NUMBER".
    """

    def __init__(
        self,
        *,
        handle: Any = None,
        inputs: Sequence[object] | None = None,
        outputs: Sequence[object] | None = None,
        heuristics: Sequence[heur_mode] | None = None,
        workspace_alloc: bool = True,
        **graph_arguments: Any,
    ):
        self._io = (_sequence("inputs", inputs), _sequence("outputs", outputs))
        self._heuristics = list(_sequence("heuristics", heuristics)) or [heur_mode.A, heur_mode.FALLBACK]
        self._graph = pygraph(handle=None if handle == "auto" else handle, **graph_arguments)
        self._allocates = workspace_alloc
        self._workspace: torch.Tensor | None = None
        self._arrays: dict[int, tuple[object, Tensor]] = {}  # by id; arrays are kept, so that no id is reused
        self._names: dict[str, Tensor] = {}
        self._inputs: tuple[Tensor, ...] | None = None
        self._outputs: tuple[Tensor, ...] = ()
        self._state = "new"

    def __enter__(self) -> Graph:
        if self._state != "new":
            raise GraphStateError(f"graph {self._graph.name!r} was entered before; make another Graph")
        self._state = "open"
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._state = "failed"
        if kind is not None:
            return
        self._graph.build(self._heuristics)
        self._state = "built"
        size = self._graph.get_workspace_size()
        if self._allocates and size and self._graph.device.here:
            import torch

            self._workspace = torch.empty(size, dtype=torch.uint8, device=self._graph.device.memory)
        if any(self._io):
            self.set_io_tuples(*self._io)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        found: Callable[..., Any] = getattr(self._graph, name)  # its error says why there is none
        if name in _QUERIES:
            self._need("built", name)
            return found
        if name not in _OPS and name not in _TENSORS:
            raise GraphStateError(f"Graph has no {name}: it builds and runs itself; accepted: a pygraph, which has it")
        self._need("open", name)
        return found if name in _TENSORS else lambda *args, **kwargs: self._add(found, args, kwargs)

    def _need(self, state: str, what: str) -> None:
        if self._state != state:
            when = {"open": "inside of its with block", "built": "after its with block"}[state]
            raise GraphStateError(f"graph {self._graph.name!r}: {what} is for {when}; the graph is {self._state}")

    def _add(self, method: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        given: dict[str, Any] = {name: self._tensor(value) for name, value in kwargs.items()}
        made = method(*map(self._tensor, args), **given)
        node = self._graph.nodes[-1]
        spelling = SPELLINGS.get(method.__name__)
        cudnns = {port: name for name, port in (spelling and spelling.parameters) or ()}
        read = {cudnns.get(port.name, port.name): node.inputs.get(port.name) for port in node.op.inputs}
        if "inputs" in given:  # of concatenate, whose last node reads only the last inputs
            read = {str(position): t for position, t in enumerate(given["inputs"])}
        named = (*read.items(), *enumerate(read.values()), *((port, node.outputs.get(port)) for port in node.op.given))
        self._names |= {f"{node.name}::{name}": t for name, t in named if t is not None}
        return made

    def _tensor(self, value: Any) -> object:
        """The graph's tensor for an array, also for arrays in a list or tuple; any other value unchanged."""
        if isinstance(value, list | tuple):
            made = [self._tensor(one) for one in value]
            return made if isinstance(value, list) else tuple(made)
        if isinstance(value, Tensor) or not any(hasattr(value, name) for name in _ARRAY):
            return value
        if id(value) not in self._arrays:
            plain = value.detach() if getattr(value, "requires_grad", False) else value
            self._arrays[id(value)] = (value, self._graph.tensor_like(plain))
        return self._arrays[id(value)][1]

    def set_io_tuples(self, inputs: Sequence[object], outputs: Sequence[object]) -> None:
        """Set the order of a call's arguments and results. Every tensor that is not virtual has to be among them.

        Raises GraphValidationError, which names tensors that are unknown, virtual, given twice or missing.
        """
        inputs, outputs = _sequence("inputs", inputs), _sequence("outputs", outputs)
        if self._state in ("new", "open"):
            self._io = (inputs, outputs)
            return
        self._need("built", "set_io_tuples")
        found: dict[int, str] = {}
        tensors: dict[str, list[Tensor]] = {"input": [], "output": []}
        for kind, given in (("input", inputs), ("output", outputs)):
            for position, name in enumerate(given):
                where = f"graph {self._graph.name!r}: {kind} {position}"
                t = self._find(name)
                if t is None:
                    known = self._called(self._bound())
                    raise GraphValidationError(f"{where} ({_short(name)}) is no tensor of it; there are: {known}")
                if t.get_is_virtual():
                    raise GraphValidationError(f"{where} ({t.get_name()!r}) is virtual; accepted: inputs and outputs")
                if id(t) in found:
                    raise GraphValidationError(f"{where} ({t.get_name()!r}) is {found[id(t)]} already")
                if (kind == "output") != self._is_made(t):
                    raise GraphValidationError(f"{where} ({t.get_name()!r}) is no {kind} of the graph")
                found[id(t)] = f"{kind} {position}"
                tensors[kind].append(t)
        if left := [t.get_name() for t in self._bound() if id(t) not in found]:
            names = ", ".join(map(repr, left))
            raise GraphValidationError(f"graph {self._graph.name!r}: neither input nor output: {names}")
        self._inputs, self._outputs = tuple(tensors["input"]), tuple(tensors["output"])

    def __call__(self, *args: Any, workspace: object = None, handle: Any = None) -> Any:
        """Run the graph on the inputs in order, or on one dict of arrays by any name of a tensor.

        With inputs, the outputs are allocated and returned: a single one by itself, several as a list. With a dict,
        missing outputs are allocated and added to it under their names, and it is returned."""
        self._need("built", "a call")
        self._graph.device.check_here(self._graph.name)  # before outputs are allocated
        if len(args) == 1 and isinstance(args[0], dict):
            return self._call_by_name(args[0], workspace, handle)
        if self._inputs is None:
            raise GraphStateError(f"graph {self._graph.name!r}: call set_io_tuples() first, or give one dict of arrays")
        if len(args) != len(self._inputs):
            names = self._called(self._inputs)
            raise VariantPackError(
                f"graph {self._graph.name!r}: got {counted(len(args), 'argument')}; accepted: {names}"
            )
        made = [self._empty(t) for t in self._outputs]
        pack = dict(zip((*self._inputs, *self._outputs), (*args, *made), strict=True))
        self._run(pack, workspace, handle)
        return made[0] if len(made) == 1 else made

    def _call_by_name(self, given: dict[Any, Any], workspace: object, handle: Any) -> dict[Any, Any]:
        pack: dict[Tensor, object] = {}
        for name, value in given.items():
            t = self._find(name)
            if t is None:
                known = self._called(self._bound())
                raise VariantPackError(
                    f"graph {self._graph.name!r}: {_short(name)} is no tensor of it; there are: {known}"
                )
            pack[t] = value
        left = [t for t in self._bound() if t not in pack]
        if missing := [t for t in left if not self._is_made(t)]:
            raise VariantPackError(f"graph {self._graph.name!r}: no value for {self._called(missing)}")
        for t in left:
            pack[t] = given[t.get_name()] = self._empty(t)
        self._run(pack, workspace, handle)
        return given

    def _run(self, pack: Mapping[Tensor, Any], workspace: object, handle: Any) -> None:
        if workspace is None:
            workspace = self._workspace
            if workspace is None and not self._allocates and (size := self._graph.get_workspace_size()):
                raise WorkspaceError(f"graph {self._graph.name!r}: give workspace=, a buffer of {size} bytes")
        plain = {t: v.detach() if getattr(v, "requires_grad", False) else v for t, v in pack.items()}
        self._graph.execute(plain, workspace, None if handle == "auto" else handle)

    def _find(self, name: object) -> Tensor | None:
        if isinstance(name, Tensor):
            return name if any(t is name for t in self._graph.tensors) else None
        if isinstance(name, str):
            return self._names.get(name) or next((t for t in self._graph.tensors if t.get_name() == name), None)
        if isinstance(name, int) and not isinstance(name, bool):
            return next((t for t in self._graph.tensors if t.current_uid == name), None)
        return self._arrays.get(id(name), (None, None))[1]

    def _bound(self) -> list[Tensor]:
        """Tensors that a call needs a value for."""
        used = {id(t): t for node in self._graph.nodes for t in (*node.inputs.values(), *node.outputs.values())}
        return [t for t in used.values() if not t.get_is_virtual() and t.value is None]

    def _is_made(self, t: Tensor) -> bool:
        return any(t is made for node in self._graph.nodes for made in node.outputs.values())

    def _called(self, tensors: Iterable[Tensor]) -> str:
        """Names of tensors for error messages: "NODE::PORT" if there is one, else the tensor's name."""
        names = {id(t): name for name, t in reversed(self._names.items())}
        return ", ".join(repr(names.get(id(t), t.get_name())) for t in tensors)

    def _empty(self, t: Tensor) -> torch.Tensor:
        import torch

        dtype: dtypes.data_type = t.get_data_type()
        if dtype.bits < 8:
            raise VariantPackError(
                f"output {t.get_name()!r} is {dtype.name}, two in a byte; accepted: memory for it, in a dict"
            )
        like = {"dtype": getattr(torch, dtype.facts.torch), "device": self._graph.device.memory}
        return torch.empty_strided(t.get_dim(), t.get_stride(), **like)


def _sequence(what: str, given: object) -> tuple[Any, ...]:
    if given is not None and not isinstance(given, list | tuple):
        raise GraphTypeError(f"{what}: give a list or tuple, got {type(given).__name__}")
    return tuple(given or ())


def _short(name: object) -> str:
    return repr(name) if isinstance(name, str | int | Tensor) else with_article(type(name).__name__)
