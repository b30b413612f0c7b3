"""How messages say a number of things, a thing of a kind that is known only when it is said, and rows of a table."""

import re
from collections.abc import Collection, Iterable, Iterator, Sequence

# What begins with a vowel as it is spoken. Of names that begin with u, those of a unit or an unsigned integer do not.
_VOWEL = re.compile(r"[aeio]|u(?!int|ni|se)|nd", re.IGNORECASE)


def counted(count: int, noun: str, plural: str = "") -> str:
    """A number of things: "1 node", "2 nodes". plural: of a noun that does not only get an s."""
    return f"{count} {noun}" if count == 1 else f"{count} {plural or noun + 's'}"


def with_article(noun: str) -> str:
    """The noun behind its article: "a list", "an int"."""
    return f"{'an' if _VOWEL.match(noun) else 'a'} {noun}"


def in_columns(rows: Iterable[Sequence[object]], right: Collection[int] = ()) -> Iterator[str]:
    """Lines with the cells of a table below one another, whole. right: columns whose cells end below one another."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    for row in texts:
        cells = (c.rjust(w) if n in right else c.ljust(w) for n, (c, w) in enumerate(zip(row, widths, strict=True)))
        yield "  ".join(cells).rstrip()
