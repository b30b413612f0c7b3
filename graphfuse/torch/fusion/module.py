"""True if a module is a norm that an operator computes, from graphs of its own forward: one for each type and rank that
an operator is for. Where one of them is another norm, or none, it is left, or calls like that run its own forward."""

import functools
import itertools
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch

from graphfuse.torch.fusion import traced
from graphfuse.torch.fusion.form import OPERATORS, Form, Serving
from graphfuse.torch.fusion.generated import title
from graphfuse.torch.fusion.interpreter import ForwardDeclined
from graphfuse.torch.fusion.known import known
from graphfuse.torch.fusion.match import find, rounds_otherwise
from graphfuse.torch.fusion.meaning import dtype, op, writes
from graphfuse.torch.fusion.reads import watched
from graphfuse.torch.fusion.site import NormSite
from graphfuse.torch.modules.norms import LayerNorm, RMSNorm

HALF, OTHER_HALF, SINGLE = torch.bfloat16, torch.float16, torch.float32
_RANKS = (1, 2, 3, 4, 5)
_OTHER_EPSILON = 0.34375
_VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)


@dataclass(frozen=True)
class NormModule:
    """A module that is a norm.

    parameters: their names, by those of the operator's arguments.
    epsilon: the attribute that has it; "" where that is a constant.
    eps: its value.
    same_type: whether it is another norm with a weight of another type than x.
    autocasts: whether it is another norm under autocast.
    gate: the argument of forward that is one.
    groups, dim, factor: as of ``NormSite``.
    ranks: of x, for which it is this norm.
    columns: the extent along dim, None for any.
    extents: of parameters.
    is_contiguous: whether what it is given must be.
    watch: tells whether what else its forward depends on is as it was.
    """

    form: Form
    parameters: tuple[tuple[str, str], ...]
    epsilon: str
    eps: float | None
    same_type: bool
    autocasts: bool
    gate: str = ""
    groups: int = 1
    dim: int = -1
    factor: float | None = None
    ranks: tuple[int, ...] = _RANKS
    is_contiguous: bool = False
    columns: int | None = field(default=None, compare=False)
    extents: tuple[int, ...] = field(default=(), compare=False)
    watch: Callable[[torch.nn.Module], bool] = field(default=lambda module: True, compare=False, repr=False)

    @property
    def serving(self) -> Serving:
        return OPERATORS[self.form]


@dataclass(frozen=True)
class Refused:
    """Why a module that looks like a norm is none that is replaced."""

    reason: str

    def __str__(self) -> str:
        return self.reason


def recognized(module: torch.nn.Module) -> NormModule | Refused | None:
    """None of a module that does not look like a norm: it has children, or its forward reduces no rows and its class is
    not called one."""
    if isinstance(module, RMSNorm | LayerNorm):
        return Refused("it is graphfuse's")
    if next(module.children(), None) is not None or not _may_be(type(module)):
        return None
    probe = traced.probe(module)
    is_called_norm = "norm" in type(module).__name__.lower()
    if probe is None:
        return Refused("its parameters are not vectors of one length") if is_called_norm else None
    if probe.columns < 2 or any(not t.is_floating_point() for t in module.parameters()):
        return Refused("its parameters are no floating-point vectors") if is_called_norm else None
    found = _seen(module, probe) or _judged(module, probe)
    if isinstance(found, NormModule) and not any(found is norm for _, _, norm in tuple(_kept)):
        _kept.append((type(module), probe, found))
    return found if is_called_norm or not isinstance(found, Refused) else None


_kept: deque[tuple[type, traced.Probe, NormModule]] = deque(maxlen=64)
"""The last norms that were found: a model has many that are alike."""


def _seen(module: torch.nn.Module, of: traced.Probe) -> NormModule | None:
    """The norm that another module was which has the same of all that its forward reads."""
    for cls, probe, norm in tuple(_kept):
        if cls is type(module) and probe == of and _is_as(module, norm):
            return norm
    return None


def _is_as(module: torch.nn.Module, norm: NormModule) -> bool:
    try:
        eps = getattr(module, norm.epsilon) if norm.epsilon else norm.eps
        return type(eps) is float and _is_like(eps, norm.eps) and norm.watch(module)
    except AttributeError:  # of another way through forward
        return False


def _may_be(cls: type) -> bool:
    """torch's own modules are what their names say."""
    return not cls.__module__.startswith("torch.") or cls in (torch.nn.RMSNorm, torch.nn.LayerNorm)


@dataclass(frozen=True)
class _Way:
    """Trace of forward with tensors of one type and shape. parameters, gate: as of `NormModule`."""

    trace: traced.Traced
    site: NormSite
    parameters: tuple[tuple[str, str], ...]
    gate: str

    def is_like(self, other: "_Way", eps: float | None) -> bool:
        """True if it is the same norm as another way, in a type that may round nothing."""
        a, b = self.site, other.site
        rounds = dtype(a.out) is not SINGLE and a.form == b.form
        is_form = rounds or dtype(a.out) is SINGLE and a.form == replace(b.form, rounded=False)
        is_eps = a.eps is eps or _is_like(a.eps, eps)
        same = (self.parameters, self.gate, a.groups, a.dim, a.factor)
        return is_form and is_eps and same == (other.parameters, other.gate, b.groups, b.dim, b.factor)


