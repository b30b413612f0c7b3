"""bias -> GELU as one kernel, for graphfuse."""

from .engine import ENGINE
from .pattern import PATTERN

__all__ = ["ENGINE", "PATTERN"]
