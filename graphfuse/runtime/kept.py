"""Dictionaries of bounded size, which keep the newest entries."""


def make_room(kept: dict, most: int) -> list:
    """Drop the oldest entries until one more makes at most so many; their values. Other threads may change `kept`
    meanwhile."""
    dropped = []
    while len(kept) >= most:
        try:
            dropped.append(kept.pop(next(iter(kept))))
        except (KeyError, RuntimeError, StopIteration):  # another thread added or dropped one just now
            continue
    return dropped
