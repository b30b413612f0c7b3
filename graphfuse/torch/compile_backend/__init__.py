"""Integration with ``torch.compile``: the backend, the pass in inductor, and reports on what they replaced."""

from graphfuse.torch.compile_backend.compiled_graphs import CompileReport, compile_report
from graphfuse.torch.compile_backend.graph_pass import inductor_pass

__all__ = ["CompileReport", "compile_report", "inductor_pass"]
