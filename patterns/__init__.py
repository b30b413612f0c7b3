"""First-party patterns. Of matches that cover equally many nodes, the earlier pattern's is taken."""

from graphfuse.patterns import rmsnorm, rmsnorm_silu

ALL = (rmsnorm_silu.PATTERN, rmsnorm.PATTERN)
