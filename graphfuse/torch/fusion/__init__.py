"""Norms, rotations and what stands around them, found in FX graphs and replaced by operators of ``graphfuse.torch``.

`match` finds sites in an FX graph, and `rewrite` replaces them there. What a norm computes is a `form`, and a table
there says which operator computes it. `module` asks whether a module is a norm. ``whole_models`` and
``compile_backend`` use both.
"""

from graphfuse.torch.fusion.match import find
from graphfuse.torch.fusion.report import Entry, FuseReport
from graphfuse.torch.fusion.rewrite import rewrite
from graphfuse.torch.fusion.site import NormSite

__all__ = ["Entry", "FuseReport", "NormSite", "find", "rewrite"]
