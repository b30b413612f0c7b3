"""Checking plug-ins: ``check(graph_or_plugin)`` runs what an engine makes against the reference and under sanitizers.

It needs a C++ compiler; NVRTC and a GPU add to it, and the report says what was left out without them. It does not
prove that a kernel is right: it looks at many small problems, as a careful author would.
"""

from graphfuse.testing.checking import check
from graphfuse.testing.report import Finding, Line, Report

__all__ = ["Finding", "Line", "Report", "check"]
