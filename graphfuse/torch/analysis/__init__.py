"""Analysis of FX graphs and of modules' forwards: what nodes mean, what surrounds them, what source code does when it
runs.

``regions`` finds in them what one kernel can compute. ``whole_models`` and ``compile_backend`` put the kernels in
place.
"""

from graphfuse.torch.analysis.report import Entry, FuseReport

__all__ = ["Entry", "FuseReport"]
