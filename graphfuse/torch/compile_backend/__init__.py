"""Operators in graphs that ``torch.compile`` compiles: the backend, the pass within inductor, the reports."""

from graphfuse.torch.compile_backend.compiled import CompileReport, compile_report
from graphfuse.torch.compile_backend.graph_pass import inductor_pass

__all__ = ["CompileReport", "compile_report", "inductor_pass"]
