"""One-kernel functions of RMSNorm over ranks: of a sum over ranks, or written to all ranks.

Such a function has tables of peers (``symmetric``) as arguments. It reads or writes the memory that contains its
arguments on all ranks.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import distributed

from graphfuse.base.dtypes import data_type
from graphfuse.base.errors import VariantPackError, VariantPackTypeError
from graphfuse.functional.call import AcceptedCall
from graphfuse.functional.declaration import Function, Variant
from graphfuse.functional.function import entry
from graphfuse.functional.graph_builder import GraphBuilder
from graphfuse.functional.norms import WEIGHT
from graphfuse.functional.tensor_parameter import (
    FLOAT,
    FLOATS,
    FORMATS,
    TensorParameter,
    like,
    one,
    type_of,
    types,
)
from graphfuse.ops.collectives import MOST_RANKS, peers_length

REST = ("eps", "out", "scale", "enable_pdl")
DEFAULTS = {"eps": 1e-6, "out": None, "scale": None, "enable_pdl": None}


def _build(d: GraphBuilder) -> None:
    x = d.graph.all_reduce(d["x"], d["peers"], **d.options) if "peers" in d else d["x"]
    if "residual" in d:
        x = d.store_read("residual", d.graph.add(x, d["residual"]))
    y = d.norm(x)
    y = d.graph.mul(y, d.graph.reciprocal(d["scale"])) if "scale" in d else y
    d.store("out", d.graph.all_gather(y, d["out_peers"], **d.options) if "out_peers" in d else y)


_LENGTHS = tuple((peers_length(ranks),) for ranks in range(1, MOST_RANKS + 1))
PEERS = TensorParameter("peers", types(data_type.INT64), lambda shapes: _LENGTHS)


def _variant(tensors: tuple[str, ...]) -> Variant:
    gathered = "out_peers" in tensors
    every = (
        TensorParameter("x", FLOATS),
        TensorParameter("residual", FLOATS, like("x"), written=True),
        TensorParameter(WEIGHT.name, FLOATS, lambda shapes: (shapes["x"][-1:],)),
        PEERS,
        replace(PEERS, name="out_peers"),
        TensorParameter("scale", FLOAT, one, optional=True),
        TensorParameter("out", FORMATS, like("x"), written=True, new=None if gathered else type_of("x")),
    )
    return Variant(tuple(a for a in every if a.name in (*tensors, "scale", "out")), _build)


def declare(name: str, *tensors: str) -> Function:
    """RMSNorm of x; with `peers`, of its sum over ranks; with `residual`, of the sum with that, which is written to it.
    With `out_peers`, out is written on all ranks. tensors: the function's own, in order. Without peers it is a function
    of one rank."""
    rank = ("rank",) if {"peers", "out_peers"} & {*tensors} else ()
    return Function(name, (*tensors, *rank, *REST), DEFAULTS, rank, _variant(tensors), ("out",))


def eager(f: Function) -> Callable[..., Any]:
    """The function of plain tensors, bypassing torch's dispatcher."""
    name = f.name

    def refused(*values: object) -> NoReturn:
        raise VariantPackTypeError(
            f"{name} is called with tensors of a class of their own, or under a mode that looks at operators; "
            "accepted: plain tensors, and torch.compile"
        )

    return entry(f, refused)


def group_of(group: object) -> distributed.ProcessGroup:
    """The given group, or that of all ranks for None. Raises VariantPackError if there is none."""
    if not distributed.is_available() or not distributed.is_initialized():
        raise VariantPackError("group is not initialized; accepted: after torch.distributed.init_process_group")
    found = distributed.group.WORLD if group is None else group
    if not isinstance(found, distributed.ProcessGroup):
        raise VariantPackTypeError(f"group is {type(found).__name__}; accepted: ProcessGroup, None")
    return found


def rank_part(name: str, t: object, dim: int, group: distributed.ProcessGroup) -> torch.Tensor:
    """View of a rank's part of a tensor that is divided equally among ranks along a dimension."""
    if not isinstance(t, torch.Tensor):
        raise VariantPackTypeError(f"{name} must be a torch tensor, got {type(t).__name__}")
    last = t.dim() - 1
    if type(dim) is not int or not -t.dim() <= dim < last or dim == -1:
        accepted = f"{-t.dim()} to {last - 1} but for -1" if last > 0 else "none, as there is one"
        raise VariantPackError(f"dim is {dim!r}; accepted: {accepted}, as {name} has {t.dim()} dimensions")
    ranks = group.size()
    if t.shape[dim] % ranks:
        raise VariantPackError(
            f"{name} has shape {tuple(t.shape)}; accepted: a multiple of {ranks} along dim {dim}, as there are as many "
            "ranks"
        )
    length = t.shape[dim] // ranks
    return t.narrow(dim, group.rank() * length, length)


def check_call(f: Function, *values: object) -> None:
    """Raises the errors of a call before any communication. values: parameters of f, the function of one rank, in
    order."""
    AcceptedCall.of(f, dict(zip(f.parameters, values, strict=True)))
