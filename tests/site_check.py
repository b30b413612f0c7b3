"""Looks at a built site: nothing on a page is fetched from another host, and no page is empty.

    python tests/site_check.py build/site

mkdocs itself checks links and anchors. A reader without a network, and one who wants no third party to know what is
read, get the whole site.
"""

import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

FETCHED = {"script": "src", "img": "src", "iframe": "src", "link": "href", "source": "src", "object": "data"}
"""Elements that a browser loads something for, and the attribute that says what."""


class _Page(HTMLParser):
    """What a page fetches, and how many words its article has."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.words = 0
        self._depth = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._depth += tag == "article"
        given = dict(attrs)
        if tag in FETCHED and given.get("rel") not in ("canonical", "next", "prev"):
            self.fetched.append(given.get(FETCHED[tag]) or "")

    def handle_endtag(self, tag: str) -> None:
        self._depth -= tag == "article"

    def handle_data(self, data: str) -> None:
        self.words += len(data.split()) if self._depth else 0


def faults(site: Path) -> Iterator[str]:
    """What is wrong with the pages, a line each."""
    pages = [page for page in sorted(site.rglob("*.html")) if page.name != "404.html"]
    if not pages:
        yield f"{site}: no page"
    for file in pages:
        page = _Page()
        page.feed(file.read_text(encoding="utf-8"))
        for address in page.fetched:
            if address.startswith(("http:", "https:", "//")):
                yield f"{file.relative_to(site)}: fetches {address}"
        if page.words < 10:
            yield f"{file.relative_to(site)}: {page.words} words"


if __name__ == "__main__":
    found = list(faults(Path(sys.argv[1])))
    print("\n".join(found) or "the site is whole")
    raise SystemExit(1 if found else 0)
