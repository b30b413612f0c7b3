"""Text for messages: nouns with a number or an article, and tables in columns."""

import re
from collections.abc import Collection, Iterable, Iterator, Sequence

# Nouns that begin with a vowel when spoken. Of those with u, names of units and of unsigned integers do not.
_VOWEL = re.compile(r"[aeio]|u(?!int|ni|se)|nd", re.IGNORECASE)


def counted(count: int, noun: str, plural: str = "") -> str:
    """A number and its noun: "1 node", "2 nodes". plural: needed unless it is the noun with an s."""
    return f"{count} {noun}" if count == 1 else f"{count} {plural or noun + 's'}"


def with_article(noun: str) -> str:
    """The noun with its article: "a list", "an int"."""
    return f"{'an' if _VOWEL.match(noun) else 'a'} {noun}"


def in_columns(rows: Iterable[Sequence[object]], right: Collection[int] = ()) -> Iterator[str]:
    """Lines of a table with aligned columns. right: numbers of the columns that are aligned to the right."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    for row in texts:
        cells = (c.rjust(w) if n in right else c.ljust(w) for n, (c, w) in enumerate(zip(row, widths, strict=True)))
        yield "  ".join(cells).rstrip()
