"""examples/cudnn_samples/*.ipynb, from the scripts beside them. Run it to write them anew.

A script is in the percent format: "# %% [markdown]" begins a cell of text, whose lines are comments, and "# %%" one of
code.
"""

import json
import re
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "examples" / "cudnn_samples"
SCRIPTS = sorted(FOLDER.glob("*.py"))
COMMAND = "python tests/sample_notebooks.py"

_CELL = re.compile(r"^# %%(.*)\n", re.M)
_KINDS = {"": "code", " [markdown]": "markdown"}


def cells(text: str) -> list[tuple[str, str]]:
    """(kind, source) of each cell of a script. ValueError for what is no script of cells."""
    before, *parts = _CELL.split(text)
    if before or not parts:
        raise ValueError("a script begins with '# %%' or '# %% [markdown]'")
    return [_cell(mark, body.strip("\n")) for mark, body in zip(parts[::2], parts[1::2], strict=True)]


def _cell(mark: str, body: str) -> tuple[str, str]:
    if mark not in _KINDS:
        raise ValueError(f"'# %%{mark}' begins no cell; accepted: '# %%' and '# %% [markdown]'")
    if not body:
        raise ValueError("a cell is empty")
    kind = _KINDS[mark]
    return kind, _text(body) if kind == "markdown" else body


def _text(body: str) -> str:
    lines = body.splitlines()
    for line in lines:
        if line != "#" and not line.startswith("# "):
            raise ValueError(f"a cell of text has the line {line!r}; accepted: comments")
    return "\n".join(line[2:] for line in lines)


def render(text: str) -> str:
    """The notebook of a script, in nbformat 4.5, without outputs."""
    made = {
        "cells": [_json_cell(number, *cell) for number, cell in enumerate(cells(text))],
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(made, indent=1, ensure_ascii=False) + "\n"


def _json_cell(number: int, kind: str, source: str) -> dict[str, object]:
    cell = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": source.splitlines(keepends=True)}
    return cell | {"execution_count": None, "outputs": []} if kind == "code" else cell


if __name__ == "__main__":
    for script in SCRIPTS:
        script.with_suffix(".ipynb").write_text(render(script.read_text()))
    for notebook in FOLDER.glob("*.ipynb"):
        if not notebook.with_suffix(".py").exists():
            notebook.unlink()
