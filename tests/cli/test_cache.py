"""`graphfuse cache`: what is listed, found damaged, removed; the limit of users."""

import json
import os
import time

import pytest

from graphfuse.base import settings
from graphfuse.base.errors import SettingError
from graphfuse.emulator import store
from graphfuse.runtime import cache as cubins
from graphfuse.tuned_tables import store as tables
from graphfuse.tuned_tables.entry import Source, TunedEntry


@pytest.fixture(autouse=True)
def unwarned(monkeypatch):
    monkeypatch.setattr(store, "_given_up", set())
    monkeypatch.setattr(store, "_warned", set())
    monkeypatch.setattr(tables, "_warned", set())


def tuned(rows: int) -> TunedEntry:
    return TunedEntry(Source("user", "H200", "sm_90"), "rows", {"columns": 64}, rows, {"threads": 128})


@pytest.fixture
def kept(tmp_path):
    """The files of each kind: two cubins, two of the emulator, a table."""
    for key in (b"a" * 32, b"b" * 32):
        cubins._write(key, b"\x7fELF" + key * 10)
    for name in ("a.so", "b.so"):
        store.cache().keep(name, b"code" * 100)
    table = tmp_path / "tuning" / "h200.v1.json"
    assert tables.add(table, [tuned(1), tuned(2)])
    return {"cubins": [f.path for f in cubins.kept()], "emulator": [f.path for f in store.kept()], "tuned": [table]}


def test_an_empty_cache_is_listed(answer):
    assert [(one["files"], one["bytes"]) for one in answer("cache", "ls")] == [(0, 0)] * 3
    nothing = {"files": 0, "damaged": [], "removed": 0, "failed": []}
    assert answer("cache", "verify") == [{"name": name} | nothing for name in ("cubins", "emulator", "tuned")]


def test_files_are_listed_last_used_first(run, answer, kept):
    (found,) = answer("cache", "ls", "emulator", "--files")
    assert found["files"] == 2 and found["bytes"] == sum(p.stat().st_size for p in kept["emulator"])
    os.utime(kept["emulator"][0], (0, 0))
    (found,) = answer("cache", "ls", "emulator", "--files")
    assert [entry["path"] for entry in found["entries"]] == [str(p) for p in reversed(kept["emulator"])]
    assert found["entries"][1]["used"] == "1970-01-01T00:00:00Z"
    text = run("cache", "ls", "--files").output
    assert all(str(path) in text for paths in kept.values() for path in paths)


def test_clearing_spares_what_was_tuned_unless_it_is_named(answer, kept):
    assert answer("cache", "clear") == [{"name": name, "removed": 2, "failed": []} for name in ("cubins", "emulator")]
    assert not any(path.exists() for path in (*kept["cubins"], *kept["emulator"])) and kept["tuned"][0].exists()
    assert answer("cache", "clear", "tuned") == [{"name": "tuned", "removed": 1, "failed": []}]
    assert not kept["tuned"][0].exists()


def test_sound_files_are_no_fault(run, kept):
    assert run("cache", "verify").exit_code == 0


@pytest.mark.parametrize("kind", ["cubins", "emulator"])
@pytest.mark.parametrize(
    "damage", [lambda b: b"", lambda b: b[:-1], lambda b: b[:5], lambda b: b"x" + b[1:], lambda b: b + b"x"]
)
def test_damage_is_found_and_removed(run, answer, kept, kind, damage):
    bad, good = kept[kind]
    bad.write_bytes(damage(bad.read_bytes()))
    found = {one["name"]: [d["path"] for d in one["damaged"]] for one in answer("cache", "verify", code=1)}
    assert found == {"cubins": [], "emulator": [], "tuned": []} | {kind: [str(bad)]}
    done = run("cache", "verify", "--remove")
    assert done.exit_code == 0 and str(bad) in done.output
    assert not bad.exists() and good.exists() and run("cache", "verify").exit_code == 0


@pytest.mark.parametrize("kind", ["cubins", "emulator"])
def test_an_entry_in_another_ones_place_is_found(answer, kept, kind):
    one, other = kept[kind]
    other.write_bytes(one.read_bytes())
    (found,) = answer("cache", "verify", kind, code=1)
    assert [(d["path"], "another kernel's" in d["why"]) for d in found["damaged"]] == [(str(other), True)]


def test_what_is_found_damaged_is_a_miss(kept):
    """The check is that of the reader, which has the key."""
    for key in (b"a" * 32, b"b" * 32):
        assert cubins._read(key) == b"\x7fELF" + key * 10
    for path in kept["cubins"]:
        assert cubins.damage(path) is None
        path.write_bytes(path.read_bytes()[:-1] + b"?")
        assert cubins.damage(path) == "it is damaged"
    assert cubins._read(b"a" * 32) is cubins._read(b"b" * 32) is None


