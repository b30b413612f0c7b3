"""Whether a module is a norm that an operator computes, from the graph of its own forward."""

import functools
import inspect
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from graphfuse.torch.fusion import traced
from graphfuse.torch.fusion.form import OPERATORS, Form, Serving
from graphfuse.torch.fusion.known import known
from graphfuse.torch.fusion.match import find, rounds_otherwise
from graphfuse.torch.fusion.meaning import is_op, op, writes
from graphfuse.torch.fusion.site import Site
from graphfuse.torch.modules import LayerNorm, RMSNorm


@dataclass(frozen=True)
class Norm:
    """A module that is a norm.

    parameters: their names, by those of the operator's arguments. epsilon: the attribute that has it; "" where it is a
    constant of forward. eps: its value. same_type: whether a weight of another type than x would change the type of the
    result. autocasts: whether autocast would. gate: the argument of forward that is one. groups, dim, factor: as of
    ``Site``. rank: of x, where forward counts dimensions from the first; else None. constants: other attributes, which
    forward may read.
    """

    form: Form
    parameters: tuple[tuple[str, str], ...]
    epsilon: str
    eps: float
    same_type: bool
    autocasts: bool
    gate: str = ""
    groups: int = 1
    dim: int = -1
    rank: int | None = None
    factor: float | None = None
    constants: tuple[tuple[str, object], ...] = ()

    @property
    def serving(self) -> Serving:
        return OPERATORS[self.form]


@dataclass(frozen=True)
class Refused:
    """Why a module that looks like a norm is none that is replaced."""

    reason: str

    def __str__(self) -> str:
        return self.reason


def recognized(module: torch.nn.Module) -> Norm | Refused | None:
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
    found = _judged(module, probe.shape)
    return found if is_called_norm or not isinstance(found, Refused) else None


def _may_be(cls: type) -> bool:
    """torch's own modules are what their names say."""
    return not cls.__module__.startswith("torch.") or cls in (torch.nn.RMSNorm, torch.nn.LayerNorm)


def _judged(module: torch.nn.Module, shape: tuple[int, ...]) -> Norm | Refused:
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    if code is not None and "training" in code.co_names:
        return Refused("its forward asks whether it is training")
    try:
        trace = traced.traced(module, shape)
    except Exception as error:  # forward is a stranger's code, which was written for other inputs
        return Refused(f"its forward cannot be traced: {type(error).__name__}: {str(error).splitlines()[0][:120]}")
    graph = trace.graph
    if any(writes(node) and op(node) is None for node in graph.graph.nodes):
        return Refused("its forward changes a tensor in place")
    sites, result = find(graph), graph.graph.output_node().args[0]
    site = next((s for s in sites if s.out is result), None)
    if site is None:
        return Refused(_why(sites, rounds_otherwise(graph)))
    parts = {name: trace.names.get(t.name) for name, t in site.tensors.items()}
    inputs = traced.required(module)
    given = [parts.pop("x"), *([parts.pop("gate")] if "gate" in parts else ())]
    if given != inputs or None in parts.values() or set(parts.values()) & set(inputs):
        return Refused("it normalizes or scales by something else than its input and its parameters")
    found = _named(module, site, tuple(sorted(parts.items())), trace.autocasts)
    counts = site.dim != -1 or any(_counts_from_the_first(node, len(shape)) for node in graph.graph.nodes)
    return _more(module, site, found, given[1:], len(shape) if counts else None) if isinstance(found, Norm) else found


def _counts_from_the_first(node: Node, rank: int) -> bool:
    """Whether a reduction names the last dimension of `rank` by its number."""
    found = is_op(node, "mean", "sum", "var", "var_mean", "length", "normalize")
    return found is not None and rank - 1 in next((d for d in found.args[1:] if isinstance(d, list | tuple)), ())


def _more(module: torch.nn.Module, site: Site, norm: Norm, gate: list[str], rank: int | None) -> Norm:
    """With what its operator does not know of."""
    constants = tuple(
        (n, v)
        for n, v in vars(module).items()
        if type(v) in (int, float, bool, str) and n not in ("training", norm.epsilon)
    )
    return replace(
        norm,
        gate="".join(gate),
        groups=site.groups,
        dim=site.dim,
        rank=rank,
        factor=site.factor,
        constants=constants,
        same_type=norm.same_type or site.form.kind == "unit",
    )


def _why(sites: list[Site], otherwise: str) -> str:
    if not sites:
        return otherwise or "its forward is no norm over the last dimension"
    site = sites[-1]
    before = "" if site.tensors["x"].op == "placeholder" else ", of what it computes before"
    return f"no operator computes {site.form}{before}{f', {site.left}' if site.left else ', and what follows'}"


def _named(
    module: torch.nn.Module, site: Site, parameters: tuple[tuple[str, str], ...], autocasts: bool
) -> Norm | Refused:
    claim, cls = known(type(module)), type(module).__name__
    form = site.form
    if claim is not None and form not in (claim.form, _without_weight(claim.form)):
        return Refused(f"{cls} is known to compute {claim.form}, and computes {form}")
    epsilon = _attribute(module, site, claim.epsilon if claim else "")
    if epsilon is None:
        return Refused(f"{cls} is known to have its epsilon in {claim.epsilon}, and computes with another")
    if site.eps is None or epsilon and getattr(module, epsilon) is None:
        if not _is_like(site.eps, torch.finfo(torch.float32).eps):
            return Refused("its epsilon depends on the type of what it normalizes")
    # A product of what was rounded has the wider of two types; torch's own functions have rules of their own.
    return Norm(form, parameters, epsilon, site.eps, same_type=form.rounded or autocasts, autocasts=autocasts)


def _without_weight(form: Form) -> Form:
    return Form(form.kind)


def _attribute(module: torch.nn.Module, site: Site, claimed: str) -> str | None:
    """The attribute that the epsilon is in; "" where none is, None where it is not in the one claimed."""
    if claimed:
        value = getattr(module, claimed, None)
        return claimed if value is None or _is_like(value, site.eps) else None
    found = [n for n, v in vars(module).items() if isinstance(v, float) and "eps" in n and _is_like(v, site.eps)]
    return found[0] if len(found) == 1 else ""


def _is_like(a: float | None, b: float | None) -> bool:
    """Whether two numbers are one in float32, to which torch rounds some."""
    return a is not None and b is not None and _single(a) == _single(b)


@functools.cache
def _single(number: float) -> float:
    return torch.tensor(number, dtype=torch.float32).item()
