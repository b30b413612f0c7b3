"""Docstrings as Markdown: what they say of parameters and fields, as a list.

Docstrings of this project are prose, in which "name: ..." begins what is said of a parameter or field.
"""

import re
from collections.abc import Collection


def listed(text: str, names: Collection[str]) -> str:
    """A docstring with an item for each "name: ..." of these names, at the start of a sentence."""
    if not names:
        return text
    name = "|".join(sorted(map(re.escape, names), key=len, reverse=True))
    begins = re.compile(rf"(?:\A|(?<=\n)|(?<=[.;)]\s))((?:{name})(?:(?:, | and )(?:{name}))*):\s")
    return "\n\n".join(_items(begins, paragraph) for paragraph in text.split("\n\n"))


def _items(begins: re.Pattern[str], paragraph: str) -> str:
    before, *rest = begins.split(paragraph)
    if not rest:
        return paragraph
    said = zip(rest[::2], rest[1::2], strict=True)
    items = [f"- **{names}**: {' '.join(text.split())}" for names, text in said]
    return "\n\n".join(filter(None, (before.strip(), "\n".join(items))))
