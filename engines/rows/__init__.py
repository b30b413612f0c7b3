"""The row engine: generates kernels for row programs, which fuse reductions with other operations on the same rows.

`engine` serves ``RowFacts`` on NVIDIA GPUs by one of four schedules. In `by_row` a CTA processes some rows and ends. In
`persistent` CTAs process row after row. In `across` a CTA processes neighbouring rows whose elements are interleaved.
In `over_grid` many CTAs share a row. Tuned knobs are in the tables ``rows.ARCH.json``.
"""

from graphfuse.engines.rows.engine import RowEngine as RowEngine
