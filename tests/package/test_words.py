"""The product's words: a class name means one thing, and a docstring says what is returned before anything else."""

import ast
import collections
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WITHOUT_A_HEAD = {
    *("As", "By", "For", "From", "How", "In", "Nor", "Of", "So", "That", "Those", "What", "When", "Where", "Whether"),
    *("Which", "Who", "Whose", "With"),
}
"""Words that a docstring does not begin with: a relative clause or a genitive, without what it belongs to."""
OURS = ("crooked", "sandwich")
"""Words that no other project has for these things. Public functions keep their names."""
ODD = ("dear", "nobody", "spelled", "told", "turned", "twins", "whoever")
"""Words that docstrings and comments do without: a plain one says more."""
MANY = 6
"""A record with more fields than this says each on a line of its own."""


def sources() -> Iterator[tuple[Path, str]]:
    for folder in ("graphfuse", "engines", "patterns"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if "plugin_template" not in path.parts:
                yield path.relative_to(ROOT), path.read_text()


def documented() -> Iterator[tuple[str, ast.AST, str]]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path, text in sources():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, kinds) and (said := ast.get_docstring(node)):
                yield f"{path}:{getattr(node, 'lineno', 1)} {getattr(node, 'name', '')}", node, said


def test_no_class_name_stands_twice():
    places = collections.defaultdict(list)
    for path, text in sources():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path}:{node.lineno}")
    assert len(places) > 200
    assert not {name: found for name, found in places.items() if len(found) > 1}


def test_docstrings_begin_with_what_is_returned():
    found = [f"{place}: {said.splitlines()[0]}" for place, _, said in documented() if said.split()[0] in WITHOUT_A_HEAD]
    assert not found, "a docstring begins with the noun or verb of what is returned (CONTRIBUTING.md)"


def test_prose_has_plain_words():
    odd = re.compile(rf"\b({'|'.join(ODD)})\b")
    found = [f"{place}: {match[0]}" for place, _, said in documented() for match in odd.finditer(said)]
    for path, text in sources():
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        comments = ((t.start[0], t.string) for t in tokens if t.type == tokenize.COMMENT)
        found += [f"{path}:{line}: {match[0]}" for line, said in comments for match in odd.finditer(said)]
    assert not found


def test_fields_of_large_records_have_a_line_each():
    found = []
    for place, node, said in documented():
        names = [part.target.id for part in node.body if isinstance(part, ast.AnnAssign) and hasattr(part.target, "id")]
        if isinstance(node, ast.ClassDef) and len(names) > MANY:
            field = re.compile(rf"(?<=[.;)] )(?:{'|'.join(names)}): ")
            found += [f"{place}: {line.strip()}" for line in said.splitlines() if field.search(line)]
    assert not found


def test_words_are_the_fields():
    public = re.compile(r"\b(\w+_)?sandwich_rmsnorm\b")
    found = []
    for path, text in sources():
        for number, line in enumerate(text.splitlines(), 1):
            if re.search("|".join(OURS), public.sub("", line), re.IGNORECASE):
                found.append(f"{path}:{number}: {line.strip()}")
    assert not found
