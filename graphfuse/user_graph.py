"""The graph a user builds, plans and executes: cuDNN frontend's ``pygraph`` in names and order of steps.

    build_operation_graph -> create_execution_plans -> check_support -> build_plans -> execute

This file records what the user says and keeps the order of steps; the work is done
by ``freeze`` (inference), ``plan`` (matching and ranking) and ``runtime`` (execution).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from graphfuse import cudnn_names, graph_json, json_values, overrides
from graphfuse.dtypes import data_type
from graphfuse.enums import behavior_note, build_plan_policy, heur_mode, numerical_note, tensor_reordering
from graphfuse.errors import (
    GraphfuseError,
    GraphNotSupportedError,
    GraphStateError,
    GraphTypeError,
    GraphValidationError,
    VariantPackError,
)
from graphfuse.freeze import freeze
from graphfuse.ir import packed_stride
from graphfuse.op_methods import OpMethods
from graphfuse.ops import Attribute, Op
from graphfuse.printing import to_python
from graphfuse.recorded import NodeRecord, Recorded
from graphfuse.tensor import Tensor, checked_name, checked_number, checked_type

if TYPE_CHECKING:
    from graphfuse import ir
    from graphfuse.device import Device
    from graphfuse.explain import Explanation
    from graphfuse.plan import Plan
    from graphfuse.planner import Planner
    from graphfuse.reshaped import Reshaped
    from graphfuse.runtime.bound import Bound
    from graphfuse.runtime.executable import Executable
    from graphfuse.runtime.handle import Handle
    from graphfuse.tuning.report import Report


_ROUNDINGS = ("float32", "declared")

StepT = TypeVar("StepT")
NoteT = TypeVar("NoteT")


class pygraph(Recorded, OpMethods):  # noqa: N801 - cuDNN's spelling
    """A graph of tensors and operations.

    io_data_type: of tensors that are given or output and set none of their own.
    intermediate_data_type: likewise of virtual tensors. compute_data_type: what nodes
    compute in (FLOAT or DOUBLE). handle: device and stream to plan and run on; without
    one, the device current when ``build_operation_graph`` is called.

    intermediate_rounding: what nodes read of a virtual tensor. "float32": what its node
    computed, in the node's compute type, whatever type the tensor declares. "declared": that
    rounded to the declared type, as if each node were a kernel of its own. Outputs that other
    nodes read are read as stored, either way.

    The arguments between are cuDNN's, in its order. is_override_shape_enabled, or is_dynamic_shape_enabled: execute
    may be given other extents of leading axes. is_cuda_graph_replay_expected holds of any graph and changes nothing:
    execute can be captured. The others ask for what is not here: GraphNotSupportedError says what to use instead.
    """

    _ir: ir.Graph | None
    _planner: Planner | None

    def __init__(
        self,
        name: str = "graph",
        io_data_type: data_type | Any = data_type.NOT_SET,
        intermediate_data_type: data_type | Any = data_type.NOT_SET,
        compute_data_type: data_type | Any = data_type.FLOAT,
        handle: Handle | None = None,
        sm_count: None = None,
        sm_version: None = None,
        kernel_cache: None = None,
        device_property: None = None,
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
        unasked = {
            "sm_count": sm_count,
            "sm_version": sm_version,
            "kernel_cache": kernel_cache,
            "device_property": device_property,
            "cuda_graph_retention": cuda_graph_retention,
        }
        for argument, value in unasked.items():
            if value is not None:
                raise GraphNotSupportedError(
                    f"graph {name!r}: {argument} is {value!r}; instead: {cudnn_names.KEYWORDS[argument]}"
                )
        _check_flag(f"graph {name!r}: is_dynamic_shape_enabled", is_dynamic_shape_enabled)
        _check_flag(f"graph {name!r}: is_override_shape_enabled", is_override_shape_enabled)
        _check_flag(f"graph {name!r}: is_cuda_graph_replay_expected", is_cuda_graph_replay_expected)
        super().__init__(
            checked_name("graph", name),
            checked_type(f"graph {name!r}: io_data_type", io_data_type),
            checked_type(f"graph {name!r}: intermediate_data_type", intermediate_data_type),
            checked_type(f"graph {name!r}: compute_data_type", compute_data_type),
            intermediate_rounding,
        )
        self.handle = handle
        self.takes_overrides = is_dynamic_shape_enabled or is_override_shape_enabled
        self._empty()

    def _empty(self) -> None:
        self.tensors.clear()
        self.nodes.clear()
        self._node_names: set[str] = set()
        self._nodes_of: Counter[str] = Counter()
        self._uids: dict[int, Tensor] = {}
        self._claimed: set[int] = set()
        self._forget()

    # Building the graph

    def tensor(
        self,
        dim: Sequence[int],
        stride: Sequence[int] | None = None,
        data_type: object = data_type.NOT_SET,
        is_virtual: bool = False,
        is_pass_by_value: bool = False,
        ragged_offset: None = None,
        reordering_type: tensor_reordering = tensor_reordering.NONE,
        name: str = "",
        uid: int | None = None,
        ragged_offset_multiplier: int = 1,
        *,
        byte_alignment: int = 16,
    ) -> Tensor:
        """A tensor that execute gets a value for. dim and stride in elements; stride defaults to row-major.

        uid: None, or cuDNN's -1, for one of the graph's choice. byte_alignment: what every address bound to it is
        a multiple of.
        """
        if ragged_offset is not None:
            raise GraphNotSupportedError(f"tensor {name!r}: ragged_offset is not supported; leave it None")
        if ragged_offset_multiplier != 1:
            raise GraphNotSupportedError(
                f"tensor {name!r}: ragged_offset_multiplier is {ragged_offset_multiplier!r}; leave it 1"
            )
        t = self._new_tensor(name)
        try:
            t.set_dim(dim).set_stride(packed_stride(t.get_dim()) if stride is None else stride)
            t.set_is_virtual(is_virtual).set_is_pass_by_value(is_pass_by_value).set_data_type(data_type)
            t.set_byte_alignment(byte_alignment).set_reordering_type(reordering_type)
            return t if uid is None or (type(uid) is int and uid == -1) else t.set_uid(uid)
        except GraphfuseError:
            # What was refused leaves nothing behind that validate would stumble over.
            self.tensors.remove(t)
            del self._uids[t.current_uid]
            raise

    def tensor_like(self, template: object, name: str = "", is_virtual: bool = False) -> Tensor:
        """A tensor with the shape and strides (in elements), data type and alignment of `template`.

        template: a graph tensor, a torch tensor, or any array with DLPack or an array
        interface. A one-element array on the CPU becomes a pass-by-value scalar.
        """
        if isinstance(template, Tensor):
            return self.tensor(
                template.get_dim(),
                template.get_stride() or None,
                template.get_data_type(),
                is_virtual,
                template.get_is_pass_by_value(),
                reordering_type=template.get_reordering_type(),
                name=name,
                byte_alignment=template.get_byte_alignment(),
            )
        from graphfuse.runtime import buffers, storage

        found = buffers.describe(template)
        if found.dim is None or found.dtype is None:  # an address, which has neither
            raise GraphTypeError(f"tensor_like: {template!r} has no shape; give a tensor or an array")
        dim, stride = storage.unpacked(found.dtype, found.dim or (1,), found.stride or (1,))
        scalar = found.device == "cpu" and all(extent == 1 for extent in dim)
        alignment = 1 << 8 if not found.address else found.address & -found.address
        return self.tensor(
            dim,
            stride,
            found.dtype,
            is_virtual,
            scalar,
            name=name,
            byte_alignment=min(16, alignment),
        )

    def tensor_scalar(self, value: float, scalar_type: object = data_type.FLOAT, name: str = "") -> Tensor:
        """A constant: a one-element tensor passed by value whose number is fixed in the graph.

        Its rank is inferred from the node that reads it, unless set.
        """
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise GraphTypeError(f"tensor_scalar: value must be an int or float, got {value!r}")
        scalar_type = checked_type(f"tensor {name!r}", scalar_type)
        value = checked_number(f"tensor {name!r}", value, scalar_type)
        t = self._new_tensor(name).set_is_virtual(False).set_is_pass_by_value(True).set_data_type(scalar_type)
        t.value = value
        return t

    def _new_tensor(self, name: str) -> Tensor:
        name = checked_name("tensor", name) or f"tensor_{len(self.tensors)}"
        uid = len(self.tensors) + 1
        while uid in self._uids:
            uid += 1
        t = Tensor(uid, name, self._forget, self._claim_uid)
        self._uids[uid] = t
        self.tensors.append(t)
        self._forget()
        return t

    def _claim_uid(self, tensor: Tensor, uid: int) -> None:
        if isinstance(uid, bool) or not isinstance(uid, int) or uid < 0:
            raise GraphTypeError(f"tensor {tensor.get_name()!r}: uid must be an int >= 0, got {uid!r}")
        holder = self._uids.get(uid)
        if holder is tensor:
            self._claimed.add(uid)
            return
        if holder is not None and uid in self._claimed:
            raise GraphValidationError(
                f"tensor {tensor.get_name()!r}: uid {uid} belongs to tensor {holder.get_name()!r}; uids must differ"
            )
        del self._uids[tensor.current_uid]
        self._claimed.discard(tensor.current_uid)
        if holder is not None:
            # The number was only ours to give out: its holder moves to a free one.
            free = max(self._uids) + 1
            holder._uid = free
            self._uids[free] = holder
        self._uids[uid] = tensor
        self._claimed.add(uid)

    def _add(
        self, op: Op, given: dict[str, object], compute_data_type: object, name: str
    ) -> Tensor | None | list[Tensor | None]:
        name = checked_name(f"node of {op.name}", name) or self._free_name(op)
        where = f"node {name!r} ({op.name})"
        if name in self._node_names:
            raise GraphValidationError(f"{where}: another node has this name; node names must differ")
        _offered(where, op, given)
        attributes: dict[str, Any] = {}
        order = f"; {op.order}" if op.order else ""
        for a in op.attributes:
            value: Any = given.get(a.name, a.default)
            if value is None and not a.required:  # cuDNN's default of each of them
                value = a.default
            if a.several:
                attributes[a.name] = None if value is None and not a.required else _all_of(where, a, value)
                continue
            fits = isinstance(value, a.types) and (bool in a.types or not isinstance(value, bool))
            if not fits:
                accepted = " or ".join(t.__name__ for t in a.types)
                raise GraphTypeError(f"{where}: {a.name} must be {accepted}, got {value!r}{order}")
            # Kernels compute with it in float32.
            number = a.types == (float, int)
            attributes[a.name] = checked_number(f"{where}: {a.name}", value, data_type.FLOAT) if number else value
        inputs = {}
        for port in op.inputs:
            value = given.get(port.name)
            if value is None and port.optional:
                continue
            if isinstance(value, int | float) and not isinstance(value, bool):
                value = self.tensor_scalar(value, name=f"{name}::{port.name}")
            if not isinstance(value, Tensor):
                raise GraphTypeError(
                    f"{where}: {port.name} must be a tensor of this graph or a number, got {value!r}{order}"
                )
            if self._uids.get(value.current_uid) is not value:
                raise GraphValidationError(f"{where}: {port.name} ({value.get_name()!r}) belongs to another graph")
            inputs[port.name] = value
        compute = checked_type(f"{where}: compute_data_type", compute_data_type)
        compute = self.compute_data_type if compute is data_type.NOT_SET else compute
        outputs = {p.name: self._new_tensor(f"{name}::{p.label or p.name}") for p in op.outputs}
        self.nodes.append(NodeRecord(name, op, inputs, outputs, attributes, compute))
        self._node_names.add(name)
        self._nodes_of[op.name] += 1
        self._forget()
        made = self._visible_outputs(self.nodes[-1])
        return made[0] if len(op.outputs) == 1 else made

    def _free_name(self, op: Op) -> str:
        number = self._nodes_of[op.name]
        while f"{op.name}.{number}" in self._node_names:
            number += 1
        return f"{op.name}.{number}"

    def _visible_outputs(self, node: NodeRecord) -> list[Tensor | None]:
        return [None if port in node.absent else t for port, t in node.outputs.items()]

    # The steps, in cuDNN's order

    def validate(self) -> None:
        """Infer what was not set and check the whole graph; GraphValidationError says what is wrong."""
        self._ir = freeze(self)

    def build_operation_graph(self, *, patterns: Sequence[object] = (), engines: Sequence[object] = ()) -> None:
        """Match patterns, after ``validate`` where that has not been called. patterns, engines: extra objects, or
        names to restrict to, for this graph.

        The name "emulator" among the engines has kernels run on the CPU, for CPU tensors.
        """
        from graphfuse.planner import Planner

        patterns, engines = _several("patterns", patterns), _several("engines", engines)
        if self._ir is None:
            self.validate()
        self._planner = Planner(self.frozen, self.handle, patterns, engines)

    def create_execution_plans(self, heuristics: Sequence[heur_mode] = (heur_mode.A,)) -> None:
        """Rank plans for each heuristic mode in turn; GraphNotSupportedError lists every engine's reason if none."""
        modes = _modes(heuristics)
        self._need(self._planner, "build_operation_graph").create(modes)

    def check_support(self) -> None:
        """GraphNotSupportedError if no plan is left after deselection."""
        self._need(self._planner, "build_operation_graph").check_support()

    def build_plans(self, policy: build_plan_policy = build_plan_policy.HEURISTICS_CHOICE) -> None:
        """Prepare the first plan that can be (HEURISTICS_CHOICE), or all that can (ALL), and select the first.

        A plan that turns out not to work here is passed over, with a warning if its kernel does not compile.
        GraphNotSupportedError where none is left, KernelCompileError where the only one does not compile.
        """
        _check_policy("build_plans", policy)
        self._need(self._planner, "build_operation_graph").build(policy)

    def build(
        self,
        heuristics: Sequence[heur_mode] = (heur_mode.A,),
        policy: build_plan_policy = build_plan_policy.HEURISTICS_CHOICE,
        *,
        patterns: Sequence[object] = (),
        engines: Sequence[object] = (),
    ) -> None:
        """All steps from validate to build_plans."""
        _check_policy("build", policy)
        self.validate()
        self.build_operation_graph(patterns=patterns, engines=engines)
        self.create_execution_plans(heuristics)
        self.check_support()
        self.build_plans(policy)

    # Plans

    def get_execution_plan_count(self) -> int:
        """Number of plans, deselected ones included; 0 before ``create_execution_plans``."""
        return 0 if self._planner is None else len(self._planner.plans)

    def get_plan_name_at_index(self, index: int) -> str:
        return self._plan(index).name

    def get_engine_and_knobs_at_index(self, index: int) -> tuple[object, object]:
        """(engine name, knob dict), as ``create_execution_plan`` takes them; tuples of both for several regions."""
        return self._plan(index).engine_and_knobs

    def get_engine_count(self) -> int:
        """Number of engines that planning may ask."""
        return len(self._need(self._planner, "build_operation_graph").registry.engines)

    def get_knobs_for_engine(self, engine: str) -> tuple[tuple[str, ...], ...]:
        """The names of an engine's knobs; of one with several kinds of knobs, those of each. Values are those of
        ``get_engine_and_knobs_at_index``."""
        return self._need(self._planner, "build_operation_graph").knob_names(engine)

    def get_behavior_notes(self) -> list[behavior_note]:
        """Those of the selected plan."""
        planner = self._need(self._planner, "build_plans")
        return _in_order(behavior_note, planner.at(planner.selected()).behavior_notes)

    def get_behavior_notes_for_plan_at_index(self, index: int) -> list[behavior_note]:
        return _in_order(behavior_note, self._plan(index).behavior_notes)

    def get_numerical_notes_at_index(self, index: int) -> tuple[str, ...]:
        """How the plan rounds, converts and sums, in words."""
        return self._plan(index).notes

    def create_execution_plan(self, engine: object, knobs: object = None) -> int:
        """Append the plan that `engine` (a name) and `knobs` (a dict) name; its index is returned."""
        return self._need(self._planner, "build_operation_graph").append(engine, knobs)

    def build_plan_at_index(self, index: int) -> None:
        """Compile one plan and select it."""
        self._need(self._planner, "create_execution_plans").build_at(index)

    def deselect_engines(self, engine_names: Sequence[str]) -> pygraph:
        """Bar plans that use an engine with one of these names; those built already count as not built."""
        names = _several("deselect_engines", engine_names)
        self._need(self._planner, "create_execution_plans").bar_engines(names)
        return self

    def deselect_workspace_greater_than(self, workspace_limit: int) -> pygraph:
        """Bar plans that need more than `workspace_limit` bytes; those built already count as not built."""
        self._need(self._planner, "create_execution_plans").bar_workspace(workspace_limit)
        return self

    def select_behavior_notes(self, notes: Sequence[behavior_note]) -> pygraph:
        """Bar plans that lack one of these notes; those built already count as not built."""
        return self._bar_notes("select_behavior_notes", behavior_note, notes, True)

    def deselect_behavior_notes(self, notes: Sequence[behavior_note]) -> pygraph:
        """Bar plans that have one of these notes; those built already count as not built."""
        return self._bar_notes("deselect_behavior_notes", behavior_note, notes, False)

    def select_numeric_notes(self, notes: Sequence[numerical_note]) -> pygraph:
        """Bar plans that lack one of these notes; those built already count as not built."""
        return self._bar_notes("select_numeric_notes", numerical_note, notes, True)

    def deselect_numeric_notes(self, notes: Sequence[numerical_note]) -> pygraph:
        """Bar plans that have one of these notes; those built already count as not built."""
        return self._bar_notes("deselect_numeric_notes", numerical_note, notes, False)

    def _bar_notes(self, what: str, kind: type, notes: Sequence[object], wanted: bool) -> pygraph:
        found = _several(what, notes)
        for note in found:
            if not isinstance(note, kind):
                raise GraphTypeError(f"{what}: give a list of {kind.__name__}, got {note!r}")
        self._need(self._planner, "build_operation_graph").bar_notes(found, wanted)
        return self

    def get_workspace_size(
        self,
        handle: Handle | None = None,
        override_uids: Sequence[int] | None = None,
        override_shapes: Sequence[Sequence[int]] | None = None,
        override_strides: Sequence[Sequence[int] | None] | None = None,
    ) -> int:
        """Bytes of workspace that execute needs; 0 means None may be given.

        With overrides as of ``execute``: what an execute with these shapes needs, and enough for fewer rows of the same
        class of counts. The plan for them is built where it was not yet, so that execute has nothing to build.
        """
        planner = self._need(self._planner, "build_plans")
        return self._workspace_size(planner.selected(), handle, override_uids, override_shapes, override_strides)

    def get_workspace_size_plan_at_index(
        self,
        index: int,
        handle: Handle | None = None,
        override_uids: Sequence[int] | None = None,
        override_shapes: Sequence[Sequence[int]] | None = None,
        override_strides: Sequence[Sequence[int] | None] | None = None,
    ) -> int:
        """Bytes of workspace of one plan; of one that is not built, as far as they are known by then. With overrides,
        for which it has to be built, as of ``get_workspace_size``."""
        self._plan(index)
        return self._workspace_size(index, handle, override_uids, override_shapes, override_strides)

    def _workspace_size(self, index: int, handle: Handle | None, uids: object, dims: object, strides: object) -> int:
        planner = self._need(self._planner, "build_plans")
        if handle is not None:
            planner.stream_of(handle)  # of another device, or destroyed
        if uids is None and dims is None and strides is None:
            return planner.at(index).workspace_bytes
        return self._overridden(index, uids, dims, strides).binder.workspace_bytes

    def execute(
        self,
        variant_pack: Mapping[Any, object],
        workspace: object = None,
        handle: Handle | None = None,
        override_uids: Sequence[int] | None = None,
        override_shapes: Sequence[Sequence[int]] | None = None,
        override_strides: Sequence[Sequence[int] | None] | None = None,
        *,
        programmatic_dependent_launch: bool = False,
    ) -> None:
        """Run the selected plan, asynchronously on the handle's stream (or torch's current one).

        variant_pack: {tensor, uid or name: torch tensor, array or address} for every
        non-virtual tensor; what stands under None is skipped. workspace: a buffer of ``get_workspace_size()`` bytes.
        A dict of torch tensors, addresses and numbers like one executed before, the memory of
        its tensors aside, costs a few comparisons; any other pack is looked at in full.

        override_uids, override_shapes, override_strides: other shapes, in elements, of inputs and outputs, for this
        call, of a graph with is_override_shape_enabled or is_dynamic_shape_enabled. Extents of leading axes may differ
        from those of the graph, all but the last axis and those that a norm works along. Each tensor whose shape
        differs has to be in the lists; the shapes of virtual tensors follow. Strides that are None, or left out, follow
        from those of the graph. What is given for a tensor may be larger: memory without gaps with room for it, or
        a tensor with the same strides, whose first slices are used. The first call with a class of row counts
        (of which the largest is at most an eighth above the smallest) plans it, and compiles what no other class
        has compiled; a call with a known class plans and compiles nothing, unless the reference engine runs a part of
        the graph, which is then planned once for each count. VariantPackError names the tensor.

        programmatic_dependent_launch: let the kernels begin while the kernel before them on
        the stream still runs; they wait for its end before they touch memory, so the result
        is the same. GraphNotSupportedError where that is not possible: it takes SM90 or newer
        (on the emulator, where kernels run one by one, it changes nothing) and engines that
        say that they wait.
        """
        planner = self._planner or self._need(None, "build")
        if programmatic_dependent_launch is not False:
            _check_flag("programmatic_dependent_launch", programmatic_dependent_launch)
        if override_uids is not None or override_shapes is not None or override_strides is not None:
            found = self._overridden(planner.selected(), override_uids, override_shapes, override_strides)
            planner.run(found, variant_pack, workspace, handle, programmatic_dependent_launch, self._check_keys)
            return
        stream = planner.stream() if handle is None else planner.stream_of(handle)
        if planner.running.like_last(variant_pack, workspace, stream, programmatic_dependent_launch):
            return
        planner.execute(None, variant_pack, workspace, handle, programmatic_dependent_launch, self._check_keys)

    def execute_plan_at_index(
        self,
        variant_pack: Mapping[Any, object],
        workspace: object = None,
        index: int = 0,
        handle: Handle | None = None,
        override_uids: Sequence[int] | None = None,
        override_shapes: Sequence[Sequence[int]] | None = None,
        override_strides: Sequence[Sequence[int] | None] | None = None,
        *,
        programmatic_dependent_launch: bool = False,
    ) -> None:
        """Run one built plan without selecting it. Overrides: as of ``execute``."""
        planner = self._need(self._planner, "build_plans")
        _check_flag("programmatic_dependent_launch", programmatic_dependent_launch)
        found = self._executable(index, override_uids, override_shapes, override_strides)
        planner.run(found, variant_pack, workspace, handle, programmatic_dependent_launch, self._check_keys)

    def bind(
        self,
        variant_pack: Mapping[Any, object],
        workspace: object = None,
        handle: Handle | None = None,
        override_uids: Sequence[int] | None = None,
        override_shapes: Sequence[Sequence[int]] | None = None,
        override_strides: Sequence[Sequence[int] | None] | None = None,
        *,
        programmatic_dependent_launch: bool = False,
    ) -> Bound:
        """The selected plan on fixed buffers: a callable without arguments whose calls are the launches alone.

        Takes what execute takes, with the same errors, and keeps the buffers alive; see ``Bound``
        for what a call does. It goes on running the plan it was made from when the graph changes.
        """
        planner = self._need(self._planner, "build")
        _check_flag("programmatic_dependent_launch", programmatic_dependent_launch)
        found = self._executable(planner.selected(), override_uids, override_shapes, override_strides)
        self._check_keys(variant_pack)
        return planner.bind(found, variant_pack, workspace, handle, programmatic_dependent_launch)

    def populate_cuda_graph(
        self, handle: Handle | None, variant_pack: Mapping[Any, object], workspace: object, cuda_graph: object
    ) -> None:
        """Put the selected plan on these buffers into a CUDA graph without nodes, which can be a child of others.

        cuda_graph: address of a cudaGraph_t, or an object that int() makes one of. handle, variant_pack, workspace: as
        of ``execute``, with the same errors; nothing is run. The buffers have to live as long as the graph is launched,
        and numbers passed by value stay what they are. GraphNotSupportedError for plans that are not kernels alone, as
        nothing tells what a library or the reference engine allocates: torch.cuda.graph captures these.
        """
        from graphfuse.runtime import cuda_graphs

        address, start = self._captured("populate_cuda_graph", handle, variant_pack, workspace, cuda_graph)
        cuda_graphs.populate(address, self.device, start)

    def update_cuda_graph(
        self, handle: Handle | None, variant_pack: Mapping[Any, object], workspace: object, cuda_graph: object
    ) -> None:
        """Give a CUDA graph that ``populate_cuda_graph`` filled, or the child node that is its copy, other buffers.

        Arguments and errors are those of ``populate_cuda_graph``; GraphStateError for a graph that another plan filled.
        Executable graphs are changed by the driver's own calls, as cudaGraphExecChildGraphNodeSetParams.
        """
        from graphfuse.runtime import cuda_graphs

        address, start = self._captured("update_cuda_graph", handle, variant_pack, workspace, cuda_graph)
        cuda_graphs.update(address, self.device, start)

    def _captured(
        self, what: str, handle: Handle | None, pack: Mapping[Any, object], workspace: object, cuda_graph: object
    ) -> tuple[int, Callable[[int], None]]:
        """Address of a CUDA graph, and what puts the selected plan on these buffers on a stream."""
        planner = self._need(self._planner, "build_plans")
        executable, given = planner.executable(), cuda_graph
        try:
            address = 0 if isinstance(given, bool | float | str) else int(given)  # type: ignore[call-overload]
        except (TypeError, ValueError):
            address = 0
        if address <= 0:
            raise GraphTypeError(f"{what}: cuda_graph is {given!r}; accepted: the address of a cudaGraph_t")
        if planner.device.kind != "cuda":
            raise GraphNotSupportedError(f"graph {self.name!r}: {what} needs a CUDA device; it is on {planner.device}")
        if executable.calls:
            parts = planner.at(planner.selected()).parts
            names = ", ".join(repr(parts[n].engine.name) for n in executable.calls)
            raise GraphNotSupportedError(
                f"graph {self.name!r}: {what} is for plans of kernels; {names} may allocate: capture execute with "
                "torch.cuda.graph"
            )
        if handle is not None:
            planner.stream_of(handle)  # of another device, or destroyed
        self._check_keys(pack)
        return address, executable.bind(pack, workspace, False)

    def autotune(
        self,
        variant_pack: Mapping[Any, object],
        workspace: object = None,
        handle: Handle | None = None,
        *,
        time_budget: float = 60.0,
    ) -> Report:
        """Time the knobs of the graph's kernels on this machine, keep the best for later graphs, use them in this one.

        After ``create_execution_plans``; no need to build. variant_pack, workspace, handle: as
        for ``execute``. Every candidate is checked against the reference engine before it is
        timed, in memory of its own of several times the tensors' size; a wrong one is left out
        with a warning. Waits for the device. In the end the graph is executed once.
        time_budget: seconds after which no other candidate is tried.

        Returns a report that prints as a table. Raises GraphNotSupportedError where nothing can
        be timed (no CUDA device, no kernel with knobs), GraphTypeError for a wrong time_budget,
        and what ``execute`` raises.
        """
        from graphfuse.tuning.autotune import autotune

        planner = self._need(self._planner, "create_execution_plans")
        self._check_keys(variant_pack)
        report = autotune(planner, variant_pack, workspace, handle, time_budget)
        self.execute(variant_pack, workspace, handle)
        return report

    def _executable(self, index: int, uids: object, dims: object, strides: object) -> Executable:
        """What runs a built plan, with other shapes where some are given."""
        planner = self._need(self._planner, "build_plans")
        if uids is None and dims is None and strides is None:
            return planner.executable(index)
        planner.at(index)
        return self._overridden(index, uids, dims, strides)

    def _overridden(self, index: int, uids: object, dims: object, strides: object) -> Executable:
        """What runs a built plan with other shapes."""
        if not self.takes_overrides:
            raise GraphStateError(
                f"graph {self.name!r}: override_uids, override_shapes and override_strides are for graphs made with "
                "is_override_shape_enabled=True"
            )
        planner = self._need(self._planner, "build_plans")
        from graphfuse.reshaped import Reshaped

        executable = planner.executable(index)
        known = self._reshaped.get(index)
        if known is None or known[0] is not executable:
            known = self._reshaped[index] = (executable, Reshaped(self, self.frozen, planner, index))
        return known[1].executable(overrides.given(uids, dims, strides))

    def _check_keys(self, variant_pack: Mapping[Any, object]) -> None:
        # Here, as later only the uid of a key counts, and another graph's tensor may have the same.
        for key in variant_pack if isinstance(variant_pack, Mapping) else ():
            if isinstance(key, Tensor) and self._uids.get(key.current_uid) is not key:
                raise VariantPackError(
                    f"variant pack: {key!r} is not of graph {self.name!r}; accepted: its tensors, their uids or names"
                )

    # Looking at it

    @property
    def device(self) -> Device:
        """Where it is planned to run."""
        return self._need(self._planner, "build_operation_graph").device

    @property
    def frozen(self) -> ir.Graph:
        """What ``validate`` made of the graph."""
        return self._need(self._ir, "validate")

    def query_tensor_attributes_of_uid(self, uid: int) -> Tensor:
        """The tensor with this uid; GraphValidationError if there is none."""
        if uid not in self._uids:
            raise GraphValidationError(
                f"graph {self.name!r} has no tensor with uid {uid!r}; it has {sorted(self._uids)}"
            )
        return self._uids[uid]

    if not TYPE_CHECKING:  # to which every attribute would be there

        def __getattr__(self, name: str) -> NoReturn:
            cudnn_names.refuse("pygraph", name, cudnn_names.PYGRAPH, self)

    def key(self) -> str:
        """A digest of the computation: names and the order of nodes do not matter."""
        return self._need(self._ir, "validate").key()

    def explain(self, format: str = "text") -> str:  # noqa: A002 - what it is called elsewhere
        """Which patterns matched which nodes, which engines declined and why, what was chosen and why, bytes moved.

        format: "text", "tree", "json", "svg", "mermaid" (a flowchart for Markdown) or "html" (one page that needs
        nothing else). After ``build_operation_graph``, whether or not the graph can be run.
        """
        from graphfuse.explain import FORMATS

        if format not in FORMATS:
            raise GraphTypeError(f"explain: format is {format!r}; accepted: {', '.join(map(repr, FORMATS))}")
        return FORMATS[format](self.explanation())

    def explanation(self) -> Explanation:
        """What ``explain`` writes down, as data; at the end of a notebook's cell it is a picture."""
        from graphfuse.explain import explained

        return explained(self._need(self._planner, "build_operation_graph"))

    def get_kernel_source_at_index(self, index: int) -> tuple[str, ...]:
        """The CUDA C++ text of each kernel of a plan, in the order in which they run; none of the reference engine.
        The plan need not be built."""
        return self._plan(index).sources

    def __str__(self) -> str:
        return to_python(self)

    # Keeping it

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
        from graphfuse import serialized

        _check_flag("serialize: as_bytes", as_bytes)
        _check_flag("serialize: include_kernels", include_kernels)
        key = _checked_key("serialize", key)
        planner = self._need(self._planner, "build_plans")
        plans, selected, codes = planner.recorded()
        content = serialized.of(self, self.frozen, planner.device, plans, selected, codes if include_kernels else None)
        blob = content.to_bytes(key)
        return blob if as_bytes else list(blob)

    def deserialize(
        self,
        *data: object,
        patterns: Sequence[object] = (),
        engines: Sequence[object] = (),
        key: bytes | None = None,
    ) -> pygraph:
        """Make this graph, which has to be empty, the one that was serialized; its plans are then built.

        Called as ``deserialize(data)`` or ``deserialize(handle, data)``; data: what ``serialize`` returned. patterns,
        engines: as of ``build_operation_graph``. key: the one that it was serialized with.

        The digest is checked first, then the device and every field. Machine code is loaded last. Without a key, do not
        load what somebody else may have made: machine code of theirs would run on the GPU.

        SerializedError, or another GraphfuseError, says what cannot be used; the graph then stays empty.
        """
        from graphfuse.planner import Planner
        from graphfuse.serialized import Serialized

        if len(data) not in (1, 2):
            raise GraphTypeError(f"deserialize: give data, or a handle and data; got {len(data)} arguments")
        if self.tensors:
            raise GraphStateError(f"graph {self.name!r} has tensors: deserialize into a new pygraph()")
        content = Serialized.from_bytes(_blob(data[-1]), _checked_key("deserialize", key))
        handle: Any = data[0] if len(data) == 2 else self.handle
        before = {name: getattr(self, name) for name in (*graph_json.SETTINGS, "handle")}
        try:
            self.handle = handle
            self._read(content.graph)
            content.check_key(self.key())
            planner = Planner(self.frozen, handle, _several("patterns", patterns), _several("engines", engines))
            content.check_device(planner.device)
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

    def _plan(self, index: int) -> Plan:
        return self._need(self._planner, "create_execution_plans").at(index)

    def _need(self, value: StepT | None, step: str) -> StepT:
        if value is None:
            raise GraphStateError(
                f"graph {self.name!r}: call {step}() first "
                "(changing the graph or a tensor undoes the steps done before)"
            )
        return value

    def _forget(self) -> None:
        self._ir = None
        self._planner = None
        self._reshaped: dict[int, tuple[Executable, Reshaped]] = {}


