"""Checks of plug-ins: ``check(graph_or_plugin)`` compares an engine with the reference, also under sanitizers.

It requires a C++ compiler. NVRTC and a GPU add checks; without them the report says what was omitted. Passing is not a
proof: the check runs many small problems, as a careful author would.
"""

from graphfuse.testing.checking import check
from graphfuse.testing.report import Finding, Line, Report

__all__ = ["Finding", "Line", "Report", "check"]
