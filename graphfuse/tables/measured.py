"""Times of engines, by family, that ``ranking`` makes entries of.

Written by `python -m graphfuse.benchmarks.ranking --write`.
"""

SOURCES: tuple[dict[str, object], ...] = ()
"""Where times are from, as ``Source.to_json`` has them."""

TIMES: tuple[tuple[int, str, dict[str, float]], ...] = ()
"""(place of the source, family, microseconds by engine)"""
