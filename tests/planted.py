"""Kernels with a planted bug, for what has to find it."""

import re


def wrong(source: str) -> str:
    """A kernel's source with an epilogue that gives twice the value."""
    text, count = re.subn(r"(struct Epilogue \{.*?return )(x\d+;)", r"\g<1>2.0f * \2", source, flags=re.DOTALL)
    assert count == 1
    return text
