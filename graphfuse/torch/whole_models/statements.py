"""A forward in which two calls that follow one another are one: what a module makes of what another makes.

Nothing else of the forward is looked at, so that it may do whatever it does.
"""

import ast
import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType

import torch

from graphfuse.torch.fusion.source import syntax_tree
from graphfuse.torch.fusion.symbols import ForwardDeclined

_JOINED = "_graphfuse_joined"
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)

Pair = tuple[str, str]
"""Names of two modules of a module."""

Call = Callable[[torch.nn.Module, torch.nn.Module, torch.Tensor], torch.Tensor]
"""Function of the two, and of what the first is given."""


def joined(own: FunctionType, call: Callable[[str, str], Call | None]) -> tuple[FunctionType, list[Pair]]:
    """A forward in which `x = self.A(x)` and `x = self.B(x)` are `x = call("A", "B")(self.A, self.B, x)`, and so is
    `self.B(self.A(x))` of any x, unless there is no such call; and the pairs that it has. Raises ForwardDeclined where
    its source is not there.

    As a statement B may stand behind branches, of which some end with A: then it is part of each.
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
    return _made(own, tree, body, found.calls), [*found.calls]


def _is_mangled(node: ast.AST) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name.startswith("__") and not name.endswith("__")


@dataclass(frozen=True)
class _Step:
    """`variable = self.module(variable)`."""

    variable: str
    module: str


class _Pairs(ast.NodeTransformer):
    def __init__(self, owner: str, call: Callable[[str, str], Call | None]) -> None:
        self.owner, self.call = owner, call
        self.calls = dict[Pair, Call]()

    def block(self, statements: Sequence[ast.stmt]) -> list[ast.stmt]:
        found: list[ast.stmt] = []
        for statement in statements:
            step = self._step(statement)
            if found and step is not None and self._ends(found[-1], step):
                found[-1] = self._with(found[-1], step, statement)
                continue
            for name in () if isinstance(statement, _SCOPES) else ("body", "orelse", "finalbody"):
                if isinstance(inner := getattr(statement, name, None), list):
                    setattr(statement, name, self.block(inner))
            found.append(statement)
        return found

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        inner = node.args[0] if len(node.args) == 1 else None
        first, second = self._module(inner), self._module(node)
        if not first or not second or not self.call(first, second):
            return node
        return self._called((first, second), node, [inner.func, node.func, *inner.args])

    def _apart(self, node: ast.AST) -> ast.AST:
        return node  # of which self may be another

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = visit_Lambda = _apart

    def _module(self, node: ast.AST | None) -> str:
        """Name of a module that is called with one value; "" for anything else."""
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr=module), args=[value], keywords=[]) if (
                owner == self.owner and not isinstance(value, ast.Starred)
            ):
                return module
        return ""

    def _called(self, pair: Pair, of: ast.Call, given: list[ast.expr]) -> ast.expr:
        self.calls[pair] = self.call(*pair)
        return ast.copy_location(ast.Call(ast.Name(_name(pair), ast.Load()), given, []), of)

    def _step(self, statement: ast.stmt) -> _Step | None:
        match statement:
            case ast.Assign(targets=[ast.Name(id=variable)], value=ast.Call(args=[ast.Name(id=given)]) as value):
                return _Step(variable, module) if given == variable and (module := self._module(value)) else None
        return None

    def _ends(self, last: ast.stmt, step: _Step) -> bool:
        """True if a statement, or one of its branches, ends with the first of a pair."""
        if isinstance(last, ast.If):
            return any(branch and self._ends(branch[-1], step) for branch in (last.body, last.orelse))
        first = self._step(last)
        return first is not None and first.variable == step.variable and bool(self.call(first.module, step.module))

    def _with(self, last: ast.stmt, step: _Step, statement: ast.stmt) -> ast.stmt:
        if isinstance(last, ast.If):
            for name in ("body", "orelse"):
                setattr(last, name, self.block([*getattr(last, name), copy.deepcopy(statement)]))
            return last
        pair = self._step(last).module, step.module
        call = self._called(pair, last.value, [last.value.func, statement.value.func, *last.value.args])
        return ast.copy_location(ast.Assign(last.targets, call), last)


def _name(pair: Pair) -> str:
    return "_".join((_JOINED, *pair))


def _made(own: FunctionType, tree: ast.FunctionDef, body: list[ast.stmt], calls: Mapping[Pair, Call]) -> FunctionType:
    """A function with another body, and all else that its own has: names of its file, its class, defaults."""
    code, cells = own.__code__, dict(zip(own.__code__.co_freevars, own.__closure__ or (), strict=True))
    cells |= {_name(pair): CellType(call) for pair, call in calls.items()}
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

    forward.__wrapped__ = own  # whose arguments inspect.signature tells
    return forward


def _without_defaults(args: ast.arguments) -> ast.arguments:
    """Arguments without defaults and annotations, which the own function has."""
    made = copy.deepcopy(args)
    made.defaults, made.kw_defaults = [], [None] * len(made.kwonlyargs)
    for a in filter(None, (*made.posonlyargs, *made.args, made.vararg, *made.kwonlyargs, made.kwarg)):
        a.annotation = None
    return made
