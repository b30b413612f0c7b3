"""FX graphs and forwards of modules: what their nodes mean, what stands around them, what running source shows.

``regions`` finds there what is one kernel; ``whole_models`` and ``compile_backend`` put that in place.
"""

from graphfuse.torch.analysis.report import Entry, FuseReport

__all__ = ["Entry", "FuseReport"]
