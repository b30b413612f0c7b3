"""Row programs as kernels: reductions of rows, fused with the operations on the same rows around them.

`engine` serves ``RowFacts`` on NVIDIA GPUs by one of four schedules. In `by_row` a CTA takes some rows and ends. In
`persistent` CTAs take row after row. In `across` a CTA takes neighbouring rows whose elements are interleaved. In
`over_grid` many CTAs share a row. Tuned knobs are in the tables ``rows.ARCH.json``.
"""

from graphfuse.engines.rows.engine import RowEngine as RowEngine
