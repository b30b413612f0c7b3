"""The page of what is supported is what the engines answer."""

import pytest

import support_tables
from graphfuse import data_type, norm_forward_phase
from graphfuse.base.errors import GraphfuseError
from graphfuse.ops import OPS


def test_the_page_is_as_written():
    assert support_tables.PATH.read_text() == support_tables.render(), f"run {support_tables.COMMAND}"


def test_every_operation_has_a_line():
    rows = {row[0].strip("`"): row[1:] for row in support_tables.operations()}
    assert list(rows) == list(OPS)
    assert rows["rmsnorm"] == ("", "yes", "yes") and rows["matmul"] == ("", "-", "yes")
    assert rows["softmax"] == ("", "yes", "-") and rows["tanh"][0] == "pointwise"


def test_an_answer_is_of_the_whole_graph():
    def product_behind_a_norm(g):
        return g.matmul(support_tables.normed(g), support_tables.tensor(g, (256, 64)))

    assert "matmul" in support_tables.refusal(product_behind_a_norm)
    assert support_tables.refusal(support_tables.normed) is None


def test_a_sample_that_is_not_valid_is_no_answer(monkeypatch):
    def wrong(g):
        x = support_tables.tensor(g, dtype=data_type.BFLOAT16)
        return g.rmsnorm(x, support_tables.tensor(g, (1, 3)), 1e-6, norm_forward_phase=norm_forward_phase.INFERENCE)[0]

    monkeypatch.setitem(support_tables.SAMPLES, "rmsnorm", wrong)
    with pytest.raises(GraphfuseError, match="rmsnorm"):
        list(support_tables.operations())
