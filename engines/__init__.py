"""First-party engines, in order of preference."""

from graphfuse.engines.cudnn import CudnnEngine
from graphfuse.engines.reference import ReferenceEngine
from graphfuse.engines.rows import RowEngine
from graphfuse.engines.torch_calls import TorchEngine

if __name__ != "graphfuse.engines":  # imported from the repository's root, so all classes would exist twice
    raise ImportError("this folder is installed under another name: import graphfuse.engines")

ALL = (RowEngine(), CudnnEngine(), TorchEngine(), ReferenceEngine())

LIBRARIES = frozenset({"cudnn"})
"""Engines of libraries, which are slow to load and to query. Unless they are named, or a setting is "on", they are
queried only for nodes that no engine of another pattern accepts."""
