"""Models made of norms and residual sums, and graphs of them, with operators of ``graphfuse.torch`` in their place.

`model` replaces in a torch.nn.Module, in place; `match` finds sites in an FX graph, and `rewrite` replaces them there.
What a norm computes is a `form`, and a table there says which operator computes it. `backend` does that for
``torch.compile``, and `graph_pass` within inductor.
"""

from graphfuse.torch.fusion.compiled import CompileReport, compile_report
from graphfuse.torch.fusion.graph_pass import inductor_pass
from graphfuse.torch.fusion.hub import kernel_mapping
from graphfuse.torch.fusion.match import find
from graphfuse.torch.fusion.model import fuse, unfuse
from graphfuse.torch.fusion.report import Entry, Report
from graphfuse.torch.fusion.rewrite import rewrite
from graphfuse.torch.fusion.site import Site

__all__ = [
    "CompileReport",
    "Entry",
    "Report",
    "Site",
    "compile_report",
    "find",
    "fuse",
    "inductor_pass",
    "kernel_mapping",
    "rewrite",
    "unfuse",
]
