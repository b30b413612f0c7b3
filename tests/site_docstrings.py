"""How the site shows docstrings: what they say of parameters and fields, as a list. An extension of griffe.

Docstrings of this project are prose, in which "name: ..." begins what is said of a parameter or field.
"""

import re
from collections.abc import Collection
from typing import Any

import griffe


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
    items = [f"- **{names.replace('_', chr(92) + '_')}**: {text.strip()}" for names, text in said]
    return "\n\n".join(filter(None, (before.strip(), "\n".join(items))))


class Parameters(griffe.Extension):
    """Lists what docstrings of functions and classes say of parameters and fields."""

    def on_function_instance(self, *, func: griffe.Function, **kwargs: Any) -> None:
        if func.docstring:
            func.docstring.value = listed(func.docstring.value, {p.name for p in func.parameters} - {"self"})

    def on_class_members(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        if cls.docstring:
            init = cls.members.get("__init__")
            given = {p.name for p in getattr(init, "parameters", ())} - {"self"}
            fields = {name for name, member in cls.members.items() if member.is_attribute}
            cls.docstring.value = listed(cls.docstring.value, given | fields)
