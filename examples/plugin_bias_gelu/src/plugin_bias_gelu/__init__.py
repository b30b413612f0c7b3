"""bias -> GELU as one kernel, for graphfuse."""

from plugin_bias_gelu.engine import ENGINE
from plugin_bias_gelu.pattern import PATTERN

__all__ = ["ENGINE", "PATTERN"]
