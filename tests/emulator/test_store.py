"""Where compiled files are kept: who may have written what is taken, how much is kept, what goes first."""

import contextlib
import multiprocessing
import os
import shutil
import time
import warnings

import pytest

from graphfuse.emulator import store
from graphfuse.emulator.store import LibraryStore


@pytest.fixture(autouse=True)
def unwarned(monkeypatch):
    monkeypatch.setattr(store, "_given_up", set())
    monkeypatch.setattr(store, "_warned", set())


@pytest.fixture
def kept(monkeypatch, tmp_path):
    """The store in a cache directory of the test's own."""
    monkeypatch.setenv("GRAPHFUSE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("GRAPHFUSE_CACHE_LIMIT", raising=False)
    return store.cache()


def used(kept: LibraryStore, name: str, ago: float) -> None:
    os.utime(kept.folder / name, (time.time() - ago,) * 2)


def test_what_is_kept_is_found(kept):
    assert kept.find("a.so") is None
    path = kept.keep("a.so", b"code")
    assert kept.find("a.so") == path and path.read_bytes().startswith(b"code")
    assert kept.keep("a.so", b"other") == path and path.read_bytes().startswith(b"other")
    assert kept.find("a.so") == path and [p.name for p in kept.folder.iterdir()] == ["a.so"]


@pytest.mark.parametrize("damage", [lambda b: b"", lambda b: b[:-1], lambda b: b[:3], lambda b: b"x" + b[1:]])
def test_a_damaged_entry_is_a_miss(kept, damage):
    path = kept.keep("a.so", b"code")
    path.write_bytes(damage(path.read_bytes()))
    assert kept.find("a.so") is None


@pytest.mark.parametrize("other", ["b.so", "a.o"])
def test_an_entry_under_another_name_is_a_miss(kept, other):
    shutil.copy(kept.keep("a.so", b"code"), kept.folder / other)
    assert kept.find(other) is None


@pytest.mark.parametrize("mode", [0o720, 0o702])
def test_an_entry_that_others_can_write_is_a_miss_with_one_warning(kept, mode):
    for name in ("a.so", "b.so"):
        kept.keep(name, b"code").chmod(mode)
    with pytest.warns(RuntimeWarning, match=r"a\.so is not used \(others can write it\).*compiled again") as seen:
        assert kept.find("a.so") is None and kept.find("b.so") is None
    assert len(seen) == 1
    path = kept.keep("a.so", b"code")  # takes its place
    assert kept.find("a.so") == path


@pytest.mark.skipif(os.getuid() != 0, reason="giving files away takes root")
def test_another_users_entry_is_a_miss(kept):
    os.chown(kept.keep("a.so", b"code"), 12345, -1)
    with pytest.warns(RuntimeWarning, match="it belongs to user 12345"):
        assert kept.find("a.so") is None


def test_what_cannot_be_read_is_a_miss_with_a_warning(kept):
    (kept.folder / "a.so").mkdir()
    with pytest.warns(RuntimeWarning, match=r"a\.so is not used \(Is a directory\)"):
        assert kept.find("a.so") is None


def test_the_folder_is_the_users_alone(kept):
    assert kept.folder.stat().st_mode & 0o777 == 0o700
    assert kept.keep("a.so", b"code").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
def test_a_folder_that_others_can_write_is_not_used(kept, mode):
    kept.folder.chmod(mode)
    with pytest.warns(RuntimeWarning, match=r"compiled kernels are not kept: .*others can write it.*GRAPHFUSE_CACHE"):
        assert store.cache() is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once is enough
        assert store.cache() is None


@pytest.mark.skipif(os.getuid() != 0, reason="giving folders away takes root")
def test_another_users_folder_is_not_used(kept):
    os.chown(kept.folder, 12345, -1)
    with pytest.warns(RuntimeWarning, match="it belongs to user 12345"):
        assert store.cache() is None


def test_a_folder_for_this_process_is_its_users_alone():
    assert store.own() is store.own()
    assert store.own().folder.stat().st_mode & 0o777 == 0o700


def test_what_was_used_longest_ago_goes_first(kept, monkeypatch):
    monkeypatch.setattr(store, "LIMIT", 3 * (1000 + 32))
    for name, ago in (("first", 5000), ("read", 4000), ("second", 3000)):
        kept.keep(name, bytes(1000))
        used(kept, name, ago)
    kept.find("read")  # finding is using
    kept.keep("new", bytes(1000))
    assert {p.name for p in kept.folder.iterdir()} == {"read", "second", "new"}
    kept.keep("newer", bytes(1000))
    assert {p.name for p in kept.folder.iterdir()} == {"read", "new", "newer"}


def test_what_is_about_to_be_loaded_stays(kept, monkeypatch):
    monkeypatch.setattr(store, "LIMIT", 1000)
    for name in ("a", "b", "c"):
        kept.keep(name, bytes(1000))
    assert all(kept.find(name) for name in ("a", "b", "c"))
    for name in ("a", "b"):
        used(kept, name, 2 * store._SPARED)
    kept.keep("d", bytes(1000))
    assert [kept.find(name) is None for name in ("a", "b", "c", "d")] == [True, True, False, False]


def test_what_a_dead_writer_left_goes_too(kept, monkeypatch):
    monkeypatch.setattr(store, "LIMIT", 1000)
    (kept.folder / "tmpabc").write_bytes(bytes(1000))
    used(kept, "tmpabc", 5000)
    kept.keep("a", b"code")
    assert [p.name for p in kept.folder.iterdir()] == ["a"]


def _work(folder, seed: int) -> None:
    kept = LibraryStore(folder)
    for i in range(60):
        name = f"{(seed + i) % 20}"
        found = kept.find(name)
        if found is not None:
            with contextlib.suppress(FileNotFoundError):  # another removed it since
                used(kept, name, 1000)  # so that others remove it
        path = kept.keep(name, name.encode() * 500)
        assert path == folder / name


def test_processes_that_make_room_at_once(kept, monkeypatch):
    monkeypatch.setattr(store, "LIMIT", 5000)
    workers = [multiprocessing.get_context("fork").Process(target=_work, args=(kept.folder, n)) for n in range(4)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    assert [w.exitcode for w in workers] == [0] * 4
    left = list(kept.folder.iterdir())
    assert left and all(p.name.isdigit() for p in left)
    assert all(kept.find(p.name) for p in left)  # whole, whoever wrote them
