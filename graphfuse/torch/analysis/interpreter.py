"""Interpreter that runs a function of a module, statement by statement, on symbols that stand for its tensors.

Tracing follows one path through a function. That path holds for every call only if all that it depends on is compared
at each call. So the source is run here instead of by Python: assignments, returns, branches on known values, and calls
of torch's operations and of plain functions, which are run in the same way. Any other statement raises
`ForwardDeclined`. Each value that is not an argument is recorded as a `Read`.
"""

import ast
import builtins
import inspect
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import BuiltinFunctionType, CodeType, FunctionType, MappingProxyType, ModuleType

import torch

from graphfuse.base.wording import with_article
from graphfuse.torch.analysis import branches, kinds, python_operators
from graphfuse.torch.analysis.reads import SELF, is_plain
from graphfuse.torch.analysis.source import syntax_tree
from graphfuse.torch.analysis.symbols import Activation, Child, Domain, ForwardDeclined, Named, NewDict, TensorMethod

_DEPTH = 8
_FLAGS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_ACTIVATIONS = {torch.nn.SiLU: torch.nn.functional.silu, torch.nn.Sigmoid: torch.sigmoid}
_OF_NUMBERS = frozenset(
    {len, int, float, bool, str, abs, min, max, any, all, *(f for f in vars(math).values() if callable(f))}
)


def run(
    domain: Domain,
    function: FunctionType,
    args: Sequence[object],
    named: Mapping[str, object],
    rest: Mapping[str, object] = MappingProxyType({}),
) -> object:
    """Result of a function of the module, called with these arguments. rest: values of other variables. Raises
    ForwardDeclined, and any error that operations raise."""
    cls = type(domain.module)
    if cls.__getattribute__ is not object.__getattribute__ or cls.__getattr__ is not torch.nn.Module.__getattr__:
        raise ForwardDeclined("looks its attributes up in a way of its own")
    return _run_function(domain, function, [Named(domain.module, SELF), *args], named, 0, rest)


