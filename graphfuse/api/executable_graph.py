"""Methods of a graph that run it or prepare that: workspace, execute and bind, CUDA graphs, and tuning of knobs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from graphfuse.api import variant_packs
from graphfuse.api.checks import check_flag
from graphfuse.api.planned_graph import PlannedGraph
from graphfuse.base.errors import GraphNotSupportedError, GraphStateError, GraphTypeError, VariantPackError
from graphfuse.op_graph.tensor import Tensor
from graphfuse.planning import overrides

if TYPE_CHECKING:
    from graphfuse.base.device import Device
    from graphfuse.planning.reshaped_plan import ReshapedPlan
    from graphfuse.runtime.bound import Bound
    from graphfuse.runtime.executable import Executable
    from graphfuse.runtime.handle import Handle
    from graphfuse.tuning.report import TuningReport


class ExecutableGraph(PlannedGraph):
    """A graph whose plans can be run, with the planned shapes or with other leading extents."""

    def get_workspace_size(
        self,
        handle: Handle | None = None,
        override_uids: Sequence[int] | None = None,
        override_shapes: Sequence[Sequence[int]] | None = None,
        override_strides: Sequence[Sequence[int] | None] | None = None,
    ) -> int:
        """Bytes of workspace that execute needs; if 0, its workspace may be None.

        Overrides are as in ``execute``. With them, the bytes are enough for these shapes, and for fewer rows of the
        same class of row counts. The plan for them is built now unless it was before, so that execute builds nothing.
        """
        index = self._need(self._planner, "build_plans").selected()
        return self.get_workspace_size_plan_at_index(index, handle, override_uids, override_shapes, override_strides)

    def get_workspace_size_plan_at_index(
        self,
        index: int,
        handle: Handle | None = None,
        override_uids: Sequence[int] | None = None,
        override_shapes: Sequence[Sequence[int]] | None = None,
        override_strides: Sequence[Sequence[int] | None] | None = None,
    ) -> int:
        """Bytes of workspace of one plan. Before it is built, engines may not know all of them yet.

        With overrides as in ``get_workspace_size``, the plan has to be built."""
        planned = self._plan(index)
        planner = self._need(self._planner, "build_plans")
        if handle is not None:
            planner.stream_of(handle)  # of another device, or destroyed
        if override_uids is None and override_shapes is None and override_strides is None:
            return planned.workspace_bytes
        return self._executable(index, override_uids, override_shapes, override_strides).binder.workspace_bytes

    def execute(
        self,
        variant_pack: Mapping[Any, object] | Sequence[object] | None = None,
        workspace: object = None,
        handle: Handle | None = None,
        override_uids: Sequence[int] | None = None,
        override_shapes: Sequence[Sequence[int]] | None = None,
        override_strides: Sequence[Sequence[int] | None] | None = None,
        tensor_uids: Sequence[int] | None = None,
        *,
        tensor_dict: Mapping[Any, object] | Sequence[object] | None = None,
        programmatic_dependent_launch: bool = False,
    ) -> None:
        """Run the selected plan, asynchronously on the handle's stream (or torch's current one).

        variant_pack: {tensor, uid or name: torch tensor, array or address} for every non-virtual tensor. Values under
        None, or under a tensor that no node uses, are skipped. A dict of torch tensors, addresses and numbers that
        differs from an earlier one only in memory is checked by a few comparisons; any other is checked in full.
        workspace: a buffer of ``get_workspace_size()`` bytes. tensor_uids: the uid of each buffer, if variant_pack is
        a list of buffers. tensor_dict: cuDNN's name of variant_pack.

        override_uids, override_shapes, override_strides: other shapes, in elements, of inputs and outputs for this
        call. They need a graph with is_override_shape_enabled or is_dynamic_shape_enabled. Any axis may have another
        extent than in the graph, except the last axis and those that a norm works along. Each tensor whose shape
        differs has to be in the lists. Shapes of virtual tensors are inferred, except outputs of a reshape, which have
        to be in the lists, too. Strides that are None or left out follow from the graph's. The buffer of a tensor may
        be larger: memory without gaps, or a tensor with the same strides, whose first slices are used. The first call
        with a class of row counts (the largest is at most an eighth above the smallest) plans it, and compiles
        kernels that no other class has compiled. Calls with a known class plan and compile nothing, unless the
        reference engine runs a part of the graph; it is planned once for each count. Raises VariantPackError, which
        names the tensor.

        programmatic_dependent_launch: the kernels may begin while the kernel before them on the stream still runs.
        They wait for its end before they access memory, so the result is the same. It requires SM90 or newer and
        engines whose kernels wait; otherwise GraphNotSupportedError is raised. On the emulator, where kernels run one
        by one, it changes nothing.
        """
        planner = self._planner or self._need(None, "build")
        pack: Any = variant_pack
        if tensor_dict is not None or tensor_uids is not None:
            pack = variant_packs.pack("execute", variant_pack, tensor_dict, tensor_uids)
        if programmatic_dependent_launch is not False:
            check_flag("programmatic_dependent_launch", programmatic_dependent_launch)
        if override_uids is not None or override_shapes is not None or override_strides is not None:
            found = self._executable(planner.selected(), override_uids, override_shapes, override_strides)
            planner.run(found, pack, workspace, handle, programmatic_dependent_launch, self._check_keys)
            return
        stream = planner.stream() if handle is None else planner.stream_of(handle)
        if planner.running.like_last(pack, workspace, stream, programmatic_dependent_launch):
            return
        planner.run(planner.executable(), pack, workspace, handle, programmatic_dependent_launch, self._check_keys)

    def execute_plan_at_index(
        self,
        variant_pack: Mapping[Any, object] | Sequence[object] | None = None,
        workspace: object = None,
        index: int = 0,
        handle: Handle | None = None,
        override_uids: Sequence[int] | None = None,
        override_shapes: Sequence[Sequence[int]] | None = None,
        override_strides: Sequence[Sequence[int] | None] | None = None,
        tensor_uids: Sequence[int] | None = None,
        *,
        tensor_dict: Mapping[Any, object] | Sequence[object] | None = None,
        programmatic_dependent_launch: bool = False,
    ) -> None:
        """Run one built plan without selecting it. Overrides, tensor_uids, tensor_dict: as in ``execute``."""
        planner = self._need(self._planner, "build_plans")
        pack = variant_packs.pack("execute_plan_at_index", variant_pack, tensor_dict, tensor_uids)
        check_flag("programmatic_dependent_launch", programmatic_dependent_launch)
        found = self._executable(index, override_uids, override_shapes, override_strides)
        planner.run(found, pack, workspace, handle, programmatic_dependent_launch, self._check_keys)

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
        """The selected plan on fixed buffers: a callable without arguments, which only launches (``Bound``).

        Arguments and errors are those of ``execute``. The result keeps the buffers alive. If the graph changes, it
        still runs the plan that it was made from.
        """
        planner = self._need(self._planner, "build")
        check_flag("programmatic_dependent_launch", programmatic_dependent_launch)
        found = self._executable(planner.selected(), override_uids, override_shapes, override_strides)
        self._check_keys(variant_pack)
        return planner.bind(found, variant_pack, workspace, handle, programmatic_dependent_launch)

    def populate_cuda_graph(
        self, handle: Handle | None, variant_pack: Mapping[Any, object], workspace: object, cuda_graph: object
    ) -> None:
        """Add the selected plan on these buffers to an empty CUDA graph, which can then be a child of other graphs.

        cuda_graph: address of a cudaGraph_t, or an object that int() converts to one. handle, variant_pack, workspace:
        as in ``execute``, with the same errors; nothing is run. The buffers have to live as long as the graph is
        launched, and numbers passed by value are fixed. Raises GraphNotSupportedError if not all parts of the plan are
        kernels, as allocations of a library or the reference engine are not known; torch.cuda.graph captures these.
        """
        from graphfuse.runtime import cuda_graphs

        cuda_graphs.populate(*self._captured("populate_cuda_graph", handle, variant_pack, workspace, cuda_graph))

    def update_cuda_graph(
        self, handle: Handle | None, variant_pack: Mapping[Any, object], workspace: object, cuda_graph: object
    ) -> None:
        """Set other buffers in a CUDA graph that ``populate_cuda_graph`` filled, or in the child node that copies it.

        Arguments and errors are those of ``populate_cuda_graph``. Raises GraphStateError if another plan filled the
        graph. Executable graphs are updated by the driver's calls, such as cudaGraphExecChildGraphNodeSetParams.
        """
        from graphfuse.runtime import cuda_graphs

        cuda_graphs.update(*self._captured("update_cuda_graph", handle, variant_pack, workspace, cuda_graph))

    def _captured(
        self, what: str, handle: Handle | None, pack: Mapping[Any, object], workspace: object, cuda_graph: object
    ) -> tuple[int, Device, Callable[[int], None]]:
        """Address of a CUDA graph, its device, and a function that launches the plan on these buffers on a stream."""
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
        return address, planner.device, executable.bind(pack, workspace, False)

    def autotune(
        self,
        variant_pack: Mapping[Any, object],
        workspace: object = None,
        handle: Handle | None = None,
        *,
        time_budget: float = 60.0,
    ) -> TuningReport:
        """Time knobs of the graph's kernels on this machine; use the best in this graph and store them for later ones.

        It is called after ``create_execution_plans``; plans need not be built. variant_pack, workspace, handle: as in
        ``execute``. Every candidate is checked against the reference engine before it is timed, in separate memory of
        several times the tensors' size. One with a wrong result is skipped with a warning. The call waits for the
        device and executes the graph once in the end. time_budget: seconds after which no other candidate is tried.

        Returns a report that prints as a table. Raises GraphNotSupportedError if nothing can be timed (no CUDA device,
        no kernel with knobs), GraphTypeError for a wrong time_budget, and the errors of ``execute``.
        """
        from graphfuse.tuning.autotune import autotune

        planner = self._need(self._planner, "create_execution_plans")
        self._check_keys(variant_pack)
        report = autotune(planner, variant_pack, workspace, handle, time_budget)
        self.execute(variant_pack, workspace, handle)
        return report

    def _executable(self, index: int, uids: object, dims: object, strides: object) -> Executable:
        """Executable of a built plan, for the overriding shapes if some are given."""
        planner = self._need(self._planner, "build_plans")
        executable = planner.executable(index)
        if uids is None and dims is None and strides is None:
            return executable
        if not self.takes_overrides:
            raise GraphStateError(
                f"graph {self.name!r}: override_uids, override_shapes and override_strides are for graphs made with "
                "is_override_shape_enabled=True"
            )
        from graphfuse.planning.reshaped_plan import ReshapedPlan

        known = self._reshaped.get(index)
        if known is None or known[0] is not executable:
            known = self._reshaped[index] = (executable, ReshapedPlan(self, self.frozen, planner, index))
        return known[1].executable(overrides.given(uids, dims, strides))

    def _check_keys(self, variant_pack: Mapping[Any, object]) -> None:
        # Checked here, as later checks compare uids alone, and another graph's tensor may have the same uid.
        for key in variant_pack if isinstance(variant_pack, Mapping) else ():
            if isinstance(key, Tensor) and not self._uids.has(key):
                raise VariantPackError(
                    f"variant pack: {key!r} is not of graph {self.name!r}; accepted: its tensors, their uids or names"
                )

    def _forget(self) -> None:
        super()._forget()
        self._reshaped: dict[int, tuple[Executable, ReshapedPlan]] = {}
