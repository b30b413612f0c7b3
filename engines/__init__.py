"""First-party engines, in order of preference."""

from graphfuse.engines.cudnn import CudnnEngine
from graphfuse.engines.reference import ReferenceEngine
from graphfuse.engines.rows import RowEngine
from graphfuse.engines.torch_calls import TorchEngine

if __name__ != "graphfuse.engines":  # found on the path in the repository's root: all would exist twice
    raise ImportError("this folder is installed under another name: import graphfuse.engines")

ALL = (RowEngine(), CudnnEngine(), TorchEngine(), ReferenceEngine())

LIBRARIES = frozenset({"cudnn"})
"""Engines of libraries that take long to load and to ask: unless they are named, or the environment says "on", they are
asked about nodes alone that no engine of another pattern takes."""
