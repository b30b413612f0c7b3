"""First-party patterns."""

from graphfuse.patterns import rows

if __name__ != "graphfuse.patterns":  # found on the path in the repository's root: all would exist twice
    raise ImportError("this folder is installed under another name: import graphfuse.patterns")

ALL = (rows.PATTERN,)
