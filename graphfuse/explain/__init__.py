"""Accounts of how a graph was planned, as data and in several formats.

``explained`` makes an ``Explanation`` from a planner. ``text``, ``tree``, ``json``, ``mermaid``, ``dot``, ``svg`` and
``html`` format it. Users get explanations from ``pygraph.explanation`` and ``graphfuse.functional.explain``.
"""

from collections.abc import Callable, Mapping

from graphfuse.explain.account import Account
from graphfuse.explain.builder import explained
from graphfuse.explain.explanation import Explanation
from graphfuse.explain.fallback import fallback
from graphfuse.explain.graphviz import dot, svg
from graphfuse.explain.mermaid import mermaid
from graphfuse.explain.page import html
from graphfuse.explain.record import json
from graphfuse.explain.text import text
from graphfuse.explain.tree import plain_tree, tree

FORMATS: Mapping[str, Callable[[Account], str]] = {
    "text": text,
    "tree": plain_tree,
    "json": json,
    "svg": svg,
    "mermaid": mermaid,
    "dot": dot,
    "html": html,
}
"""Functions from an account to text, by the name of the format."""

__all__ = [
    "FORMATS",
    "Account",
    "Explanation",
    "dot",
    "explained",
    "fallback",
    "html",
    "json",
    "mermaid",
    "svg",
    "text",
    "tree",
]
