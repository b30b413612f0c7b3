"""Dictionaries that keep the newest entries."""

import threading

from graphfuse.runtime.bounded_dict import make_room


def test_the_oldest_go():
    kept = dict.fromkeys("abcd", 1) | {"a": 2}
    assert make_room(kept, 5) == [] and len(kept) == 4
    assert make_room(kept, 3) == [2, 1] and [*kept] == ["c", "d"]
    assert make_room(kept, 1) == [1, 1] and not kept and make_room(kept, 1) == []


def test_threads_that_keep_in_one():
    kept, errors = {}, []

    def add(thread: int) -> None:
        try:
            for n in range(20_000):
                make_room(kept, 4)
                kept[thread, n] = n
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=add, args=(n,)) for n in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors and len(kept) <= 4 + len(threads)
