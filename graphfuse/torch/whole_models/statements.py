"""Forwards rewritten so that two consecutive calls become one: of a module, and of another, or of a function, on its
(first) result.

The rest of the forward is not analyzed, so it may do anything.
"""

import ast
import copy
import functools
from collections.abc import Callable, Iterable, Sequence
from types import CellType, CodeType, FunctionType

from graphfuse.torch.analysis.source import syntax_tree
from graphfuse.torch.analysis.symbols import ForwardDeclined

_JOINED = "_graphfuse_joined"
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)

Pair = tuple[str, str]
"""Names of two submodules; or of one and a function, as the forward writes it: `F.silu`."""
Found = tuple[str, str, bool]
"""Names of a pair, and whether the second is called on the first of the first's results."""

Call = Callable[..., object]
"""Function of the two that are called, and the arguments of the first."""


def joined(own: FunctionType, call: Callable[[str, str, bool], Call | None]) -> tuple[FunctionType, list[Pair]]:
    """A forward with `self.B(self.A(x))` replaced by `call("A", "B", False)(self.A, self.B, x)`, and the pairs that it
    has.

    A pair for which `call` returns None stays. `y = self.A(x)` followed by `y = self.B(y)` is replaced, too. So is
    `y, rest = self.A(...)` followed by `y = self.B(y)`, by `y, rest = call("A", "B", True)(self.A, self.B, ...)`. The
    second may follow branches, some of which end with A: then it is moved into each. A function `F.f` may take the
    place of `self.B`. Raises ForwardDeclined if the source is not available.
    """
    tree = syntax_tree(own)
    if not isinstance(tree, ast.FunctionDef) or not tree.args.args:
        return own, []
    found = _Pairs(tree.args.args[0].arg, functools.cache(call))
    body = found.block([found.visit(statement) for statement in copy.deepcopy(tree.body)])
    if not found.calls:
        return own, []
    if any(map(_is_mangled, ast.walk(tree))):
        raise ForwardDeclined("its forward reads names that its class makes its own")
    return _made(own, tree, body, found.calls.values()), [*dict.fromkeys((a, b) for a, b, _ in found.calls)]


def _is_mangled(node: ast.AST) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name.startswith("__") and not name.endswith("__")


class _Pairs(ast.NodeTransformer):
    def __init__(self, owner: str, call: Callable[[str, str, bool], Call | None]) -> None:
        self.owner, self.call = owner, call
        self.calls = dict[Found, Call]()

    def block(self, statements: Sequence[ast.stmt]) -> list[ast.stmt]:
        found: list[ast.stmt] = []
        for statement in statements:
            if found and (one := self._one(found[-1], statement)) is not None:
                found[-1] = one
                continue
            for name in () if isinstance(statement, _SCOPES) else ("body", "orelse", "finalbody"):
                if isinstance(inner := getattr(statement, name, None), list):
                    setattr(statement, name, self.block(inner))
            found.append(statement)
        return found

    def _one(self, last: ast.stmt, statement: ast.stmt) -> ast.stmt | None:
        """Two statements as one with a pair; None if they have no pair together."""
        match last, statement:
            case ast.If(), ast.Assign():
                branches = last.body, last.orelse
                ends = [self._one(branch[-1], copy.deepcopy(statement)) if branch else None for branch in branches]
                if ends == [None, None]:
                    return None
                for branch, end in zip(branches, ends, strict=True):
                    branch[-1:] = [*branch[-1:], copy.deepcopy(statement)] if end is None else [end]
                return last
            case (
                ast.Assign(targets=[target], value=inner),
                ast.Assign(targets=[ast.Name(id=variable)], value=ast.Call(args=[ast.Name(id=given)]) as outer),
            ) if variable == given:
                of_first = isinstance(target, ast.Tuple)
                first, *rest = target.elts if of_first else [target]
                if not _is_name(first, variable) or any(_is_name(n, variable) for t in rest for n in ast.walk(t)):
                    return None
                call = self._call(inner, outer, of_first)
                return None if call is None else ast.copy_location(ast.Assign(last.targets, call), last)
        return None

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        return self._call(node.args[0] if len(node.args) == 1 else None, node) or node

    def _apart(self, node: ast.AST) -> ast.AST:
        return node  # a nested scope may have another self

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = visit_Lambda = _apart

    def _call(self, inner: ast.expr | None, outer: ast.expr, of_first: bool = False) -> ast.expr | None:
        """The call of a pair: of a module, and of another or of a function on its result, or on the first of its
        results; None if the expressions are no pair."""
        norm, activation = self._module(inner, is_of_one=not of_first), self._module(outer) or self._function(outer)
        found = norm, activation, of_first
        if not norm or not activation or not (call := self.call(*found)):
            return None
        self.calls[found] = call
        function = ast.Name(f"{_JOINED}{[*self.calls].index(found)}", ast.Load())
        given = [inner.func, outer.func, *inner.args]
        return ast.copy_location(ast.Call(function, given, inner.keywords), outer)

    def _module(self, node: ast.AST | None, is_of_one: bool = True) -> str:
        """Name of the submodule that an expression calls; "" for anything else. is_of_one: with one value alone."""
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr=module), args=args, keywords=named) if (
                owner == self.owner and not any(isinstance(value, ast.Starred) for value in args)
            ):
                return module if not is_of_one or len(args) == 1 and not named else ""
        return ""

    def _function(self, node: ast.expr) -> str:
        """Name of the function that an expression calls with one value, with dots; "" for anything else."""
        if not isinstance(node, ast.Call) or len(node.args) != 1 or node.keywords:
            return ""
        value, names = node.func, list[str]()
        while isinstance(value, ast.Attribute):
            value, names = value.value, [value.attr, *names]
        is_function = isinstance(value, ast.Name) and value.id != self.owner
        return ".".join((value.id, *names)) if is_function else ""


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _made(own: FunctionType, tree: ast.FunctionDef, body: list[ast.stmt], calls: Iterable[Call]) -> FunctionType:
    """A function with another body and the rest of its own: globals, closure, defaults and name."""
    code, cells = own.__code__, dict(zip(own.__code__.co_freevars, own.__closure__ or (), strict=True))
    cells |= {f"{_JOINED}{n}": CellType(call) for n, call in enumerate(calls)}
    inner = copy.copy(tree)
    inner.args, inner.body, inner.decorator_list, inner.returns = _without_defaults(tree.args), body, [], None
    inner.type_params = []
    around = ast.parse(f"def around({', '.join(cells)}): pass")
    around.body[0].body = [inner]
    made = compile(ast.fix_missing_locations(around), code.co_filename, "exec", dont_inherit=True)
    (outer,) = (c for c in made.co_consts if isinstance(c, CodeType))
    (found,) = (c for c in outer.co_consts if isinstance(c, CodeType) and c.co_name == code.co_name)
    closure = tuple(cells[name] for name in found.co_freevars)
    function = FunctionType(found, own.__globals__, own.__name__, own.__defaults__, closure)
    function.__kwdefaults__, function.__qualname__ = own.__kwdefaults__, own.__qualname__

    def forward(self, *given, **named):
        run = function if type(self).forward is own else type(self).forward
        return run(self, *given, **named)

    return forward


def _without_defaults(args: ast.arguments) -> ast.arguments:
    """Arguments without defaults and annotations. The new function gets the own function's defaults."""
    made = copy.deepcopy(args)
    made.defaults, made.kw_defaults = [], [None] * len(made.kwonlyargs)
    for a in filter(None, (*made.posonlyargs, *made.args, made.vararg, *made.kwonlyargs, made.kwarg)):
        a.annotation = None
    return made