def _run_function(
    domain: Domain,
    function: FunctionType,
    args: Sequence[object],
    named: Mapping[str, object],
    depth: int,
    rest: Mapping[str, object] = MappingProxyType({}),
) -> object:
    if depth > _DEPTH or function.__code__.co_flags & _FLAGS:
        raise ForwardDeclined(f"calls {function.__name__}, which calls too deep or is a generator")
    tree = syntax_tree(function)
    bound = inspect.signature(function, follow_wrapped=False).bind(*args, **named)
    given = dict(bound.arguments)
    bound.apply_defaults()
    empty = [p.name for p in bound.signature.parameters.values() if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    # A default value that may be changed in place is not known.
    known = {n: v for n, v in bound.arguments.items() if n in given or n in empty or is_plain(v) and kinds.is_fixed(v)}
    frame = _Frame(domain, function, {n: domain.bound(v) for n, v in known.items()} | rest, depth)
    if isinstance(tree, ast.Lambda):
        return frame.value(tree.body)
    returned = frame.block(tree.body)
    return returned[0] if returned else None


class _Frame:
    """A call of a function: its variables, and how its statements and expressions are run."""

    def __init__(self, domain: Domain, function: FunctionType, variables: dict[str, object], depth: int) -> None:
        self.domain, self.function, self.variables, self.depth = domain, function, variables, depth

    def block(self, statements: Sequence[ast.stmt]) -> tuple[object] | None:
        """The value that statements return, in a tuple; None if they return nothing."""
        for statement in statements:
            match statement:
                case ast.Return():
                    return (None if statement.value is None else self.value(statement.value),)
                case ast.Assign():
                    value = self.value(statement.value)
                    for target in statement.targets:
                        self.assign(target, value)
                case ast.AnnAssign(target=ast.Name()):
                    if statement.value is not None:
                        self.assign(statement.target, self.value(statement.value))
                case ast.AugAssign(target=ast.Name(id=name)) if type(statement.op) in python_operators.IN_PLACE:
                    held = self.value(ast.copy_location(ast.Name(name, ast.Load()), statement))
                    value = self.changed(statement, held, self.value(statement.value))
                    self.assign(statement.target, value)
                case ast.Expr():
                    self.value(statement.value)
                case ast.If():
                    try:
                        taken = statement.body if self.domain.attempt(self.truth, statement.test) else statement.orelse
                    except ForwardDeclined:
                        if not self.branch(statement):
                            raise
                        taken = []
                    if returned := self.block(taken):
                        return returned
                case ast.Assert():
                    if not self.truth(statement.test):
                        raise self.declined(statement, "fails")
                case ast.FunctionDef(decorator_list=[]):
                    self.variables[statement.name] = self.define(statement)
                case ast.Pass():
                    pass
                case _:
                    raise self.declined(statement, f"is {type(statement).__name__}")
        return None

    def changed(self, statement: ast.AugAssign, held: object, value: object) -> object:
        """The value of a variable after ``+=`` and others. A tensor is changed in place, for all that hold it."""
        if isinstance(held, self.domain.symbols):
            try:
                return self.domain.change(python_operators.IN_PLACE[type(statement.op)], held, value)
            except ForwardDeclined as why:
                raise self.declined(statement, str(why)) from None
        if isinstance(value, self.domain.symbols) or not is_plain(held) or not is_plain(value):
            raise self.declined(statement, "is AugAssign")
        return python_operators.OPERATIONS[type(statement.op)](held, value)

    def branch(self, statement: ast.If) -> bool:
        """True if a branch that is decided in each call was recorded as one call, of a function with this statement.

        It may assign to variables alone, and read neither the module nor variables of outer functions."""
        code = self.function.__code__
        found = branches.found(statement, code, self.variables)
        if found is None or any(self.domain.may_assume_rank(found.given[name]) for name in found.ranked):
            return False
        others = (v for v in found.given.values() if not isinstance(v, self.domain.symbols))
        if not all(is_plain(v) and kinds.is_fixed(v) for v in others):
            return False
        function = found.function(self.function.__globals__, code.co_filename)
        values = self.domain.branch(function, [*found.given.values()], len(found.made))
        if values is not None:
            self.variables |= dict(zip(found.made, values, strict=True))
        return values is not None

    def define(self, node: ast.FunctionDef) -> FunctionType:
        """A function that is defined within the function, and reads none of its variables."""
        codes = (c for c in self.function.__code__.co_consts if isinstance(c, CodeType) and c.co_name == node.name)
        found = [code for code in codes if not code.co_freevars and code.co_firstlineno == node.lineno]
        if len(found) != 1 or node.args.defaults or any(node.args.kw_defaults):
            raise self.declined(node, "is FunctionDef")
        return FunctionType(found[0], self.function.__globals__, node.name)

    def declined(self, node: ast.AST, what: str) -> ForwardDeclined:
        code = self.function.__code__
        of = f" of {code.co_name}" if self.depth else ""
        return ForwardDeclined(f"line {node.lineno - code.co_firstlineno + 1}{of} {what}")

    def assign(self, target: ast.expr, value: object) -> None:
        if isinstance(target, ast.Name):
            if target.id not in self.function.__code__.co_varnames + self.function.__code__.co_cellvars:
                raise self.declined(target, f"assigns to {target.id}, which is not its own")
            self.variables[target.id] = self.domain.bound(value)
        elif isinstance(target, ast.Tuple | ast.List) and isinstance(value, (tuple, list, self.domain.symbols)):
            places = target.elts
            starred = next((i for i, t in enumerate(places) if isinstance(t, ast.Starred)), None)
            if isinstance(value, self.domain.symbols):
                if starred is not None:
                    raise self.declined(target, "unpacks a symbol")
                value = self.domain.unpack(value, len(places))
            # Without a starred target, the number of values decides whether this raises an error.
            values = [*(self.domain.settled(value) if starred is None else value)]
            if starred is not None:
                end = len(values) - (len(places) - starred - 1)
                values[starred:end] = [values[starred:end]]
            if len(values) != len(places):
                raise self.declined(target, "takes another number of values")
            for place, v in zip(places, values, strict=True):
                self.assign(place.value if isinstance(place, ast.Starred) else place, v)
        elif not self.store(target, value):
            raise self.declined(target, f"changes {ast.unparse(target)}")

    def store(self, target: ast.expr, value: object) -> bool:
        """True if a value was written to a part of a symbol that a variable holds."""
        if not isinstance(target, ast.Subscript) or not isinstance(target.value, ast.Name):
            return False
        held = self.variables.get(target.value.id)
        return isinstance(held, self.domain.symbols) and self.domain.store(held, self.value(target.slice), value)

    def truth(self, node: ast.expr) -> bool:
        return self.decide(node, self.value(node))

    def decide(self, node: ast.expr, value: object) -> bool:
        value = self.settled(node, value)
        if not is_plain(value):
            raise self.declined(node, f"decides by {ast.unparse(node)}")
        return bool(value)

    @contextmanager
    def at(self, node: ast.expr) -> Iterator[None]:
        """Context that adds the source line to a ForwardDeclined of the domain."""
        try:
            yield
        except ForwardDeclined as why:
            raise self.declined(node, f"{why}: {ast.unparse(node)}") from None

    def settled(self, node: ast.expr, value: object) -> object:
        with self.at(node):
            return self.domain.settled(value)

    def value(self, node: ast.expr) -> object:
        evaluate = getattr(self, f"_{type(node).__name__.lower()}", None)
        if evaluate is None:
            raise self.declined(node, f"has {type(node).__name__}")
        return evaluate(node)

    def _dict(self, node: ast.Dict) -> object:
        if node.keys:
            raise self.declined(node, "has Dict")
        return NewDict()

    def _constant(self, node: ast.Constant) -> object:
        return node.value

    def _tuple(self, node: ast.Tuple) -> object:
        return tuple(self.items(node.elts))

    def _list(self, node: ast.List) -> object:
        return self.items(node.elts)

    def _generatorexp(self, node: ast.GeneratorExp | ast.ListComp) -> object:
        """List of the values of a comprehension over a known sequence."""
        first, *others = node.generators
        several = self.value(first.iter)
        if others or first.is_async or not isinstance(first.target, ast.Name) or not isinstance(several, tuple | list):
            raise self.declined(node, f"has {type(node).__name__}")
        before, found = self.variables, []
        for value in several:
            self.variables = before | {first.target.id: value}
            if all(self.truth(test) for test in first.ifs):
                found.append(self.value(node.elt))
        self.variables = before
        return found

    _listcomp = _generatorexp

    def _slice(self, node: ast.Slice) -> object:
        parts = (None if n is None else self.value(n) for n in (node.lower, node.upper, node.step))
        return slice(*(self.settled(node, part) for part in parts))

    def items(self, nodes: Sequence[ast.expr], most: int | None = None) -> list[object]:
        """Values of expressions. most: their number, if it is known."""
        found: list[object] = []
        for node in nodes:
            if not isinstance(node, ast.Starred):
                found.append(self.value(node))
                continue
            values = self.value(node.value)
            if isinstance(values, self.domain.symbols) and most is not None and node is nodes[-1]:
                with self.at(node):
                    values = self.domain.unpack(values, most - len(found))
            if not isinstance(values, tuple | list):
                raise self.declined(node, f"spreads {ast.unparse(node.value)}")
            found += values
        return found

    def _ifexp(self, node: ast.IfExp) -> object:
        return self.value(node.body if self.truth(node.test) else node.orelse)

    def _boolop(self, node: ast.BoolOp) -> object:
        ends = isinstance(node.op, ast.Or)
        for operand in node.values:
            value = self.value(operand)
            if operand is node.values[-1] or self.decide(operand, value) == ends:
                return value
        raise AssertionError

    def _binop(self, node: ast.BinOp) -> object:
        return self.operate(node, node.left, node.right)

    def _unaryop(self, node: ast.UnaryOp) -> object:
        if isinstance(node.op, ast.Not):
            return not self.truth(node.operand)
        return self.operate(node, node.operand)

    def operate(self, node: ast.BinOp | ast.UnaryOp, *nodes: ast.expr) -> object:
        function = python_operators.OPERATIONS.get(type(node.op))
        if function is None:
            raise self.declined(node, f"has {type(node.op).__name__}")
        operands = tuple(map(self.value, nodes))
        if any(isinstance(v, self.domain.symbols) for v in operands):
            return self.compute(node, function, operands, {})
        operands = tuple(self.settled(node, v) for v in operands)
        if not all(map(is_plain, operands)):
            raise self.declined(node, f"computes {ast.unparse(node)}")
        return function(*operands)

    def compute(
        self,
        node: ast.expr,
        function: Callable[..., object],
        args: Sequence[object],
        named: Mapping[str, object],
    ) -> object:
        with self.at(node):
            compute = self.domain.call_child if isinstance(function, Child) else self.domain.compute
            return compute(function, args, named)

    def _compare(self, node: ast.Compare) -> object:
        values = [self.value(n) for n in (node.left, *node.comparators)]
        for i, kind in enumerate(node.ops):
            if not self.compare(node, kind, values[i], values[i + 1]):
                return False
        return True

    def compare(self, node: ast.Compare, kind: ast.cmpop, a: object, b: object) -> bool:
        if isinstance(kind, ast.Is | ast.IsNot):
            if b is not None and not isinstance(b, bool):
                raise self.declined(node, f"compares the identity of {ast.unparse(node)}")
            if isinstance(a, Child):
                self.domain.record(SELF, (a.name, "__class__"), type(self.domain.module.get_submodule(a.name)))
                return isinstance(kind, ast.IsNot)
            if isinstance(a, self.domain.symbols):
                if b is not None:
                    a = self.settled(node, a)
                with self.at(node):
                    return self.domain.is_none(a) is isinstance(kind, ast.Is)
        a, b = self.settled(node, a), self.settled(node, b)
        if not (is_plain(a) and is_plain(b)):
            raise self.declined(node, f"compares {ast.unparse(node)}")
        return bool(python_operators.COMPARED[type(kind)](a, b))

    def _subscript(self, node: ast.Subscript) -> object:
        value, index = self.value(node.value), self.value(node.slice)
        if isinstance(value, self.domain.symbols):
            return self.compute(node, operator.getitem, (value, index), {})
        if isinstance(value, Child) and type(index) is int:
            with self.at(node):
                return self.domain.item(value, index)
        if isinstance(value, Named) and kinds.makes_activations(value.value) and isinstance(index, str):
            made = value.value.get(index)
            if isinstance(made, type) and (made in _ACTIVATIONS or made.__init__ is torch.nn.Module.__init__):
                self.domain.record(value.root, value.path, value.value)
                self.domain.record(value.root, (*value.path, f"get({index!r})"), made)
                return Activation(made)
        if not isinstance(value, tuple | list) or not isinstance(index, int | slice):
            raise self.declined(node, f"reads {ast.unparse(node)}")
        found = value[index]
        return type(value)(found) if isinstance(index, slice) else found

    def _name(self, node: ast.Name) -> object:
        code, name = self.function.__code__, node.id
        if name in self.variables:
            return self.variables[name]
        if name in code.co_freevars:
            cell = self.function.__closure__[code.co_freevars.index(name)]
            return self.read(node, cell, ("cell_contents",), cell.cell_contents)
        if name in code.co_varnames or name in code.co_cellvars:
            raise self.declined(node, f"reads {name}")
        names = self.function.__globals__
        found = names[name] if name in names else getattr(builtins, name, self)
        if found is self:
            raise self.declined(node, f"reads {name}, which is not there")
        return self.read(node, names, (name,), found)

    def read(self, node: ast.expr, root: object, path: tuple[str, ...], value: object) -> object:
        """A value that was read: itself if it can be compared with what it is later, or a `Named`."""
        if is_plain(value):
            self.domain.record(root, path, value)
            return value
        is_named = isinstance(value, FunctionType | BuiltinFunctionType | type | ModuleType)
        is_called = self.domain.computes(value) or kinds.called_by(value) is not None
        if is_named or is_called or kinds.makes_activations(value):
            return Named(value, root, path)
        raise self.declined(node, f"reads {ast.unparse(node)}, {with_article(type(value).__name__)}")

    def _attribute(self, node: ast.Attribute) -> object:
        if isinstance(node.value, ast.Call) and ast.unparse(node.value) == "super()":
            return self.inherited_method(node)
        value, name = self.value(node.value), node.attr
        if isinstance(value, self.domain.symbols):
            with self.at(node):
                return self.domain.attribute(value, name)
        if isinstance(value, Child):
            child = self.domain.module.get_submodule(value.name)
            found = vars(child).get(name, self)
            if is_plain(found) and not hasattr(type(inspect.getattr_static(type(child), name, None)), "__set__"):
                return self.read(node, SELF, (*value.name.split("."), name), found)
        if isinstance(value, NewDict) and name in ("copy", "get", "pop"):
            return getattr(value, name)
        if not isinstance(value, Named):
            raise self.declined(node, f"reads {ast.unparse(node)}")
        if value.value is self.domain.module:
            return self.own_attribute(node)
        path = (*value.path, name)
        if isinstance(value.value, ModuleType) and hasattr(value.value, name):
            return self.read(node, value.root, path, getattr(value.value, name))
        if isinstance(value.value, type):
            found = inspect.getattr_static(value.value, name, None)
            if isinstance(found, FunctionType) or is_plain(found):
                return self.read(node, value.root, path, found)
        if kinds.called_by(value.value) is not None:
            found = vars(value.value).get(name, inspect.getattr_static(type(value.value), name, self))
            if is_plain(found):
                return self.read(node, value.root, path, found)
        raise self.declined(node, f"reads {ast.unparse(node)}")

    def own_attribute(self, node: ast.Attribute) -> object:
        """An attribute of the module, looked up in the order that Python uses."""
        module, name = self.domain.module, node.attr
        shared = inspect.getattr_static(type(module), name, None)
        if hasattr(type(shared), "__set__") or isinstance(shared, classmethod) or name == "forward":
            raise self.declined(node, f"reads {ast.unparse(node)}, which is computed")
        if name in vars(module):
            value = vars(module)[name]
        elif isinstance(shared, FunctionType):
            self.domain.record(SELF, ("__dict__", f"__contains__({name!r})"), False)
            return Named(shared, SELF, ("__class__", name), is_method=True)
        elif isinstance(shared, staticmethod):
            return Named(shared.__func__, SELF, (name,))
        elif hasattr(type(module), name):
            value = shared
        elif name in module._parameters or name in module._buffers:
            value = getattr(module, name)
        elif name in module._modules and module._modules[name] is not None:
            return Child(name)
        else:
            raise self.declined(node, f"reads {ast.unparse(node)}, which is not there")
        if isinstance(value, torch.Tensor):
            return self.domain.member(name, value)
        return self.read(node, SELF, (name,), value)

    def inherited_method(self, node: ast.Attribute) -> object:
        """A method that ``super()`` finds."""
        code, cls = self.function.__code__, type(self.domain.module)
        names = self.function.__globals__
        first = self.variables.get(code.co_varnames[0]) if code.co_argcount else None
        if "super" in names or "__class__" not in code.co_freevars or first != Named(self.domain.module, SELF):
            raise self.declined(node, f"reads {ast.unparse(node)}")
        here = self.function.__closure__[code.co_freevars.index("__class__")].cell_contents
        later = cls.__mro__[cls.__mro__.index(here) + 1 :]
        owner = next((c for c in later if node.attr in vars(c)), object)
        found = vars(owner).get(node.attr)
        if not isinstance(found, FunctionType):
            raise self.declined(node, f"reads {ast.unparse(node)}")
        self.domain.record(SELF, ("__class__",), cls)
        return Named(found, owner, (node.attr,), is_method=True)

    def _call(self, node: ast.Call) -> object:
        function = self.value(node.func)
        args = self.items(node.args, kinds.count_of_arguments(function))
        named: dict[str, object] = {}
        for keyword in node.keywords:
            value = self.value(keyword.value)
            if keyword.arg is not None:
                named[keyword.arg] = value
            else:
                with self.at(keyword.value):
                    named |= self.domain.spread(value)
        if isinstance(function, TensorMethod | Child | self.domain.symbols):
            return self.compute(node, function, args, named)
        if isinstance(function, FunctionType):  # defined within the function
            return self.call(function, args, named)
        if isinstance(function, BuiltinFunctionType) and isinstance(function.__self__, NewDict):
            if named or not all(isinstance(key, str) for key in args[:1]):
                raise self.declined(node, f"calls {ast.unparse(node)}")
            made = function(*args)
            return NewDict(made) if function.__name__ == "copy" else made
        if isinstance(function, Activation):
            if function.cls in _ACTIVATIONS:
                return self.compute(node, _ACTIVATIONS[function.cls], args, named)
            self.domain.record(function.cls, ("forward",), function.cls.forward)
            return self.call(function.cls.forward, [function, *args], named)
        if isinstance(function, Named):
            value = function.value
            self.domain.record(function.root, function.path, value)
            if function.is_method:
                return self.call(value, [Named(self.domain.module, SELF), *args], named)
            if self.domain.computes(value):
                return self.compute(node, value, args, named)
            if isinstance(value, BuiltinFunctionType | type) and value in _OF_NUMBERS and not named:
                args = [self.settled(node, v) for v in args]
                if all(map(is_plain, args)) or value is len and isinstance(args[0], tuple):
                    return value(*args)
            elif isinstance(value, FunctionType) and not kinds.is_torchs(value):
                return self.domain.call_plain(value, args, named, lambda: self.call(value, args, named))
            elif (call := kinds.called_by(value)) is not None:
                self.domain.record(function.root, (*function.path, "__class__", "__call__"), call)
                return self.call(call, [function, *args], named)
        raise self.declined(node, f"calls {ast.unparse(node.func)}, which is not known to do the same each time")

    def call(self, function: FunctionType, args: Sequence[object], named: Mapping[str, object]) -> object:
        return _run_function(self.domain, function, args, self.domain.passed_on(function, named), self.depth + 1)
