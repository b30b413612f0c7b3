"""Whole models: ``fuse``, the backend of ``torch.compile``, the pass within inductor, the provider for ``kernels``."""

from graphfuse.torch.models.compiled import CompileReport, compile_report
from graphfuse.torch.models.graph_pass import inductor_pass
from graphfuse.torch.models.hub import kernel_mapping
from graphfuse.torch.models.model import fuse, unfuse

__all__ = ["CompileReport", "compile_report", "fuse", "inductor_pass", "kernel_mapping", "unfuse"]
