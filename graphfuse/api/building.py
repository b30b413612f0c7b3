"""``graph``, ``jit`` and ``graph_cache`` of the cuDNN frontend: functions that build graphs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from graphfuse.api import pygraph
from graphfuse.api.checks import modes
from graphfuse.base.dtypes import data_type
from graphfuse.base.enums import heur_mode
from graphfuse.base.errors import GraphTypeError
from graphfuse.op_graph.tensor import Tensor
from graphfuse.runtime.bounded_dict import make_room

if TYPE_CHECKING:
    from graphfuse.runtime.handle import Handle

P = ParamSpec("P")
T = TypeVar("T")


@contextmanager
def graph(
    handle: Handle | None,
    name: str = "cudnn_graph",
    io_data_type: object = data_type.HALF,
    intermediate_data_type: object = data_type.FLOAT,
    compute_data_type: object = data_type.FLOAT,
    **graph_arguments: Any,
) -> Iterator[tuple[pygraph, list[Tensor]]]:
    """A new graph and an empty list for tensors, as ``jit`` returns them: ``with graph(handle) as (g, tensors)``.

    name: the graph's. io_data_type, intermediate_data_type, compute_data_type, graph_arguments: as in ``pygraph``.
    """
    types = (io_data_type, intermediate_data_type, compute_data_type)
    yield pygraph(name, *types, handle, **graph_arguments), []


def jit(
    heur_modes: heur_mode | Sequence[heur_mode] = heur_mode.A,
) -> Callable[[Callable[P, tuple[pygraph, Sequence[Tensor]]]], Callable[P, tuple[pygraph, list[int]]]]:
    """Decorator of a function that returns a graph and some of its tensors.

    The graph is built in these modes unless it has plans. The decorated function returns the graph and the tensors'
    uids."""
    chosen = modes("jit: heur_modes", heur_modes)

    def decorate(function: Callable[P, tuple[pygraph, Sequence[Tensor]]]) -> Callable[P, tuple[pygraph, list[int]]]:
        @functools.wraps(function)
        def built(*args: P.args, **kwargs: P.kwargs) -> tuple[pygraph, list[int]]:
            g, tensors = function(*args, **kwargs)
            if not g.get_execution_plan_count():
                g.build(chosen)
            return g, [t.get_uid() for t in tensors]

        return built

    return decorate


def graph_cache(key_fn: Callable[P, object], maxsize: int = 256) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorator that caches a function's results. key_fn: makes the key of the arguments. maxsize: the newest results
    that are kept."""
    if isinstance(maxsize, bool) or not isinstance(maxsize, int) or maxsize < 1:
        raise GraphTypeError(f"graph_cache: maxsize must be an int >= 1, got {maxsize!r}")

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        kept: dict[object, T] = {}

        @functools.wraps(function)
        def cached(*args: P.args, **kwargs: P.kwargs) -> T:
            key = key_fn(*args, **kwargs)
            if key in kept:
                return kept[key]
            made = function(*args, **kwargs)
            make_room(kept, maxsize)
            kept[key] = made
            return made

        return cached

    return decorate
