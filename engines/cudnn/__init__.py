"""Nodes said to cuDNN's own frontend: which it can be told, and how.

Nothing here imports the package ``cudnn`` (nvidia-cudnn-frontend, extra ``cudnn``) before it is asked for.
"""

from graphfuse.engines.cudnn.package import load
from graphfuse.engines.cudnn.support import why_not
from graphfuse.engines.cudnn.translation import Translation, translate

__all__ = ["Translation", "load", "translate", "why_not"]
