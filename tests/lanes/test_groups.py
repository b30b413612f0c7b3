"""Tests of one xdist_group run in one process: they share what takes long to make."""

import pytest


@pytest.mark.xdist_group("together")
def test_workers_keep_groups_together(request):
    """xdist adds the group to the test's name; where it does not, it spreads the tests and says nothing."""
    if getattr(request.config.option, "loadgroup", False):
        assert request.node.nodeid.endswith("@together"), "these versions of pytest and xdist do not go together"
