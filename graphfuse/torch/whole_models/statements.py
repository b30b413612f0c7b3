"""A forward in which two statements that follow one another are one call: a norm of a variable, and its activation.

Nothing else of the forward is looked at, so that it may do whatever it does.
"""

import ast
import copy
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType

from graphfuse.torch.fusion.source import syntax_tree
from graphfuse.torch.fusion.symbols import ForwardDeclined

_JOINED = "_graphfuse_joined"


@dataclass(frozen=True)
class JoinedStatements:
    """function: a class's forward with one call in the place of two. pairs: names of the modules that both were of."""

    function: FunctionType
    pairs: tuple[tuple[str, str], ...]


def joined(
    own: FunctionType, first: Container[str], second: Container[str], call: Callable[..., object]
) -> JoinedStatements | None:
    """A forward in which `x = self.A(x)` and `x = self.B(x)`, for A of the names `first` and B of `second`, are
    `x = call(self.A, self.B, x)`; None where it has no such. Raises ForwardDeclined where its source is not there.

    B may stand behind branches, of which some end with A: then it is part of each.
    """
    tree = syntax_tree(own)
    if not isinstance(tree, ast.FunctionDef) or not tree.args.args:
        return None
    if any(isinstance(n, ast.Attribute) and _is_mangled(n.attr) for n in ast.walk(tree)):
        raise ForwardDeclined("its forward reads names that its class makes its own")
    found = _Pairs(tree.args.args[0].arg, first, second)
    body = found.block(copy.deepcopy(tree.body))
    if not found.pairs:
        return None
    return JoinedStatements(_made(own, tree, body, call), tuple(dict.fromkeys(found.pairs)))


def _is_mangled(name: str) -> bool:
    return name.startswith("__") and not name.endswith("__")


@dataclass(frozen=True)
class _Step:
    """`variable = self.module(variable)`."""

    variable: str
    module: str


class _Pairs:
    def __init__(self, owner: str, first: Container[str], second: Container[str]) -> None:
        self.owner, self.first, self.second = owner, first, second
        self.pairs: list[tuple[str, str]] = []

    def block(self, statements: Sequence[ast.stmt]) -> list[ast.stmt]:
        found: list[ast.stmt] = []
        for statement in statements:
            step = self._step(statement)
            if found and step is not None and step.module in self.second and self._ends(found[-1], step):
                found[-1] = self._with(found[-1], step, statement)
                continue
            for name in ("body", "orelse", "finalbody"):
                if isinstance(inner := getattr(statement, name, None), list):
                    setattr(statement, name, self.block(inner))
            found.append(statement)
        return found

    def _step(self, statement: ast.stmt) -> _Step | None:
        match statement:
            case ast.Assign(
                targets=[ast.Name(id=variable)],
                value=ast.Call(
                    func=ast.Attribute(value=ast.Name(id=owner), attr=module), args=[ast.Name(id=given)], keywords=[]
                ),
            ) if owner == self.owner and given == variable:
                return _Step(variable, module)
        return None

    def _ends(self, last: ast.stmt, step: _Step) -> bool:
        """True if a statement, or one of its branches, ends with a norm of the variable."""
        if isinstance(last, ast.If):
            return any(branch and self._ends(branch[-1], step) for branch in (last.body, last.orelse))
        norm = self._step(last)
        return norm is not None and norm.module in self.first and norm.variable == step.variable

    def _with(self, last: ast.stmt, step: _Step, statement: ast.stmt) -> ast.stmt:
        if isinstance(last, ast.If):
            for name in ("body", "orelse"):
                setattr(last, name, self.block([*getattr(last, name), copy.deepcopy(statement)]))
            return last
        norm = self._step(last)
        self.pairs.append((norm.module, step.module))
        modules = [last.value.func, statement.value.func]
        call = ast.Call(ast.Name(_JOINED, ast.Load()), [*modules, *last.value.args], [])
        return ast.copy_location(ast.Assign(last.targets, ast.copy_location(call, last.value)), last)


def _made(own: FunctionType, tree: ast.FunctionDef, body: list[ast.stmt], call: Callable[..., object]) -> FunctionType:
    """A function with another body, and all else that its own has: names of its file, its class, defaults."""
    code, cells = own.__code__, dict(zip(own.__code__.co_freevars, own.__closure__ or (), strict=True))
    cells[_JOINED] = CellType(call)
    inner = copy.copy(tree)
    inner.args, inner.body, inner.decorator_list, inner.returns = _without_defaults(tree.args), body, [], None
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
