"""cuDNN as an engine, through its Python frontend: the translation of nodes, and the engine that runs them.

The package ``cudnn`` (nvidia-cudnn-frontend, extra ``cudnn``) is imported when the engine is first used.
"""

from graphfuse.engines.cudnn.engine import CudnnEngine
from graphfuse.engines.cudnn.package import load
from graphfuse.engines.cudnn.support import why_not
from graphfuse.engines.cudnn.translation import Translation, translate

__all__ = ["CudnnEngine", "Translation", "load", "translate", "why_not"]
