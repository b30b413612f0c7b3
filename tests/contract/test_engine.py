"""The grid of a launch by its number of rows."""

import pytest

from graphfuse.contract.engine import ByRows

ROWS = [*range(300), 511, 512, 513, 4095, 4096, 4097, 100_000, (1 << 31) + 1]


@pytest.mark.parametrize(("threads_per_row", "threads"), [(32, 32), (32, 256), (128, 256), (256, 256), (1024, 1024)])
def test_as_many_ctas_as_rows_fill(threads_per_row, threads):
    by_rows = ByRows(1 << 32, threads // threads_per_row)
    for rows in ROWS:
        assert by_rows.grid(rows) == -(-rows * threads_per_row // threads)


@pytest.mark.parametrize("cluster", [2, 8])
def test_a_cluster_for_each_row(cluster):
    assert [ByRows(512, 1, cluster).grid(rows) for rows in (0, 1, 7, 512)] == [0, cluster, 7 * cluster, 512 * cluster]


@pytest.mark.parametrize("least", [0, 1])
@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("together", [1, 2, 4])
@pytest.mark.parametrize("most", [1, 7, 132])
def test_as_few_clusters_as_take_no_more_rounds(most, together, cluster, least):
    by_rows = ByRows(4096, together, cluster, most, least)
    for rows in range(700):
        clusters, beyond = divmod(by_rows.grid(rows), cluster)
        assert not beyond and least <= clusters <= most
        if not rows:
            assert clusters == least
            continue

        def rounds(taking: int, rows: int = rows) -> int:
            """Until the last of so many clusters, which take rows in turns, has none left."""
            return max(len(range(c * together, rows, taking * together)) for c in range(taking))

        assert rounds(clusters) == rounds(most)
        assert clusters == 1 or rounds(clusters - 1) > rounds(most)


@pytest.mark.parametrize(("rows", "most"), [(0, 5), (3, 5), (100, 5), (263, 132), (265, 132), (264, None)])
def test_the_most_that_fewer_rows_take(rows, most):
    """For which scratch memory is there."""
    by_rows = ByRows(rows, 2, 1, most, 1)
    assert by_rows.clusters == max(by_rows.grid(fewer) for fewer in range(rows + 1))
