"""Planning without what the user tuned: records are of what everyone has."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from graphfuse.base import settings


@contextlib.contextmanager
def untuned() -> Iterator[Path]:
    """As if the user had tuned nothing, in this process; the empty directory is for those that it starts."""
    with tempfile.TemporaryDirectory() as empty:
        settings.use_tuning_dir(Path(empty))
        try:
            yield Path(empty)
        finally:
            settings.use_tuning_dir(None)
