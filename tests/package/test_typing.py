"""What type checkers are told of the op methods is what the op table says, and what they do."""

import ast
import enum
import inspect
from pathlib import Path

import pytest

import graphfuse
import op_stub
from graphfuse import pygraph
from graphfuse.ops import OPS, SPELLINGS

(CLASS,) = (node for node in ast.parse(op_stub.FILE.read_text()).body if isinstance(node, ast.ClassDef))
TYPED = {method.name: method for method in CLASS.body if isinstance(method, ast.FunctionDef)}


def test_the_stub_is_the_tables():
    """After a change of the op table: make stub."""
    assert op_stub.FILE.read_text() == op_stub.text(), "run make stub"


@pytest.mark.parametrize("name", [*OPS, *SPELLINGS])
def test_parameters_are_those_of_the_method(name):
    """In their order, with a default where there is one, and with the default that is told."""
    arguments = TYPED[name].args
    names = [a.arg for a in arguments.args]
    told = dict(zip(names[::-1], arguments.defaults[::-1], strict=False))
    told |= {a.arg: default for a, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)}
    parameters = inspect.signature(getattr(pygraph, name)).parameters
    assert [*names, *(a.arg for a in arguments.kwonlyargs)] == list(parameters)
    for parameter in parameters.values():
        if parameter.default is parameter.empty:
            assert parameter.name not in told
            continue
        default = ast.literal_eval(told[parameter.name])
        hidden = isinstance(parameter.default, enum.Enum) or parameter.default in (None, float("inf"))
        hidden |= parameter.kind is parameter.KEYWORD_ONLY  # which is not offered: its default asks for nothing
        assert default == parameter.default or (hidden and default is ...), parameter


def test_no_method_is_told_that_is_not_there():
    assert set(TYPED) == {*OPS, *SPELLINGS}


def test_type_checkers_are_told_of_what_is_loaded_late():
    """A name that is left out is an `object` to them, which cannot be called."""
    tree = ast.parse(Path(graphfuse.__file__).read_text())
    (told,) = (node for node in tree.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
    assert {alias.name for line in told.body for alias in line.names} == set(graphfuse._LAZY)
