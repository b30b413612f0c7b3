"""Kernels with a planted bug, for what has to find it."""

import re


def wrong(source: str) -> str:
    """A row kernel's source with twice the value that the phase after the norm computes last."""
    before, found, after = source.partition("struct Phase<1> {")
    text, count = re.subn(r"(a\d+\[i\] = )(v\d+;)", r"\g<1>2.0f * \2", after, count=1)
    assert found and count == 1
    return before + found + text
