"""How the site shows docstrings: an extension of griffe, which mkdocs loads by its path."""

import sys
from pathlib import Path
from typing import Any

import griffe

sys.path.insert(0, str(Path(__file__).parent))
from docstrings import listed  # noqa: E402


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
