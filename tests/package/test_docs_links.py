"""Every relative link of a document leads somewhere, and every page is in the site's navigation."""

import inspect
import re
from collections import Counter
from pathlib import Path

import pytest

import site_check
from docstrings import listed

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [*ROOT.glob("*.md"), *sorted(DOCS.rglob("*.md")), *sorted((ROOT / "examples").rglob("*.md"))]
FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def prose(text: str) -> str:
    """A document without code."""
    return re.sub(r"`[^`\n]+`", "`code`", FENCED.sub("", text))


def anchors(text: str) -> set[str]:
    """The anchors of a document's headings, as viewers of Markdown and the site make them."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ +(.*)$", FENCED.sub("", text), re.MULTILINE):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower().replace("`", "")
        found.add(re.sub(r"[^\w\- ]", "", words).strip().replace(" ", "-"))
    return found


def broken(page: Path) -> list[str]:
    """Links of a page that lead nowhere."""
    found = []
    for link in LINK.findall(prose(page.read_text())):
        path, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", link):
            continue
        target = (page.parent / path).resolve() if path else page
        if not target.exists():
            found.append(f"{link}: no such file")
        elif anchor and anchor not in anchors(target.read_text()):
            found.append(f"{link}: no such heading")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    assert not broken(page)


def test_a_broken_link_is_seen(tmp_path):
    page = tmp_path / "page.md"
    (tmp_path / "there.md").write_text("# A → `b`, c's\n\n```\n# no heading\n```\n")
    page.write_text(
        "[1](there.md) [2](there.md#a--b-cs) [3](gone.md) [4](there.md#no-heading) [5](#own)\n\n"
        "`[6](code.md)` [7](https://example.org/x)\n\n## Own\n"
    )
    assert broken(page) == ["gone.md: no such file", "there.md#no-heading: no such heading"]


def test_navigation_has_every_page_once():
    text = (ROOT / "mkdocs.yml").read_text()
    named = Counter(re.findall(r"\S+\.md$", text[text.index("\nnav:") :], re.MULTILINE))
    assert named == Counter(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def test_links_of_pages_stay_within_the_site():
    """The site has what is in docs/ and nothing else."""
    for page in DOCS.rglob("*.md"):
        for link in LINK.findall(prose(page.read_text())):
            if not re.match(r"[a-z]+:|#", link):
                assert (page.parent / link.partition("#")[0]).resolve().is_relative_to(DOCS), f"{page.name}: {link}"


def test_what_a_page_fetches_from_elsewhere_is_seen(tmp_path):
    words = "word " * 20
    (tmp_path / "good.html").write_text(f'<article>{words}<a href="https://a.org"></a><img src="a.svg"></article>')
    assert not list(site_check.faults(tmp_path))
    (tmp_path / "bad.html").write_text(f'<script src="//a.org/x.js"></script><article>{words}</article>')
    (tmp_path / "thin.html").write_text(f"<p>{words}</p><article>few words</article>")
    assert list(site_check.faults(tmp_path)) == ["bad.html: fetches //a.org/x.js", "thin.html: 2 words"]


def test_the_reference_has_every_public_name():
    """By the places where they are defined: a submodule may have the name of a function."""
    import graphfuse.testing
    import graphfuse.torch
    from graphfuse import functional
    from graphfuse.base import errors

    for package, page in ((functional, "functional"), (graphfuse.torch, "torch")):
        shown = re.findall(r"^::: (\S+)$", (DOCS / "api" / f"{page}.md").read_text(), re.MULTILINE)
        public = {name: getattr(package, name) for name in package.__all__}
        wanted = {o.__name__ if inspect.ismodule(o) else f"{o.__module__}.{n}" for n, o in public.items()}
        assert Counter(shown) == Counter(wanted), page
    text = "".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    for name in set(graphfuse.__all__) - set(vars(errors)) - {"cudnnGraphNotSupportedError", "fused_rmsnorm_silu"}:
        module = getattr(getattr(graphfuse, name), "__module__", "")
        assert re.search(rf"\b{name}\b", text) or f"::: {module}\n" in text, name


def test_docstrings_list_what_they_say_of_parameters():
    text = "A norm: of x.\n\nx: (..., hidden), any\nstrides. weight, bias: of x. eps_x: a number.\n\nReturns x: y."
    assert listed(text, {"x", "weight", "bias", "eps_x"}) == (
        "A norm: of x.\n\n- **x**: (..., hidden), any strides.\n- **weight, bias**: of x.\n- **eps_x**: a number."
        "\n\nReturns x: y."
    )
    assert listed(text, ()) == text
    assert listed("Twice. x: a number.", {"x"}) == "Twice.\n\n- **x**: a number."
