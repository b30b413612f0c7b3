"""cuDNN's engines, through its own frontend: the translation of nodes, and the engine that runs them.

Nothing here imports the package ``cudnn`` (nvidia-cudnn-frontend, extra ``cudnn``) before the engine is used.
"""

from graphfuse.engines.cudnn.engine import CudnnEngine
from graphfuse.engines.cudnn.package import load
from graphfuse.engines.cudnn.support import why_not
from graphfuse.engines.cudnn.translation import Translation, translate

__all__ = ["CudnnEngine", "Translation", "load", "translate", "why_not"]
