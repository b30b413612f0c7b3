"""Bounded dictionaries, which keep the newest entries."""


def make_room(kept: dict, most: int) -> list:
    """Remove the oldest entries, so that one more makes at most `most`. Returns their values.

    Other threads may change `kept` at the same time."""
    dropped = []
    while len(kept) >= most:
        try:
            dropped.append(kept.pop(next(iter(kept))))
        except (KeyError, RuntimeError, StopIteration):  # another thread added or removed an entry
            continue
    return dropped
