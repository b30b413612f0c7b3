"""Options of functions, by name, with the values that they accept."""

from collections.abc import Mapping

from graphfuse.base.errors import VariantPackError, VariantPackTypeError
from graphfuse.ops.collectives import MOST_RANKS

_SWITCH = (False, True)
_ASKS = "needs_"
"""Prefix of the names of switches that request a gradient."""

VALUES: Mapping[str, tuple[object, ...]] = {
    "enable_pdl": (None, True, False),
    "block_size": (16, 32),
    "rank": tuple(range(MOST_RANKS)),
    "group_size": (None, 128),
    "scale_format": (None, "e4m3", "ue8m0"),
    "output_both_sf_layouts": (False, True),
    "is_neox": (True, False),
    "is_sf_swizzled_layout": _SWITCH,
}

NUMBERS: Mapping[str, tuple[type, ...]] = {
    "ignore_index": (int,),
    "label_smoothing": (float, int),
    "z_loss": (float, int),
}
"""Types of options that may be any number that the graph accepts; the number is part of the kernel."""


def schema(name: str) -> str:
    """Type of an option in the syntax of torch.library."""
    if name in NUMBERS:
        return NUMBERS[name][0].__name__
    values = _accepted(name) or (0.0,)
    return type(values[-1]).__name__ + "?" * (None in values)


def check(options: Mapping[str, object]) -> None:
    """Raises VariantPackError for a value that is not accepted, VariantPackTypeError if its type is the reason."""
    for name, value in options.items():
        if name in NUMBERS:
            if type(value) not in NUMBERS[name]:
                accepted = " or ".join(kind.__name__ for kind in NUMBERS[name])
                raise VariantPackTypeError(f"{name} is {type(value).__name__}; accepted: {accepted}")
            continue
        accepted = _accepted(name)
        if any(type(value) is type(a) and value == a for a in accepted):
            continue
        known_type = any(type(value) is type(a) for a in accepted)
        error = VariantPackError if known_type else VariantPackTypeError
        given = repr(value) if known_type else type(value).__name__
        raise error(f"{name} is {given}; accepted: {', '.join(map(repr, accepted))}")


def _accepted(name: str) -> tuple[object, ...]:
    """The accepted values of an option, with None first; empty for a scalar that each call may change."""
    return _SWITCH if name.startswith(_ASKS) else VALUES.get(name, ())
