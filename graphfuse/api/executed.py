"""A graph's calls: workspace, execute and bind, CUDA graphs, and timing of knobs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from graphfuse.api import variant_packs
from graphfuse.api.checks import check_flag
from graphfuse.api.planned import PlannedGraph
from graphfuse.base.errors import GraphNotSupportedError, GraphStateError, GraphTypeError, VariantPackError
from graphfuse.op_graph.tensor import Tensor
from graphfuse.planning import overrides

if TYPE_CHECKING:
    from graphfuse.base.device import Device
    from graphfuse.planning.reshaped import Reshaped
    from graphfuse.runtime.bound import Bound
    from graphfuse.runtime.executable import Executable
    from graphfuse.runtime.handle import Handle
    from graphfuse.tuning.report import TuningReport


class Executed(PlannedGraph):
    """A graph whose plans run, as planned or with other leading extents."""

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
        """Bytes of workspace of one plan; of one that is not built, as far as they are known by then. With overrides,
        for which it has to be built, as of ``get_workspace_size``."""
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

        variant_pack: {tensor, uid or name: torch tensor, array or address} for every
        non-virtual tensor; what stands under None, or under a tensor that no node uses, is skipped.
        workspace: a buffer of ``get_workspace_size()`` bytes.
        A dict of torch tensors, addresses and numbers like one executed before, the memory of
        its tensors aside, costs a few comparisons; any other pack is looked at in full. tensor_uids: of a
        variant_pack that is a list of buffers, the uid of each. tensor_dict: cuDNN's name of variant_pack.

        override_uids, override_shapes, override_strides: other shapes, in elements, of inputs and outputs, for this
        call, of a graph with is_override_shape_enabled or is_dynamic_shape_enabled. Extents of leading axes may differ
        from those of the graph, all but the last axis and those that a norm works along. Each tensor whose shape
        differs has to be in the lists; the shapes of virtual tensors follow, but for what a reshape makes, which has to
        be there, too. Strides that are None, or left out, follow from those of the graph. What is given for a tensor
        may be larger: memory without gaps with room for it, or a tensor with the same strides, whose first slices are
        used. The first call with a class of row counts (of which the largest is at most an eighth above the smallest)
        plans it, and compiles what no other class has compiled; a call with a known class plans and compiles nothing,
        unless the reference engine runs a part of the graph, which is then planned once for each count.
        VariantPackError names the tensor.

        programmatic_dependent_launch: let the kernels begin while the kernel before them on
        the stream still runs; they wait for its end before they touch memory, so the result
        is the same. GraphNotSupportedError where that is not possible: it takes SM90 or newer
        (on the emulator, where kernels run one by one, it changes nothing) and engines that
        say that they wait.
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
        """Run one built plan without selecting it. Overrides, tensor_uids and tensor_dict: as of ``execute``."""
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
        """The selected plan on fixed buffers: a callable without arguments whose calls are the launches alone.

        Takes what execute takes, with the same errors, and keeps the buffers alive; see ``Bound``
        for what a call does. It goes on running the plan it was made from when the graph changes.
        """
        planner = self._need(self._planner, "build")
        check_flag("programmatic_dependent_launch", programmatic_dependent_launch)
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

        cuda_graphs.populate(*self._captured("populate_cuda_graph", handle, variant_pack, workspace, cuda_graph))

    def update_cuda_graph(
        self, handle: Handle | None, variant_pack: Mapping[Any, object], workspace: object, cuda_graph: object
    ) -> None:
        """Give a CUDA graph that ``populate_cuda_graph`` filled, or the child node that is its copy, other buffers.

        Arguments and errors are those of ``populate_cuda_graph``; GraphStateError for a graph that another plan filled.
        Executable graphs are changed by the driver's own calls, as cudaGraphExecChildGraphNodeSetParams.
        """
        from graphfuse.runtime import cuda_graphs

        cuda_graphs.update(*self._captured("update_cuda_graph", handle, variant_pack, workspace, cuda_graph))

    def _captured(
        self, what: str, handle: Handle | None, pack: Mapping[Any, object], workspace: object, cuda_graph: object
    ) -> tuple[int, Device, Callable[[int], None]]:
        """Address of a CUDA graph, its device, and what puts the selected plan on these buffers on a stream."""
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
        """Executable of a built plan, with other shapes where some are given."""
        planner = self._need(self._planner, "build_plans")
        executable = planner.executable(index)
        if uids is None and dims is None and strides is None:
            return executable
        if not self.takes_overrides:
            raise GraphStateError(
                f"graph {self.name!r}: override_uids, override_shapes and override_strides are for graphs made with "
                "is_override_shape_enabled=True"
            )
        from graphfuse.planning.reshaped import Reshaped

        known = self._reshaped.get(index)
        if known is None or known[0] is not executable:
            known = self._reshaped[index] = (executable, Reshaped(self, self.frozen, planner, index))
        return known[1].executable(overrides.given(uids, dims, strides))

    def _check_keys(self, variant_pack: Mapping[Any, object]) -> None:
        # Here, as later only the uid of a key counts, and another graph's tensor may have the same.
        for key in variant_pack if isinstance(variant_pack, Mapping) else ():
            if isinstance(key, Tensor) and not self._uids.has(key):
                raise VariantPackError(
                    f"variant pack: {key!r} is not of graph {self.name!r}; accepted: its tensors, their uids or names"
                )

    def _forget(self) -> None:
        super()._forget()
        self._reshaped: dict[int, tuple[Executable, Reshaped]] = {}
