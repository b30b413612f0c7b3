"""Report on a model: each site, the operator that replaced it, or the reason why it is unchanged."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from rich.table import Table

_LAYER = re.compile(r"(^|(?<=\.))\d+(?=\.|$)")
"""The number of a layer in the name of a module."""
_LAYER_IN_TEXT = re.compile(r"(?<=[a-zA-Z_]\.)\d+(?=\.[a-zA-Z_])")
"""The same in a reason, which may have other numbers."""


@dataclass(frozen=True)
class Entry:
    """A site of a model: a place that an operator replaced, or could replace.

    name: of its module. kind: the name of the module's class. became: the operator there, with what it computes; "" if
    the site is unchanged. why: the reason for that, or a remark on the operator's work. moved: bytes that the operator
    moves, and that the operations it replaced would move, in words; "" if they were not counted.
    """

    name: str
    kind: str
    became: str = ""
    why: str = ""
    moved: str = ""

    @property
    def is_replaced(self) -> bool:
        return bool(self.became)


@dataclass(frozen=True)
class FuseReport:
    """Report on what ``fuse`` found in a model. model: the name of its class. entries: in the order of its modules."""

    model: str
    entries: tuple[Entry, ...]

    @property
    def replaced(self) -> tuple[Entry, ...]:
        return tuple(e for e in self.entries if e.is_replaced)

    @property
    def left(self) -> tuple[Entry, ...]:
        return tuple(e for e in self.entries if not e.is_replaced)

    def __repr__(self) -> str:
        """The printed text, which an interactive interpreter shows for ``fuse(model)``. The data are in `entries`."""
        return str(self)

    def __str__(self) -> str:
        """One line for all sites that differ only in numbers of layers."""
        if not self.entries:
            return self._title()
        rows = [("where", "", "what", "became"), *self._rows()]
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = ["  ".join((*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[3])).rstrip() for row in rows]
        return "\n".join((self._title(), *lines))

    def __rich__(self) -> Table:
        table = Table("where", "", "what", "became", title=self._title(), title_justify="left")
        for row in self._rows():
            table.add_row(*row)
        return table

    def _title(self) -> str:
        if not self.entries:
            return f"{self.model}: nothing was found that looks like a norm"
        return f"{self.model}: {len(self.replaced)} of {len(self.entries)} sites replaced"

    def _rows(self) -> Iterator[tuple[str, str, str, str]]:
        alike: dict[tuple[str, ...], list[Entry]] = {}
        for e in self.entries:
            name, why = _LAYER.sub("*", e.name), _LAYER_IN_TEXT.sub("*", e.why)
            alike.setdefault((name, e.kind, e.became, why, e.moved), []).append(e)
        for (name, kind, became, why, moved), entries in alike.items():
            shown, why = (name, why) if len(entries) > 1 else (entries[0].name, entries[0].why)
            noted = "; ".join(note for note in (why, moved) if note)
            said = f"{became} ({noted})" if became and noted else became or f"left: {why}"
            yield shown or "(the model)", f"x{len(entries)}", kind, said
