"""Checking plug-ins: ``check(graph_or_plugin)`` runs an engine's work against the reference and under sanitizers.

It needs a C++ compiler. NVRTC and a GPU add checks; the report says what was left out without them. Passing is not a
proof: the check looks at many small problems, as a careful author would.
"""

from graphfuse.testing.checking import check
from graphfuse.testing.report import Finding, Line, Report

__all__ = ["Finding", "Line", "Report", "check"]
