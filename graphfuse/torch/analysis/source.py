"""The syntax tree of a function, from its source file."""

import ast
import functools
import linecache
from types import CodeType, FunctionType

from graphfuse.torch.analysis.symbols import ForwardDeclined
from graphfuse.torch.analysis.traversal import reachable

Tree = ast.FunctionDef | ast.Lambda


def syntax_tree(function: FunctionType) -> Tree:
    """The syntax tree of a function. Raises ForwardDeclined if its source is missing, or is not what runs."""
    code = function.__code__
    source = "".join(linecache.getlines(code.co_filename, function.__globals__))
    try:
        codes, nodes = _parsed(source)
    except (SyntaxError, ValueError):
        codes, nodes = (), {}
    found = nodes.get((code.co_firstlineno, code.co_name), ())
    if len(found) != 1 or code not in codes:
        raise ForwardDeclined(f"is {code.co_name}, whose source is not there")
    return found[0]


@functools.lru_cache(maxsize=32)
def _parsed(source: str) -> tuple[tuple[CodeType, ...], dict[tuple[int, str], list[Tree]]]:
    """The code of all functions of a file, and their trees by line and name."""
    tree = ast.parse(source)
    file = compile(tree, "", "exec", dont_inherit=True)
    _, *codes = reachable([file], lambda code: [c for c in code.co_consts if isinstance(c, CodeType)])
    nodes: dict[tuple[int, str], list[Tree]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            line = min(n.lineno for n in (node, *node.decorator_list))
            nodes.setdefault((line, node.name), []).append(node)
        elif isinstance(node, ast.Lambda):
            nodes.setdefault((node.lineno, "<lambda>"), []).append(node)
    return tuple(codes), nodes
