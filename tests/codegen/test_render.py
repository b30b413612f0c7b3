"""Inlining: once each, in order, with line numbers that name the right file."""

import re
import subprocess

import pytest

from graphfuse.codegen.render import headers, render, template

KERNEL = '#include "graphfuse/math.cuh"\n#include "generated.cuh"\n#include "graphfuse/platform.cuh"\nint last;\n'


def test_result_is_self_contained():
    source = render(KERNEL, "int generated;\n")
    assert "#include" not in source
    assert "pragma once" not in source
    assert source.count("namespace gf {") == 3  # host, which platform includes, which math includes, and math
    assert source.index("int generated;") < source.index("int last;")


def test_all_headers_together():
    text = "".join(f'#include "{path}"\n' for path in headers())
    assert "graphfuse/simt.cuh" in headers()
    assert "#include" not in render(text + '#include "generated.cuh"\n', "")


@pytest.mark.parametrize(
    "where, text, generated",
    [
        ("kernel.cu:4", KERNEL.replace("int last", "oops last"), ""),
        ("generated.cuh:2", KERNEL, "\noops here;\n"),
    ],
)
def test_compile_errors_name_file_and_line(tmp_path, where, text, generated):
    unit = tmp_path / "unit.cpp"
    unit.write_text(render(text, generated))
    done = subprocess.run(["g++", "-std=c++17", "-fsyntax-only", str(unit)], capture_output=True, text=True)
    assert done.returncode != 0
    assert re.search(rf"^{re.escape(where)}:\d+: error", done.stderr, re.MULTILINE), done.stderr


@pytest.mark.parametrize("include", ["<cmath>", '"graphfuse/nothing.cuh"', '"other.h"'])
def test_unknown_include_is_refused(include):
    with pytest.raises(ValueError, match=r"kernel\.cu:1 includes .*known: generated\.cuh, graphfuse/"):
        render(f"#include {include}\n", "")


def test_prelude_is_asked_for_exactly_once():
    with pytest.raises(ValueError, match="does not include"):
        render("int x;\n", "")
    with pytest.raises(ValueError, match="second time"):
        render('#include "generated.cuh"\n' * 2, "")


def test_kernels_hold_no_intrinsics():
    """Hardware is behind the headers: what is left compiles as plain C++ elsewhere."""
    kernel = template("graphfuse.engines.rows.by_row", "by_row.cu")
    assert not re.search(r"\basm\b|\b__\w+|threadIdx|blockIdx", kernel)
