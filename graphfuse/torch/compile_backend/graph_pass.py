"""A pass over inductor's graphs, for users who already compile with inductor.

It runs after AOT autograd, where forward and backward are separate graphs. It does not change a forward whose
intermediate values backward keeps. ``torch.compile(backend="graphfuse")`` can replace more.
"""

import functools
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

from torch.fx import Graph

import graphfuse
from graphfuse.base.errors import SettingError
from graphfuse.runtime import torch_private
from graphfuse.torch.compile_backend import compiled_graphs
from graphfuse.torch.regions.operator import FROM_INDUCTOR

Pass = Callable[..., None]


def inductor_pass() -> Pass:
    """Pass for ``torch._inductor.config.post_grad_custom_pre_pass``, or for the option of that name of
    ``torch.compile``. It first runs the pass that is set there now, and then replaces norms. ``compile_report``
    describes the result.

    It is a ``CustomGraphPass``: its ``uuid()`` is in the keys of inductor's disk cache. The uuid changes with the
    version of graphfuse and with the uuid of the pass that runs first. If that pass has no uuid, inductor caches
    nothing.
    """
    return make_pass(torch_private.inductor_setting("post_grad_custom_pre_pass"), replaces=True)


def make_pass(first: object, replaces: bool) -> Pass:
    """Pass that runs `first` (one pass, several or None), and then replaces sites if `replaces`."""
    passes = () if first is None else tuple(first) if isinstance(first, list | tuple) else (first,)
    if not all(callable(p) for p in passes):
        raise SettingError(f"post_grad_custom_pre_pass is {first!r}; accepted: a CustomGraphPass, a function or None")
    return _class()(passes, replaces)


@functools.cache
def _class() -> type:
    """Class of the pass. It is made when first needed, as inductor has its base class. Inductor then learns how to call
    regions."""
    base, aware = torch_private.graph_pass_classes()
    torch_private.call_from_inductor(FROM_INDUCTOR)

    class GraphPass(base):  # type: ignore[misc, valid-type]
        def __init__(self, first: Sequence[Pass], replaces: bool) -> None:
            self._first, self._replaces = first, replaces

        def __call__(self, graph: Graph, is_inference: bool = True) -> None:
            for one in self._first:
                if isinstance(one, aware):
                    one(graph, is_inference)
                else:
                    one(graph)
            if self._replaces:
                entries = compiled_graphs.replace_in(graph.owning_module, declines=True)
                if entries:  # most graphs of backward have none
                    compiled_graphs.add_report(", in inductor", entries)

        def uuid(self) -> tuple[object, ...] | None:
            theirs = [one.uuid() if hasattr(one, "uuid") else None for one in self._first]
            if not all(theirs):
                return None
            return "graphfuse", graphfuse.__version__, _digest(), self._replaces, *theirs

    return GraphPass


@functools.cache
def _digest() -> str:
    """Digest of all code that decides what is replaced, by what, and how that is called: matching, costs, operators."""
    digest = hashlib.sha256()
    for path in (*sorted(Path(__file__).parents[1].rglob("*.py")), Path(torch_private.__file__)):
        digest.update(path.read_bytes())
    return digest.hexdigest()
