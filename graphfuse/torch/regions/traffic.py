"""Bytes that regions move."""

from __future__ import annotations

from collections.abc import Collection

from torch.fx import Node

from graphfuse.torch.analysis import inductor
from graphfuse.torch.analysis.meaning import hint, recorded_result, tensors


def traffic(nodes: Collection[Node], inputs: Collection[Node], outputs: Collection[Node]) -> str:
    """Bytes that nodes move as one kernel, and as one kernel each, in words, for an element of the largest tensor that
    they read."""
    together = sum(map(_bytes, (*inputs, *outputs)))
    separate = sum(_bytes(n) + sum(map(_bytes, n.all_input_nodes)) for n in nodes if not inductor.is_free(n))
    elements = max(1, *(sum(hint(t.numel()) for t in tensors(recorded_result(node))) for node in inputs))
    return f"{together / elements:.3g} bytes an element, {separate / elements:.3g} by its operations one by one"


def _bytes(node: Node) -> int:
    return sum(hint(t.numel()) * t.dtype.itemsize for t in tensors(recorded_result(node)))
