"""Branches of a function that each call decides anew, by properties of a tensor: as functions of their own."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType

_NAME = "_graphfuse_branch"
_NODES = (
    *(ast.If, ast.Assign, ast.expr_context, ast.operator, ast.unaryop, ast.boolop, ast.cmpop),
    *(ast.Name, ast.Constant, ast.Attribute, ast.Call, ast.keyword, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare),
    *(ast.IfExp, ast.Subscript, ast.Slice, ast.Tuple),
)


@dataclass(frozen=True)
class Branch:
    """An ``if`` statement. given: the variables that it may read, with their values. made: those of them that it may
    assign."""

    statement: ast.If
    given: Mapping[str, object]
    made: Sequence[str]

    def function(self, names: dict[str, object]) -> FunctionType:
        """Function of the given variables that runs the statement and returns a tuple of those that it may assign.
        names: where it finds all others."""
        result = ast.Tuple([ast.Name(name, ast.Load()) for name in self.made], ast.Load())
        tree = ast.parse(f"def {_NAME}({', '.join(self.given)}): pass")
        tree.body[0].body = [self.statement, ast.Return(result)]
        made: dict[str, object] = {}
        exec(compile(ast.fix_missing_locations(tree), "<graphfuse branch>", "exec"), names, made)
        return made[_NAME]


def found(statement: ast.If, code: CodeType, variables: Mapping[str, object]) -> Branch | None:
    """The branch of a function with this code and these variables; None if it may do more than assign to variables by
    expressions, or reads others than these and global ones."""
    nodes = [*ast.walk(statement)]
    if not all(map(_assigns, (*statement.body, *statement.orelse))) or not all(isinstance(n, _NODES) for n in nodes):
        return None
    if any(isinstance(n, ast.Attribute) and n.attr.endswith("_") for n in nodes):  # may change a tensor in place
        return None
    used = [n for n in nodes if isinstance(n, ast.Name)]
    assigned = {n.id for n in used if isinstance(n.ctx, ast.Store)}
    read = {n.id for n in used if isinstance(n.ctx, ast.Load)}
    own = {*code.co_varnames, *code.co_cellvars}
    is_private = any(name.startswith("__") for name in read | assigned)  # Python names those otherwise in a class
    if is_private or not read.isdisjoint(code.co_freevars) or not (read & own) <= {*variables} | assigned:
        return None
    made = tuple(sorted(assigned & {*variables}))
    given = {name: variables[name] for name in sorted((read | {*made}) & {*variables})}
    return Branch(statement, given, made) if made else None


def _assigns(statement: ast.stmt) -> bool:
    """True for an assignment to one variable, and for a branch of such ones."""
    if isinstance(statement, ast.If):
        return all(map(_assigns, (*statement.body, *statement.orelse)))
    return isinstance(statement, ast.Assign) and [*map(type, statement.targets)] == [ast.Name]
