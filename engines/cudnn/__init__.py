"""cuDNN's engines, by its own frontend: which nodes it can be told and how, and the engine that has them run.

Nothing here imports the package ``cudnn`` (nvidia-cudnn-frontend, extra ``cudnn``) before it is asked for.
"""

from graphfuse.engines.cudnn.engine import CudnnEngine
from graphfuse.engines.cudnn.package import load
from graphfuse.engines.cudnn.support import why_not
from graphfuse.engines.cudnn.translation import Translation, translate

__all__ = ["CudnnEngine", "Translation", "load", "translate", "why_not"]
