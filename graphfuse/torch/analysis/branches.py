"""Branches of a function that each call decides anew, by properties of a tensor: as functions of their own."""

from __future__ import annotations

import ast
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType

NAME = "_graphfuse_branch"
"""Name of the functions."""
_NODES = (
    *(ast.If, ast.Assign, ast.expr_context, ast.operator, ast.unaryop, ast.boolop, ast.cmpop),
    *(ast.Name, ast.Constant, ast.Attribute, ast.Call, ast.keyword, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare),
    *(ast.IfExp, ast.Subscript, ast.Slice, ast.Tuple),
)
_OF_THE_FRAME = frozenset({"super", "locals", "globals", "vars", "dir", "eval", "exec", "__class__"})
"""Functions that read variables which are not named."""


@dataclass(frozen=True)
class Branch:
    """An ``if`` statement. given: the variables that it may read, with their values. made: those of them that it may
    assign. ranked: those whose rank it reads."""

    statement: ast.If
    given: Mapping[str, object]
    made: Sequence[str]
    ranked: Sequence[str]

    def function(self, names: dict[str, object], file: str) -> FunctionType:
        """Function of the given variables that runs the statement and returns a tuple of those that it may assign.
        names: where it finds all others. file: of the statement, for tracebacks."""
        result = ast.Tuple([ast.Name(name, ast.Load()) for name in self.made], ast.Load())
        tree = ast.parse(f"def {NAME}({', '.join(self.given)}): pass")
        tree.body[0].body = [self.statement, ast.Return(result)]
        made: dict[str, FunctionType] = {}
        exec(compile(ast.fix_missing_locations(tree), file, "exec"), names, made)
        made[NAME].__module__ = __name__  # torch.fx writes names of functions in modules of torch as theirs
        return made[NAME]


def found(statement: ast.If, code: CodeType, variables: Mapping[str, object]) -> Branch | None:
    """The branch of a function with this code and these variables; None if it may do more than assign to variables by
    expressions, or reads others than these and global ones."""
    nodes = [*ast.walk(statement)]
    if not all(isinstance(n, _NODES) for n in nodes):
        return None
    targets = [n.targets for n in nodes if isinstance(n, ast.Assign)]
    if not all([*map(type, of)] == [ast.Name] for of in targets):
        return None
    attributes = [n for n in nodes if isinstance(n, ast.Attribute)]
    # A method that ends with an underscore may change a tensor in place, and Python renames private names of a class.
    if any(n.attr.endswith("_") or n.attr.startswith("__") for n in attributes):
        return None
    read = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    assigned = {name.id for (name,) in targets}
    if any(name.startswith("__") for name in read | assigned) or read & (_OF_THE_FRAME | {*code.co_freevars}):
        return None
    if _bound([statement], {*variables}, {*code.co_varnames, *code.co_cellvars}) is None:
        return None
    made = tuple(sorted(assigned & {*variables}))
    given = {name: variables[name] for name in sorted((read | assigned) & {*variables})}
    ranked = {n.value.id for n in attributes if n.attr == "ndim" and isinstance(n.value, ast.Name)}
    return Branch(statement, given, made, tuple(sorted(ranked & {*given}))) if made else None


def _bound(statements: Sequence[ast.stmt], before: set[str], own: Container[str]) -> set[str] | None:
    """Variables that have a value after statements; None if one is read that may have none. own: all variables."""

    def reads(node: ast.expr) -> bool:
        names = (n.id for n in ast.walk(node) if isinstance(n, ast.Name))
        return all(name in before or name not in own for name in names)

    for one in statements:
        if isinstance(one, ast.If):
            after = [_bound(part, {*before}, own) for part in (one.body, one.orelse)]
            if not reads(one.test) or None in after:
                return None
            before = after[0] & after[1]
        elif not reads(one.value):
            return None
        else:
            before = before | {one.targets[0].id}
    return before
