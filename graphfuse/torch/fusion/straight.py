"""Whether a forward is straight: the same operations in the same order whatever it is called with.

Tracing follows one way through a function, so only a straight one is what its trace says. What is read here is the
source: statements that assign, call and return; no branches, loops, comparisons, nested functions, changes in place,
or calls of anything but modules and functions of torch.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterable, Iterator
from types import FunctionType, ModuleType

import torch

_STATEMENTS = (ast.Assign, ast.AnnAssign, ast.Expr, ast.Return, ast.Pass)
_EXPRESSIONS = (
    ast.Name,
    ast.Attribute,
    ast.Call,
    ast.Constant,
    ast.Tuple,
    ast.List,
    ast.Dict,
    ast.BinOp,
    ast.UnaryOp,
    ast.Subscript,
    ast.Slice,
    ast.Starred,
    ast.keyword,
    ast.operator,
    ast.unaryop,
    ast.expr_context,
)
_PLAIN = (bool, int, float, str, type(None))


class Crooked(Exception):
    """Why a forward is not straight."""


def body(function: FunctionType) -> ast.FunctionDef:
    try:
        source = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):
        raise Crooked("the source of its forward is not there") from None
    found = ast.parse(source).body[0]
    if not isinstance(found, ast.FunctionDef):
        raise Crooked("its forward is no plain function")
    return found


def sums_into(function: FunctionType, called: Iterable[str]) -> bool:
    """Whether a variable that is given to one of self's modules, of these names, was a sum at some time, as far as the
    source tells. For reports: nothing is done by it."""
    try:
        nodes = list(ast.walk(body(inspect.unwrap(function))))
    except Crooked:
        return False
    assigned = [n for n in nodes if isinstance(n, ast.Assign | ast.AugAssign)]
    sums = {_target(n) for n in assigned if isinstance(n.op if isinstance(n, ast.AugAssign) else _operator(n), ast.Add)}
    calls = (n for n in nodes if isinstance(n, ast.Call) and (_path(n.func) or [""])[-1] in set(called))
    return any(isinstance(a, ast.Name) and a.id in sums for call in calls for a in call.args)


def _operator(assigned: ast.Assign) -> ast.operator | None:
    return assigned.value.op if isinstance(assigned.value, ast.BinOp) else None


def _target(assigned: ast.Assign | ast.AugAssign) -> str:
    target = assigned.targets[0] if isinstance(assigned, ast.Assign) else assigned.target
    return target.id if isinstance(target, ast.Name) else ""


def constants(module: torch.nn.Module, function: FunctionType) -> dict[str, object]:
    """The plain attributes of the module that its forward reads, which the trace has as they are now. Raises Crooked
    for a forward that is not straight."""
    tree, found = body(function), dict[str, object]()
    me = tree.args.args[0].arg if tree.args.args else ""
    for statement in tree.body:
        if not isinstance(statement, _STATEMENTS):
            raise Crooked(f"its forward is not straight: line {statement.lineno} is {_said(statement)}")
        for node in ast.walk(statement.value) if getattr(statement, "value", None) is not None else ():
            if not isinstance(node, _EXPRESSIONS):
                raise Crooked(f"its forward is not straight: line {node.lineno} has {_said(node)}")
            if isinstance(node, ast.Call):
                _check_call(node, me, module, function)
            if isinstance(node, ast.Attribute):
                found.update(_read(node, me, module))
        if isinstance(statement, ast.Assign) and any(not _is_local(t) for t in statement.targets):
            raise Crooked(f"its forward is not straight: line {statement.lineno} assigns to more than variables")
    return found


def _said(node: ast.AST) -> str:
    return f"{type(node).__name__}"


def _is_local(target: ast.AST) -> bool:
    return all(isinstance(t, ast.Name | ast.Tuple | ast.List | ast.expr_context) for t in ast.walk(target))


def _path(node: ast.AST) -> list[str] | None:
    """a.b.c as names, None for anything else."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [node.id, *names[::-1]] if isinstance(node, ast.Name) else None


def _check_call(node: ast.Call, me: str, module: torch.nn.Module, function: FunctionType) -> None:
    path = _path(node.func)
    if path is None or path[0] not in {me, *function.__globals__}:  # a method of something computed
        if path is not None and len(path) == 1:
            raise Crooked(f"its forward calls {path[0]}, which is not known to do the same each time")
        if isinstance(node.func, ast.Attribute) and node.func.attr.endswith("_"):
            raise Crooked(f"its forward calls {node.func.attr}, which changes a tensor in place")
        return
    target: object = module if path[0] == me else function.__globals__[path[0]]
    for name in path[1:]:
        target = getattr(target, name, None)
    own = getattr(target, "__module__", None) or getattr(getattr(target, "__self__", None), "__module__", "") or ""
    if not isinstance(target, torch.nn.Module) and not (
        own.split(".")[0] in ("torch", "_operator") or _is_torchs(target)
    ):
        raise Crooked(f"its forward calls {'.'.join(path)}, which is no module and no function of torch")


def _is_torchs(target: object) -> bool:
    name = getattr(target, "__name__", "")
    return bool(name) and any(getattr(owner, name, None) is target for owner in (torch, torch.nn.functional))


def _read(node: ast.Attribute, me: str, module: torch.nn.Module) -> Iterator[tuple[str, object]]:
    path = _path(node)
    if path is None or path[0] != me or len(path) != 2:
        if path is not None and path[0] == me and isinstance(getattr(module, path[1], None), torch.nn.Module):
            raise Crooked(f"its forward reads {'.'.join(path)}")
        return
    value = getattr(module, path[1], None)
    if isinstance(value, torch.nn.Module | torch.Tensor | ModuleType):
        return
    if not isinstance(value, _PLAIN):
        raise Crooked(f"its forward reads {me}.{path[1]}, a {type(value).__name__}")
    yield path[1], value
