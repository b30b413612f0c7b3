"""First-party patterns."""

from graphfuse.patterns import epilogues, pointwise, rows

if __name__ != "graphfuse.patterns":  # found on the path in the repository's root: all would exist twice
    raise ImportError("this folder is installed under another name: import graphfuse.patterns")

ALL = (rows.PATTERN, pointwise.PATTERN, epilogues.PATTERN)

OF_ENGINES = {"cudnn": (epilogues.NORMS,)}
"""By the name of an engine: the patterns that are there for it alone."""