def _blob(data: object) -> bytes:
    """What was serialized, given as bytes or as a list of integers."""
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


def _in_order(kind: Iterable[NoteT], notes: frozenset[NoteT]) -> list[NoteT]:
    return [note for note in kind if note in notes]


def _check_policy(what: str, policy: object) -> None:
    if not isinstance(policy, build_plan_policy):
        raise GraphTypeError(f"{what}: policy must be a build_plan_policy, got {policy!r}")


def _check_flag(what: str, value: object) -> None:
    if value is not True and value is not False:
        raise GraphTypeError(f"{what}: give True or False, got {value!r}")


def _offered(where: str, op: Op, given: Mapping[str, object]) -> None:
    for name, only in op.not_offered:
        value = given.get(name)
        if value is not None and (type(value) is not type(only) or value != only):
            leave = "leave it out" if only is None else f"leave it out, or {only!r}"
            raise GraphNotSupportedError(f"{where}: {name} is not offered; {leave}")


def _all_of(where: str, a: Attribute, given: object) -> tuple[object, ...]:
    value: Any = given
    try:
        values = tuple(value)
        if a.types == (int,):
            # Of numpy, too; a bool is no extent.
            values = tuple(v if isinstance(v, bool) else v.__index__() for v in values)
        fits = all(isinstance(v, a.types) and not isinstance(v, bool) for v in values)
    except (TypeError, AttributeError):
        fits = False
    if not fits:
        accepted = " or ".join(t.__name__ for t in a.types)
        raise GraphTypeError(f"{where}: {a.name} must be a sequence of {accepted}, got {value!r}")
    return values


def _several(what: str, values: object) -> tuple[Any, ...]:
    if not isinstance(values, list | tuple | set | frozenset):
        raise GraphTypeError(f"{what}: give a list, got {values!r}")
    return tuple(values)


def _modes(heuristics: object) -> tuple[heur_mode, ...]:
    modes = tuple(heuristics) if isinstance(heuristics, list | tuple) else (heuristics,)
    if not modes or not all(isinstance(m, heur_mode) for m in modes):
        raise GraphTypeError(f"heuristics must be a list of heur_mode, got {heuristics!r}")
    return modes
