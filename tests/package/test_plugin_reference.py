"""The reference of plug-ins is what the sources say, and lacks nothing of the headers that it is about."""

import re

import pytest

import plugin_reference as reference
from graphfuse import plugin

PAGE = reference.PATH.read_text()
HEADERS = sorted(path.stem for path in reference.HEADERS.glob("*.cuh"))


def test_the_page_is_as_written():
    assert reference.render() == PAGE, f"run {reference.COMMAND}"


@pytest.mark.parametrize("header", [h for h in HEADERS if h not in reference.OURS])
def test_every_function_of_a_header_is_there(header):
    """Found here by another way: names before a bracket, of lines that begin with what declares a device function."""
    text = (reference.HEADERS / f"{header}.cuh").read_text()
    text = re.sub(r"namespace (software|detail) \{.*?\n\}  // namespace \1", "", text, flags=re.DOTALL)
    section = PAGE[PAGE.index(f"## `graphfuse/{header}.cuh`") :].split("\n## ")[0]
    declared = re.findall(r"^GF_DEVICE [^=;{]*?(\w+)\([^;{]*\{", text, re.MULTILINE)
    internal = {name for name in declared if re.search(rf"\b{name}\([^)]*Site site\)", text)} | {*reference.ONE_SIDED}
    missing = {name for name in declared if f" {name}(" not in section and f"`{name}(" not in section} - internal
    assert not missing
    assert len(re.findall("^- `", section, re.MULTILINE)) == len(reference.declarations(text))


def test_every_name_for_authors_is_there():
    said = [name for names in reference.PYTHON.values() for name in names]
    assert sorted({*said, *reference.ELSEWHERE}) == sorted(plugin.__all__)
    assert len(said) == len({*said} - reference.ELSEWHERE)


def test_comments_stand_by_what_they_are_about():
    text = "// A header.\n#pragma once\n/// Twice x,\n/// exactly.\n"
    text += "GF_DEVICE float twice(float x GF_SITE) { return x + x; }\n"
    text += "\n// Loose.\n\ntemplate <class T>\nGF_DEVICE T same(T x) {\n  struct inner {};\n  return x;\n}\n"
    assert reference.overview(text) == "A header."
    assert reference.declarations(text) == [
        reference.Declaration("float twice(float x)", "Twice x, exactly."),
        reference.Declaration("template <class T> T same(T x)", ""),
    ]


def test_links_and_files_of_the_guide_are_there():
    guide = (reference.PATH.parent / "extending.md").read_text()
    for path in re.findall(r"\]\(([\w./-]+)\)", guide):
        assert (reference.PATH.parent / path).exists(), path
    for path in re.findall(r"`(examples/[\w./]+)`", guide):
        assert (reference.ROOT / path).exists(), path


def test_the_guide_tells_every_field_that_serves_has():
    from dataclasses import fields

    from graphfuse.plugin import Served

    guide = (reference.PATH.parent / "extending.md").read_text()
    told = set(re.findall(r"^\| `(\w+)` \|", guide[guide.index("## What `serves` declares") :].split("\n## ")[0], re.M))
    assert told == {f.name for f in fields(Served)}
