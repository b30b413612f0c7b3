"""Sequences of calls of modules and torch operations that one kernel computes together.

What they compute, roundings included, depends on the types and ranks of the arguments, so there is a trace for each. A
`Specialization` holds the result of such a trace: the program if the whole trace is one region, otherwise the reason
why not.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch.compiler import is_dynamo_compiling

from graphfuse.base.device import EMULATOR
from graphfuse.op_graph.ir import packed_stride
from graphfuse.runtime import torch_private
from graphfuse.runtime.bounded_dict import make_room
from graphfuse.runtime.fastcall import DECLINED, text, trying, when, written
from graphfuse.torch.analysis import inductor
from graphfuse.torch.analysis.reads import hold, watched
from graphfuse.torch.analysis.set_forward import RUN_ON
from graphfuse.torch.analysis.symbols import UNTRACED, why_left
from graphfuse.torch.analysis.trace import CallSequence, Probe, Trace, probes, tensors_of, trace_calls
from graphfuse.torch.regions import choose, over_ranks
from graphfuse.torch.regions.choose import TorchRegion
from graphfuse.torch.regions.graphs import RegionGraphs
from graphfuse.torch.regions.operator import RegionOperator
from graphfuse.torch.regions.program import Program
from graphfuse.torch.whole_models.region_call import needs_columns, needs_contiguous, region_call

Types = tuple[torch.dtype, torch.dtype]

TYPES = (torch.float32, torch.bfloat16, torch.float16)
_RECENT = 17  # functions for recent calls, one of them twice
_observed, _differentiates_forward = torch_private.needs_dispatcher(), torch_private.differentiates_forward()


@dataclass(frozen=True, eq=False)
class Specialization:
    """The computation of calls for activations of one type and rank.

    why: the reason why no kernel runs; "" if one does.
    watches: predicates of the modules, one each: True if everything that the module's forward read is unchanged.
    program: what the kernel computes.
    run: the kernel, as a function of activations and parameters.
    spread: the same function where the last dimension is not contiguous; its results have the strides of the calls'.
    autocasts: whether the calls would compute something else under autocast.
    columns: the extent of rows that the program holds for; None for any.
    is_contiguous: whether the inputs must be contiguous.
    is_in_rows: whether the activations must be as `lies_in_rows` says.
    is_arranged: whether the kernel is given views of the inputs.
    places: the program's inputs, as indices of the activations followed by the parameters.
    fast: the program's inference graph as a function, whose fast path may run in place of `run`; None if that views
    tensors, or does not read all.
    numbers: the calls' results as indices of the program's; empty for one result.
    untrainable: the reason why no kernels compute gradients; "" if they do. Only the first specialization of calls has
    it; the reason is the same for the others.
    """

    why: str
    watches: tuple[Callable[[torch.nn.Module], bool], ...] = ()
    program: Program | None = None
    run: Callable[..., object] | None = None
    spread: Callable[..., object] | None = None
    autocasts: bool = False
    columns: int | None = None
    is_contiguous: bool = False
    is_in_rows: bool = False
    is_arranged: bool = False
    places: tuple[int, ...] = ()
    fast: Callable[..., object] | None = None
    numbers: tuple[int, ...] = ()
    untrainable: str = ""

    @cached_property
    def sum_before(self) -> str:
        """Text of the program that adds two tensors in place of the first activation; "" if there is none."""
        if self.program is None or self.is_arranged or self.is_contiguous or self.places.count(0) != 1:
            return ""
        first = self.places[0] == 0 and over_ranks.can_be_summed(self.program, 0)
        return over_ranks.with_sum_before(self.program).text if first else ""

    def holds_for(self, modules: Sequence[torch.nn.Module]) -> bool:
        """True if a trace of these modules would be the same."""
        return bool(self.watches) and hold(self.watches, modules)


@dataclass(frozen=True, eq=False)
class FusedCalls:
    """A sequence of calls with its specializations by types and rank: the usual ones, and those of previous calls.

    types: of activations and of parameters, for the first one.
    members: index of the module and name of each of their tensors.
    classes: classes of the modules.
    recent: functions like `result` for calls like recent ones; "again" is the last.
    """

    calls: CallSequence
    classes: tuple[type, ...]
    of: Probe
    types: Types
    members: tuple[tuple[int, str], ...]
    specs: dict[tuple[torch.dtype, torch.dtype, int], Specialization] = field(default_factory=dict)
    recent: dict[object, Callable[..., object]] = field(default_factory=dict)

    @property
    def _counts(self) -> tuple[tuple[str, int], ...]:
        """Numbers of modules, activations and parameters, with the letter of their names in generated code."""
        return ("m", len(self.classes)), ("x", self.calls.given), ("w", len(self.members))

    @property
    def first(self) -> Specialization:
        return self.specs[(*self.types, self.of.ranks[0])]

    def specialize(self, modules: Sequence[torch.nn.Module], types: Types, rank: int) -> Specialization | None:
        """The specialization for types and rank that were not requested before, from a trace of these modules; None if
        it cannot be traced."""
        if {*types}.difference(TYPES) or rank not in self.of.ranks or is_dynamo_compiling():
            return None
        with torch_private.without_modes():
            if _observed():  # another trace or transform would record this one
                return None
            found = self.specs[(*types, rank)] = _specialized(self, modules, types, rank)
        return found

    @cached_property
    def result(self) -> Callable[..., object]:
        """Function of modules followed by activations. It returns the result of the calls, a list of several; None if
        no kernel computes it. The function is generated for these calls, because loops over the arguments would take
        longer."""
        modules, full, members = ([f"{letter}{n}" for n in range(count)] for letter, count in self._counts)
        given, place = ", ".join((*full, *members)), self.of.place
        watches = [f"spec.watches[{n}]({module})" for n, module in enumerate(modules)]
        lines = [
            *when(
                ["not (compiling() or is_grad_enabled() or differentiates())"],
                "again = recent.get('again')",
                f"made = None if again is None else again({', '.join((*modules, *full))})",
                *when(["made is not None"], "return made"),
            ),
            *when(["not isinstance(x0, Tensor)"], "return None"),
            "kind, device, shape, rank = x0.dtype, x0.device, x0.shape, x0.ndim",
            *when(["device.type not in run_on"], "return None"),
        ]
        for t in full[1:]:
            others = f"{t}.dtype is not kind", f"{t}.shape != shape", f"{t}.device != device"
            lines += when([f"not isinstance({t}, Tensor)", *others], "return None")
        for w, (number, name) in zip(members, self.members, strict=True):
            lines.append(f"{w} = getattr({modules[number]}, {name!r}, None)")
            other = [f"{w}.dtype is not w0.dtype"] if w != "w0" else []
            others = f"{w}.shape != extents", f"{w}.device != device", *other
            lines += when([f"not isinstance({w}, Tensor)", *others], "return None")
        lines += [
            f"types = kind, {'w0.dtype' if members else 'kind'}",
            "spec = specs.get((*types, rank))",
            *when(["spec is None"], f"spec = specialize(({', '.join(modules)},), types, rank)"),
            *when(
                [
                    "spec is None",
                    "spec.run is None",
                    "spec.autocasts and autocasts(device.type)",
                    f"spec.columns is not None and shape[{place}] != spec.columns",
                    "spec.is_arranged and type(x0) is not Tensor",
                    *(f"not {watch}" for watch in watches),
                    *(f"spec.is_contiguous and not {t}.is_contiguous()" for t in (*full, *members)),
                    *(f"spec.is_in_rows and not lies_in_rows({t})" for t in full),
                ],
                "return None",
            ),
        ]
        if self.first.untrainable:
            needs_gradient = " or ".join(f"{t}.requires_grad" for t in (*full, *members))
            lines += when([f"is_grad_enabled() and ({needs_gradient})"], "return None")
        lines += [
            *when(["x0.stride(-1) != 1"], f"return spec.spread({given})"),
            f"made = spec.run({given})",
            *when(["not (compiling() or is_grad_enabled())"], "keep(spec)"),
            "return made",
        ]
        names = {
            "compiling": is_dynamo_compiling,
            "differentiates": _differentiates_forward,
            "recent": self.recent,
            "keep": self._keep,
            "is_grad_enabled": torch.is_grad_enabled,
            "Tensor": torch.Tensor,
            "run_on": RUN_ON,
            "extents": self.of.extents,
            "specs": self.specs,
            "specialize": self.specialize,
            "lies_in_rows": _lies_in_rows,
            "autocasts": torch.is_autocast_enabled,
        }
        return written("calls of modules", "result", text("result", (*modules, *full), lines), names)

    def _keep(self, spec: Specialization) -> None:
        """Keeps the fast path of the last call, without gradients, for the next one."""
        fast = None if spec.fast is None or spec.is_contiguous or spec.is_in_rows else spec.fast.last()
        if fast is None or _observed():
            return
        known = self.recent.get((spec, fast))
        if known is None:
            make_room(self.recent, _RECENT)
            known = self.recent[(spec, fast)] = self._again(spec, fast)
        self.recent["again"] = known

    def _again(self, spec: Specialization, fast: Callable[..., object]) -> Callable[..., object]:
        """A function like `result` for calls like an earlier one. It compares what modules have; the fast path compares
        everything else."""
        modules, full = ([f"{letter}{n}" for n in range(count)] for letter, count in self._counts[:2])
        tensors = [*full, *(f"getattr({modules[number]}, {name!r}, None)" for number, name in self.members)]
        unlike = [f"not watch{n}({module})" for n, module in enumerate(modules)]
        unlike += ["autocasts(x0.device.type)"] if spec.autocasts else []
        unlike += [f"x0.shape[{self.of.place}] != {spec.columns}"] if spec.columns is not None else []
        several = ", ".join(f"made[{number}]" for number in spec.numbers)
        lines = [
            # Raised by what is no tensor, and by a module without what the last call's read.
            *trying(when(unlike, "return None"), "AttributeError, IndexError", "return None"),
            f"made = fast({', '.join(tensors[place] for place in spec.places)})",
            f"return None if made is declined else {f'[{several}]' if several else 'made'}",
        ]
        names = {"fast": fast, "declined": DECLINED, "autocasts": torch.is_autocast_enabled}
        names |= {f"watch{n}": watch for n, watch in enumerate(spec.watches)}
        return written("repeated calls of modules", "again", text("again", (*modules, *full), lines), names)


def _lies_in_rows(t: torch.Tensor) -> bool:
    """True for a tensor with contiguous columns and no dimension within a later one in memory. Torch's elementwise
    results for such tensors are contiguous."""
    if t.is_contiguous():
        return True
    strides = [stride for stride in t.stride() if stride]
    return t.stride(-1) == 1 and strides == sorted(strides, reverse=True)


_kept: deque[FusedCalls] = deque(maxlen=64)
"""The most recent calls: models have many equal ones."""


def fused(calls: CallSequence, modules: Sequence[torch.nn.Module], without_gradients: bool = False) -> FusedCalls | str:
    """The calls of these modules with their usual specializations, if the first one is a kernel; otherwise the reason
    why it is not. without_gradients: whether a kernel for inference suffices; then calls that require gradients do not
    use it."""

    candidates, classes = probes(modules), tuple(map(type, modules))
    if not candidates:
        return "its parameters are not vectors of one length"
    if candidates[0].columns < 2 or any(not t.is_floating_point() for m in modules for t in m.parameters()):
        return "its parameters are no floating-point vectors"
    own = [(number, name, t.dtype) for number, module in enumerate(modules) for name, t in tensors_of(module)]
    kind = next((dtype for _, _, dtype in own if dtype in TYPES), torch.bfloat16)
    members, whys = tuple((number, name) for number, name, _ in own), list[str]()
    for of in candidates:
        found = _with_usual(FusedCalls(calls, classes, of, (kind, kind), members), modules)
        if found is None:
            return "the call is being traced or transformed"
        if not found.first.why:
            return ("" if without_gradients else found.first.untrainable) or found
        whys.append(found.first.why)
    return next((why for why in whys if not why.startswith(UNTRACED)), whys[0])


def _with_usual(made: FusedCalls, modules: Sequence[torch.nn.Module]) -> FusedCalls | None:
    """The calls with their usual specializations, or equal recent ones; None if they cannot be traced now."""
    for other in tuple(_kept):
        is_like = (other.calls, other.classes, other.of, other.members) == (
            made.calls,
            made.classes,
            made.of,
            made.members,
        )
        if is_like and other.types == made.types and other.first.holds_for(modules):
            return other
    ranks, (kind, _) = made.of.ranks, made.types
    first = made.specialize(modules, made.types, ranks[0])
    if first is None:
        return None
    if not first.why:
        for rank in ranks[1:3]:
            made.specialize(modules, made.types, rank)
        for other in (other for other in TYPES if other is not kind):
            made.specialize(modules, (other, other), ranks[0])
    _kept.append(made)
    return made


def _specialized(of: FusedCalls, modules: Sequence[torch.nn.Module], types: Types, rank: int) -> Specialization:
    def trace(probe: Probe) -> Trace:
        return trace_calls(of.calls, modules, probe, types, rank)

    try:
        found = trace(of.of)
    except Exception as error:
        return Specialization(why_left(error))
    watches = tuple(map(watched, found.reads))
    region = _region(found)
    if isinstance(region, str):
        return Specialization(region, watches)
    call = region_call(found, region, of.calls.given)
    if isinstance(call, str):
        return Specialization(call, watches)
    columns: int | None = of.of.columns
    if not of.of.is_fixed:
        try:
            other = _region(trace(replace(of.of, columns=columns + 16)))
            columns = columns if isinstance(other, str) or other.program != region.program else None
        except Exception:  # the same errors as in the first trace
            pass
    count = of.calls.given + len(of.members)
    run = call.run(region.program, count)
    contiguous = _with_contiguous(run, of.calls.given) if found.packs else None
    if call.is_permuted:
        spread = run = contiguous if contiguous and region.program.follows else run
    else:
        spread = contiguous or call.run(replace(region.program, follows=True), count)
    places = tuple(place for place, _ in call.read)
    # What the program does not read, its fast path does not compare.
    is_direct = not call.is_arranged and run is not contiguous and {*places} == {*range(count)}
    return Specialization(
        "",
        watches,
        region.program,
        run,
        spread,
        found.autocasts,
        columns,
        any(map(needs_contiguous, found.graph.nodes)),
        any(map(needs_columns, found.graph.nodes)),
        call.is_arranged,
        places,
        RegionOperator.of(region.program.text).inference.function if is_direct else None,
        tuple(one.number for one in call.returned) if len(call.returned) > 1 else (),
        _untrainable(region) if not of.specs else "",
    )


def _with_contiguous(run: Callable[..., object], count: int) -> Callable[..., object]:
    """The function with its first `count` arguments made contiguous."""
    return lambda *given: run(*[t.contiguous() for t in given[:count]], *given[count:])


def _region(of: Trace) -> TorchRegion | str:
    """The region that contains the whole trace, or the reason why there is none."""
    found = choose.find(of.graph, dict.fromkeys(of.graph.nodes, 0))
    if not found:
        return "no kernel computes its forward"
    region, *others = found
    computed = [n for n in of.graph.nodes if n.op == "call_function" and not inductor.is_free(n)]
    left = dict.fromkeys(inductor.title(node) for node in computed if node not in region.nodes)
    if others or left:
        return f"no one kernel computes {region.program.operations} and {', '.join(left)}"
    return region


def _untrainable(region: TorchRegion) -> str:
    """The reason why kernels cannot compute a region's gradients, "" if they can. Non-contiguous rows are copied by the
    formula."""
    graphs, shape = RegionGraphs.of(region.program.text), region.tensors[0].shape
    rows = tuple(shape[d] for d in region.orders[0])
    return graphs.why_untrainable(rows, packed_stride(rows), (True,) * len(graphs.differentiable), str(EMULATOR))