def test_what_others_can_write_is_found(answer, kept):
    kept["emulator"][0].chmod(0o722)
    (found,) = answer("cache", "verify", "emulator", code=1)
    assert found["damaged"] == [{"path": str(kept["emulator"][0]), "why": "others can write it"}]


def test_a_file_that_is_being_written_is_no_fault_and_an_old_one_is(run, answer, kept):
    scratch = kept["emulator"][0].parent / "tmpabc"
    scratch.write_bytes(b"half")
    scratch.chmod(0o600)
    assert run("cache", "verify").exit_code == 0
    os.utime(scratch, (time.time() - 5000,) * 2)
    (found,) = answer("cache", "verify", "emulator", code=1)
    assert found["damaged"] == [{"path": str(scratch), "why": "a process that died left it"}]


def test_of_a_damaged_table_sound_entries_stay(run, kept):
    (table,) = kept["tuned"]
    table.write_text(table.read_text().replace('"rows": 2', '"rows": "two"'))
    assert run("cache", "verify").exit_code == 1
    assert run("cache", "verify", "--remove").exit_code == 0
    assert tables.parse(table.read_bytes()) == (tuned(1),)


def test_a_table_that_is_none_goes(run, kept):
    (table,) = kept["tuned"]
    table.write_text("{")
    assert run("cache", "verify", "--remove", "tuned").exit_code == 0 and not table.exists()


def test_another_versions_table_is_left_alone(run, kept):
    table = kept["tuned"][0].with_name("h200.v3.json")
    table.write_text('{"version": 3, "what": "ever"}')
    assert run("cache", "verify", "--remove").exit_code == 0 and table.exists()


@pytest.mark.parametrize("text, size", [("1", 1), ("100", 100), ("3K", 3 << 10), ("500M", 500 << 20), ("2G", 2 << 30)])
def test_a_limit_is_a_number_of_bytes(monkeypatch, text, size):
    monkeypatch.setenv("GRAPHFUSE_CACHE_LIMIT", text)
    assert settings.cache_limit(7) == cubins.limit() == store.limit() == size


@pytest.mark.parametrize("text", ["0", "0M", "-1", "1.5G", "5 M", "5m", "much"])
def test_what_is_no_limit_is_refused(monkeypatch, text):
    monkeypatch.setenv("GRAPHFUSE_CACHE_LIMIT", text)
    with pytest.raises(SettingError, match="GRAPHFUSE_CACHE_LIMIT=.*accepted"):
        settings.cache_limit(7)


def test_each_cache_keeps_within_the_users_limit(monkeypatch, kept):
    """What was used last stays."""
    old = time.time() - 5000
    for path in (*kept["cubins"], *kept["emulator"]):
        os.utime(path, (old, old))
    monkeypatch.setenv("GRAPHFUSE_CACHE_LIMIT", "1K")
    assert cubins._read(b"a" * 32) and store.cache().find("a.so")
    cubins._write(b"c" * 32, b"\x7fELF" + b"c" * 320)
    store.cache().keep("c.so", b"code" * 100)
    assert cubins._read(b"a" * 32) and cubins._read(b"c" * 32) and cubins._read(b"b" * 32) is None
    assert {f.path.name for f in store.kept()} == {"a.so", "c.so"}
    for files in (cubins.kept(), store.kept()):
        assert sum(f.size for f in files) <= 1 << 10


@pytest.mark.parametrize("command", [("verify",), ("clear",)])
def test_a_folder_that_cannot_be_read_is_a_fault(run, monkeypatch, command):
    def kept():
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(store, "kept", kept)
    done = run("cache", *command, "emulator")
    assert done.exit_code == 1 and str(store.folder()) in done.output and "Permission denied" in done.output
    (found,) = json.loads(run("cache", "ls", "emulator", "--json").stdout)
    assert "Permission denied" in found["error"]


def test_a_process_that_removes_files_meanwhile_is_no_fault(answer, kept, monkeypatch):
    gone = kept["emulator"][0]
    files = store.kept()
    monkeypatch.setattr(store, "kept", lambda: files)
    gone.unlink()
    assert answer("cache", "verify", "emulator") == [
        {"name": "emulator", "files": 2, "damaged": [], "removed": 0, "failed": []}
    ]
    assert answer("cache", "clear", "emulator")[0]["failed"] == []
