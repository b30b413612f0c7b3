"""JSON that somebody edited: one value of it replaced by another, dropped or repeated."""

import copy

from hypothesis import strategies as st

JUNK = (
    *(None, True, False, 0, 1, -1, 2**31, 2**63, 10**40, 0.5, "", "x", "add", "FLOAT", "NOT_SET", "rows", "reference"),
    *([], {}, [0], [1, 1], [[[1]]], [-1], [2**62, 2**62], {"float": "nan"}, {"float": "1e999"}, {"float": 3}),
    *({"enum": "data_type.FLOAT"}, {"enum": "os.system"}, {"slice": [0, 1, 0]}, {"slice": []}, "0x1p+0", "\ud800"),
)


def places(value: object, here: tuple = ()) -> list[tuple]:
    """The path of every value in a JSON value, itself first."""
    found = [here]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, child in items:
        found += places(child, (*here, name))
    return found


def changed(value: object, path: tuple, change) -> object:
    """A copy in which `change(parent, key)` was done at a path that is not empty."""
    made = copy.deepcopy(value)
    parent = made
    for name in path[:-1]:
        parent = parent[name]
    change(parent, path[-1])
    return made


@st.composite
def edits(draw, value: object) -> object:
    """The JSON value with one to three edits."""
    made = value
    for _ in range(draw(st.integers(1, 3))):
        paths = places(made)[1:]
        if not paths:
            break
        path, kind = draw(st.sampled_from(paths)), draw(st.sampled_from(("junk", "junk", "near", "drop", "again")))
        junk, near = draw(st.sampled_from(JUNK)), draw(st.integers(-3, 3))

        def change(parent, key, kind=kind, junk=junk, near=near):
            if kind == "drop":
                del parent[key]
            elif kind == "again" and isinstance(parent, list):
                parent.insert(key, copy.deepcopy(parent[key]))
            elif kind == "near" and type(parent[key]) is int:
                parent[key] += near
            else:
                parent[key] = copy.deepcopy(junk)

        made = changed(made, path, change)
    return made