def _judged(module: torch.nn.Module, of: traced.Probe) -> NormModule | Refused:
    claim, cls = known(type(module)), type(module).__name__
    epsilons = {
        n: v for n, v in vars(module).items() if type(v) is float and ("eps" in n or claim and n == claim.epsilon)
    }
    first = _way(module, of, (HALF, HALF), free=epsilons)
    if isinstance(first, Refused):
        return first
    site = first.site
    if claim is not None and site.form not in (claim.form, Form(claim.form.kind)):
        return Refused(f"{cls} is known to compute {claim.form}, and computes {site.form}")
    if site.eps is None:
        return Refused("its epsilon depends on the type of what it normalizes")
    given = getattr(module, claim.epsilon, None) if claim else None
    if given is not None and not _is_like(given, site.eps):
        return Refused(f"{cls} is known to have its epsilon in {claim.epsilon}, and computes with another")
    ways = [first]

    def is_same(*types: torch.dtype, rank: int = 0, other: str = "", columns: int = 0) -> bool:
        """True if it is the same norm in another way: with another value of the epsilon's attribute, for example."""
        probe = replace(of, columns=columns) if columns else of
        way = _way(module, probe, types, rank, len(ways), epsilons | ({other: _OTHER_EPSILON} if other else {}))
        if isinstance(way, Refused) or not way.is_like(first, _OTHER_EPSILON if other else site.eps):
            return False
        ways.append(way)
        return True

    if not is_same(SINGLE, SINGLE) or not is_same(OTHER_HALF, OTHER_HALF):
        return Refused("it computes something else in another type, or with another number of rows")
    named = [n for n, v in epsilons.items() if _is_like(v, site.eps)]
    epsilon = named[0] if len(named) == 1 and is_same(HALF, HALF, other=named[0]) else ""
    autocasts = first.trace.autocasts
    mixed = [types for types in itertools.product((HALF, OTHER_HALF, SINGLE), repeat=2) if types[0] is not types[1]]
    is_mixed = not (autocasts or site.form.kind == "unit") and all(is_same(*types) for types in mixed)
    decided = frozenset[str]().union(*(way.trace.decided for way in ways))
    ranks = (of.rank,)
    if not of.behind and not decided & {"rank", "dtype"}:
        ranks = tuple(r for r in _RANKS if r == of.rank or is_same(HALF, HALF, rank=r))
    is_free = bool(epsilon) and not any("epsilon" in way.trace.decided for way in ways)
    any_columns = not of.is_fixed and is_same(HALF, HALF, columns=of.columns + 16)
    read = {(id(r.root), r.path): r for way in ways for r in way.trace.reads if not (is_free and r.path == (epsilon,))}
    return NormModule(
        site.form,
        first.parameters,
        epsilon if is_free else "",
        site.eps,
        same_type=not is_mixed,
        autocasts=autocasts,
        gate=first.gate,
        groups=site.groups,
        dim=site.dim,
        factor=site.factor,
        ranks=ranks,
        is_contiguous=any(node.target in _VIEWS for way in ways for node in way.trace.graph.graph.nodes),
        columns=None if any_columns else of.columns,
        extents=(of.columns, *(1,) * of.behind),
        watch=watched(read.values()),
    )


def _way(
    module: torch.nn.Module,
    of: traced.Probe,
    types: tuple[torch.dtype, torch.dtype],
    rank: int = 0,
    variant: int = 0,
    free: Mapping[str, float] | None = None,
) -> _Way | Refused:
    try:
        trace = traced.traced(module, of, types, rank, variant, free)
    except ForwardDeclined as why:
        return Refused(f"its forward is not straight: {why}")
    except Exception as error:  # forward is a stranger's code, which was written for other inputs
        return Refused(f"its forward cannot be traced: {type(error).__name__}: {str(error).splitlines()[0][:120]}")
    graph = trace.graph
    if any(writes(node) and op(node) is None for node in graph.graph.nodes):
        return Refused("its forward changes a tensor in place")
    sites, result = find(graph), graph.graph.output_node().args[0]
    site = next((s for s in sites if s.out is result), None)
    if site is None:
        return Refused(_why(sites, rounds_otherwise(graph)))
    parts = {name: t.target if t.op == "placeholder" else "" for name, t in site.tensors.items()}
    inputs, full = traced.required(module), [parts.pop(name) for name in ("x", "gate") if name in parts]
    if full != inputs or set(parts.values()) != trace.members:
        return Refused("it normalizes or scales by something else than its input and its parameters")
    return _Way(trace, site, tuple(sorted(parts.items())), "".join(full[1:]))


def _why(sites: list[NormSite], otherwise: str) -> str:
    if not sites:
        return otherwise or "its forward is no norm over the last dimension"
    site = sites[-1]
    before = "" if site.tensors["x"].op == "placeholder" else ", of what it computes before"
    behind = " and ".join(dict.fromkeys(title(user) for user in site.out.users if user.op != "output"))
    return f"no operator computes {site.form}{before}{behind and f', and {behind} behind it'}"


def _is_like(a: float | None, b: float | None) -> bool:
    """True if two numbers are one in float32, to which torch rounds some."""
    return a is not None and b is not None and _single(a) == _single(b)


@functools.cache
def _single(number: float) -> float:
    return torch.tensor(number, dtype=torch.float32).item()
