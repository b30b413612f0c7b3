"""First-party engines, in order of preference."""

from graphfuse.engines.reference import ReferenceEngine
from graphfuse.engines.rows.across import AcrossEngine
from graphfuse.engines.rows.by_row import RmsNormEngine
from graphfuse.engines.rows.persistent import RmsNormBackwardEngine

if __name__ != "graphfuse.engines":  # found on the path in the repository's root: all would exist twice
    raise ImportError("this folder is installed under another name: import graphfuse.engines")

ALL = (RmsNormBackwardEngine(), RmsNormEngine(), AcrossEngine(), ReferenceEngine())
