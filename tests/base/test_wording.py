"""Messages count in words, and no type stands behind the wrong article."""

import pytest

from graphfuse.base.wording import counted, in_columns, with_article


def test_one_thing_and_others():
    assert [counted(n, "node") for n in range(3)] == ["0 nodes", "1 node", "2 nodes"]
    assert [counted(n, "entry", "entries") for n in (1, 2)] == ["1 entry", "2 entries"]


@pytest.mark.parametrize("noun", ["int", "array", "object", "ndarray", "Engine", "UntypedStorage", "OrderedDict"])
def test_an(noun):
    assert with_article(noun) == f"an {noun}"


@pytest.mark.parametrize("noun", ["str", "list", "Tensor", "uint8", "UniformDistribution", "NoneType", "_Undefined"])
def test_a(noun):
    assert with_article(noun) == f"a {noun}"


def test_cells_stand_below_one_another():
    rows = [("name", "us", ""), ("a longer one", 1.5, "note"), ("b", 12.25, "")]
    assert [*in_columns(rows, right=(1,))] == [
        "name             us",
        "a longer one    1.5  note",
        "b             12.25",
    ]
    assert [*in_columns([])] == []
