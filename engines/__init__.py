"""First-party engines, in order of preference."""

from graphfuse.engines.reference import ReferenceEngine

ALL = (ReferenceEngine(),)
