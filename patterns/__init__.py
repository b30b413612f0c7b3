"""First-party patterns."""

from graphfuse.patterns import epilogues, pointwise, rows

if __name__ != "graphfuse.patterns":  # imported by path from the repository's root: all classes would exist twice
    raise ImportError("this folder is installed under another name: import graphfuse.patterns")

ALL = (rows.PATTERN, pointwise.PATTERN, epilogues.PATTERN)

OF_ENGINES = {"cudnn": (epilogues.NORMS,)}
"""Engine name -> patterns that only this engine uses."""
