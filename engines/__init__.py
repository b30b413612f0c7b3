"""First-party engines, in order of preference."""

from graphfuse.engines.reference import ReferenceEngine
from graphfuse.engines.rmsnorm import RmsNormEngine

if __name__ != "graphfuse.engines":  # found on the path in the repository's root: all would exist twice
    raise ImportError("this folder is installed under another name: import graphfuse.engines")

ALL = (RmsNormEngine(), ReferenceEngine())
