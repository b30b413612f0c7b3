"""First-party patterns. Of matches that cover equally many nodes, the earlier pattern's is taken."""

from graphfuse.patterns import rmsnorm, rmsnorm_backward, rmsnorm_silu

if __name__ != "graphfuse.patterns":  # found on the path in the repository's root: all would exist twice
    raise ImportError("this folder is installed under another name: import graphfuse.patterns")

ALL = (rmsnorm_silu.PATTERN, rmsnorm.PATTERN, rmsnorm_backward.PATTERN)
