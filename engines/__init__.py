"""First-party engines, in order of preference."""

from graphfuse.engines.reference import ReferenceEngine
from graphfuse.engines.rmsnorm import RmsNormEngine

ALL = (RmsNormEngine(), ReferenceEngine())
