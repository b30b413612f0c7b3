"""Models made of norms and residual sums, and graphs of them, with operators of ``graphfuse.torch`` in their place.

`model` replaces in a torch.nn.Module, in place; `match` finds sites in an FX graph, and `rewrite` replaces them there.
What a norm computes is a `form`, and a table there says which operator computes it.
"""

from graphfuse.torch.fusion.hub import kernel_mapping
from graphfuse.torch.fusion.match import Site, find
from graphfuse.torch.fusion.model import fuse, unfuse
from graphfuse.torch.fusion.report import Entry, Report
from graphfuse.torch.fusion.rewrite import rewrite

__all__ = ["Entry", "Report", "Site", "find", "fuse", "kernel_mapping", "rewrite", "unfuse"]
