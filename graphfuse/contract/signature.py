"""Check of a launch's arguments against the parameters in the kernel's source.

Parameter lists made by macros, templates or the kernel's own types are not checked.
"""

import re
from collections.abc import Iterator

from graphfuse.contract.arguments import ctype
from graphfuse.contract.engine import Launch

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_QUALIFIER = re.compile(r"\b(const|volatile|__restrict__|__restrict|__grid_constant__)\b|\[\[\w+\]\]")
_POINTER = "pointer"
_TYPES = {
    "float": "float32",
    **dict.fromkeys(("int", "signed", "unsigned", "unsigned int", "std::int32_t", "std::uint32_t"), "int32"),
    **dict.fromkeys(("int32_t", "uint32_t", "gf::i32", "gf::u32"), "int32"),
    **dict.fromkeys(("long", "unsigned long", "long int", "long long", "unsigned long long", "long long int"), "int64"),
    **dict.fromkeys(("int64_t", "uint64_t", "size_t", "std::int64_t", "std::uint64_t", "std::size_t"), "int64"),
    **dict.fromkeys(("gf::i64", "gf::u64"), "int64"),
}
"""Parameter type in C++ -> type of the argument, as in ``arguments.CTYPES``."""
_NONE_FITS = ("bool", "char", "double", "short", "unsigned char", "unsigned short")


def fault(source: str, entry: str, launch: Launch) -> str | None:
    """Fault of the launch's arguments for the source's kernel `entry`; None if none was found."""
    parameters = _parameters(source, entry)
    if parameters is None or any(kind is None for _, kind in parameters):
        return None
    if len(parameters) != len(launch.arguments):
        listed = ", ".join(text for text, _ in parameters)
        return (
            f"arguments are {len(launch.arguments)}; accepted: {len(parameters)}, as the kernel has parameters: "
            f"{entry}({listed})"
        )
    for number, ((text, kind), argument) in enumerate(zip(parameters, launch.arguments, strict=True)):
        given = ctype(argument)
        if given != kind and {given, kind} != {_POINTER, "int64"}:
            accepted = kind if kind else "no argument is passed as that"
            return (
                f"arguments[{number}] is {argument!r}, passed as {given}; accepted: {accepted}, for the kernel's "
                f"parameter {text!r}"
            )
    return None


def _parameters(source: str, entry: str) -> list[tuple[str, str | None]] | None:
    """(text, argument type) of each parameter; None if unknown. A type is None if unknown, "" if no argument fits."""
    written = re.compile(rf'extern\s+"C"[^;{{}}]*?\b{re.escape(entry)}\s*\(')
    head = written.search(source, max(0, source.find("extern")))  # skips the headers, which are long
    if head is None:
        return None
    listed = list(_split(_COMMENT.sub(" ", source[head.end() : head.end() + 16_384])))
    if not listed or any("#" in text for text in listed):
        return None
    if listed in ([""], ["void"]):
        return []
    return [(text, _kind(text)) for text in listed]


def _split(text: str) -> Iterator[str]:
    """The parameters up to the closing bracket; none if it is missing."""
    depth, found, start = 0, [], 0
    for at, character in enumerate(text):
        if character in "([{<":
            depth += 1
        elif depth and character in ")]}>":
            depth -= 1
        elif not depth and character in ",)":
            found.append(" ".join(text[start:at].split()))
            start = at + 1
            if character == ")":
                yield from found
                return


def _kind(text: str) -> str | None:
    plain = _QUALIFIER.sub(" ", text)
    if "&" in plain or "(" in plain:
        return None
    if re.search(r"[*\]]\s*\w*\s*(\[\w*\]\s*)*$", plain):
        return _POINTER
    words = plain.split()
    for words_of_type in (words[:-1], words):  # a parameter may have no name
        name = " ".join(words_of_type)
        if name in _TYPES:
            return _TYPES[name]
        if name in _NONE_FITS:
            return ""
    return None
