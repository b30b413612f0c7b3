"""The files of tuned knobs: merged, atomic, shared by processes; what cannot be read is a miss with one warning."""

import dataclasses
import json
import os
import subprocess
import sys
import warnings

import pytest

from graphfuse.base.device import CPU, EMULATOR, for_arch
from graphfuse.base.errors import PluginError
from graphfuse.engines.reference import ReferenceEngine
from graphfuse.engines.rows import RowEngine
from graphfuse.tuned_tables import store
from graphfuse.tuned_tables.entry import Source, Timed, TunedEntry

H200 = for_arch("sm_90a")
MINE = Source("user", "H200", "sm_90", "2030-01-02", "580.1", {"graphfuse": "0.1.0"})


@pytest.fixture
def file(monkeypatch, tmp_path):
    """The user's file for H200, not there yet."""
    monkeypatch.setenv("GRAPHFUSE_TUNING_DIR", str(tmp_path / "deep" / "tuning"))
    return store.user_file(H200)


def entry(rows: int = 8, us: float = 1.5, source: Source = MINE, **more) -> TunedEntry:
    return TunedEntry(source, "rows", {"columns": 64, "bias": None}, rows, {"threads": 128}, us, **more)


def test_what_is_added_is_read(file):
    full = entry(others=(Timed({"threads": 64}, 2.0),), published={"warps": 8})
    assert store.read(file) == ()
    assert store.add(file, [full]) and store.read(file) == (full,)
    assert store.add(file, [entry(16)]) and store.read(file) == (full, entry(16))


def test_a_commit_is_kept_where_it_is_known(file):
    known = entry(source=Source("user", "H200", "sm_90", "2030-01-02", "580.1", {}, "0123abcd"))
    store.add(file, [known, entry(16)])
    assert {e.source.commit for e in store.read(file)} == {"0123abcd", None}
    sources = json.loads(file.read_text())["sources"]
    assert sorted("commit" in source for source in sources) == [False, True]
    damaged = json.loads(file.read_text())
    damaged["sources"][0]["commit"] = damaged["sources"][1]["commit"] = 7
    with pytest.raises(ValueError, match="commit is 7"):
        store.parse(json.dumps(damaged).encode())


def test_a_problem_class_has_one_entry_a_device(file):
    store.add(file, [entry(), entry(16)])
    again = entry(us=1.0, source=Source("user", "H200", "sm_90", "2030-02-02"))
    store.add(file, [again])
    assert set(map(repr, store.read(file))) == set(map(repr, (again, entry(16))))


def test_the_text_does_not_depend_on_the_order():
    entries = [entry(rows) for rows in (8, 2, 4)] + [entry(3, source=Source("published", "B200", "sm_100"))]
    assert store.to_text(entries) == store.to_text(entries[::-1])
    assert {e.rows for e in store.parse(store.to_text(entries).encode())} == {2, 3, 4, 8}


def test_planning_sees_a_change_of_the_file(file):
    engines = [RowEngine(), ReferenceEngine()]
    assert store.tunings(engines, H200).own == ()
    store.add(file, [entry()])
    assert store.tunings(engines, H200).own == (entry(),)
    file.unlink()
    assert store.tunings(engines, H200).own == ()


def test_devices_and_engines_that_are_not_tuned_read_nothing(file):
    file.parent.mkdir(parents=True)
    file.write_text("damaged")
    assert store.tunings([ReferenceEngine()], H200) == store.tunings([RowEngine()], CPU) == store.Tunings()
    assert store.user_file(EMULATOR) != file


GOOD = json.loads(store.to_text([entry(), entry(16)]))


def changed(change) -> str:
    content = json.loads(json.dumps(GOOD))
    change(content)
    return json.dumps(content)


DAMAGED = {
    "empty": "",
    "truncated": json.dumps(GOOD)[:-40],
    "binary": "\x00\x01",
    "a list": "[]",
    "no version": changed(lambda c: c.pop("version")),
    "no problems": changed(lambda c: c.pop("problems")),
    "deep": "[" * 100_000,
    "another version": changed(lambda c: c.update(version=3)),
}


@pytest.mark.parametrize("text", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_a_miss_with_one_warning(file, text):
    file.parent.mkdir(parents=True)
    file.write_text(text)
    with pytest.warns(RuntimeWarning, match=f"tuned knobs in {file}") as seen:
        assert store.tunings([RowEngine()], H200).own == () == store.read(file)
    assert len(seen) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.read(file) == ()


ODD = {
    "no entry": lambda e: 5,
    "no source": lambda e: e | {"source": 7},
    "negative source": lambda e: e | {"source": -1},
    "rows": lambda e: e | {"rows": "8"},
    "rows true": lambda e: e | {"rows": True},
    "rows 0": lambda e: e | {"rows": 0},
    "rows no float holds": lambda e: e | {"rows": 10**400},
    "knobs": lambda e: e | {"knobs": [1]},
    "a knob": lambda e: e | {"knobs": {"threads": [1]}},
    "a key": lambda e: e | {"key": {}},
    "us": lambda e: e | {"us": -1},
    "nan": lambda e: e | {"us": float("nan")},
    "us no float holds": lambda e: e | {"us": 10**400},
    "unknown": lambda e: e | {"colour": 1},
    "others": lambda e: e | {"others": [5]},
}


@pytest.mark.parametrize("change", ODD.values(), ids=ODD)
def test_an_odd_entry_is_left_out_alone(file, change):
    text = changed(lambda c: c["problems"][0]["entries"].__setitem__(0, change(c["problems"][0]["entries"][0])))
    file.parent.mkdir(parents=True)
    file.write_text(text)
    with pytest.warns(RuntimeWarning, match="1 of its entries cannot be used") as seen:
        assert [e.rows for e in store.read(file)] == [16]
        store.read(file)
    assert len(seen) == 1
    with pytest.raises(ValueError):
        store.parse(text.encode())


@pytest.mark.parametrize("change", [{"key": "64"}, {"engine": 7}, {"entries": {}}], ids=str)
def test_an_odd_problem_is_left_out_alone(file, change):
    store.add(file, [dataclasses.replace(entry(), key={"columns": 32}), entry(16)])
    content = json.loads(file.read_text())
    content["problems"][1] |= change
    file.write_text(json.dumps(content))
    with pytest.warns(RuntimeWarning, match="1 of its entries cannot be used; the first: a problem is"):
        assert store.read(file) == (entry(16),)


V1 = """{"version": 1,
 "sources": [{"origin": "user", "device": "H200", "arch": "sm_90", "date": "2030-01-02"}],
 "entries": [{"source": 0, "engine": "rows", "key": {"columns": 64, "steps": ["mul"]}, "rows": 8, "knobs": {}}]}"""


def test_what_an_earlier_version_kept_is_not_ignored_silently(file):
    """Its problems had other names. It says how to tune again, and is silent when that is done."""
    file.parent.mkdir(parents=True)
    earlier = file.with_name(file.name.replace(f".v{store.VERSION}.", ".v1."))
    earlier.write_text(V1)
    said = f"tuned knobs in {earlier}: it is of version 1, which is not used.*tune again, by `graphfuse tune` or graph"
    with pytest.warns(RuntimeWarning, match=said) as seen:
        assert store.tunings([RowEngine()], H200).own == () == store.tunings([RowEngine()], H200).own
    assert len(seen) == 1 and earlier.read_text() == V1
    store.add(file, [entry()])
    store._warned.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.tunings([RowEngine()], H200).own == (entry(),)


def test_who_has_no_home_has_tuned_nothing(monkeypatch):
    """A container's user: no HOME, no line in the password file."""
    import pwd

    for name in ("HOME", "XDG_DATA_HOME", "GRAPHFUSE_TUNING_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    found = store.tunings([RowEngine()], H200)
    assert found.own == () and found.first_party


def test_another_devices_entry_is_left_out(file):
    store.add(file, [entry(), entry(source=Source("user", "A100", "sm_80", "2030-01-02"))])
    with pytest.warns(RuntimeWarning, match="another device's"):
        assert store.tunings([RowEngine()], H200).own == (entry(),)


def test_damage_is_written_over_but_another_version_is_left(file):
    file.parent.mkdir(parents=True)
    file.write_text("damaged")
    with pytest.warns(RuntimeWarning):
        assert store.add(file, [entry()])
    assert store.read(file) == (entry(),)
    newer = file.with_name("newer.json")
    newer.write_text(DAMAGED["another version"])
    with pytest.warns(RuntimeWarning, match="version 3.*graphfuse tune.*nothing was added"):
        assert not store.add(newer, [entry()])
    assert newer.read_text() == DAMAGED["another version"]


def test_a_directory_that_cannot_be_used_costs_a_warning(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.warns(RuntimeWarning, match="nothing was added"):
        assert not store.add(tmp_path / "file" / "tuned.json", [entry()])


ADD = """
import sys
from graphfuse.tuned_tables import store
from graphfuse.tuned_tables.entry import Source, TunedEntry
from pathlib import Path
for rows in range(int(sys.argv[2]), int(sys.argv[2]) + 20):
    source = Source("user", "H200", "sm_90", "2030-01-02")
    made = TunedEntry(source, "rows", {"columns": 64}, rows, {"threads": 128}, 1.0)
    assert store.add(Path(sys.argv[1]), [made])
"""


def test_processes_that_add_at_once_lose_nothing(file):
    running = [subprocess.Popen([sys.executable, "-c", ADD, str(file), str(1 + 20 * n)]) for n in range(4)]
    while any(p.poll() is None for p in running):
        store.parse(file.read_bytes()) if file.exists() else None  # whole at any time
    assert [p.returncode for p in running] == [0] * 4
    assert sorted(e.rows for e in store.read(file)) == list(range(1, 81))
    assert {p.name for p in file.parent.iterdir()} == {file.name, f".{file.name}.lock"}


def test_a_first_party_table_that_is_damaged_is_a_bug(tmp_path, monkeypatch):
    package = tmp_path / "shipped_with_a_table"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "own.py").write_text(
        "from graphfuse.engines.rows import RowEngine\nclass Own(RowEngine):\n    name = 'own'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    from shipped_with_a_table.own import Own

    assert store.first_party(Own(), for_arch("sm_80")) == ()
    (package / "own.sm_90.json").write_text(store.to_text([entry()]))
    assert store.first_party(Own(), H200) == (entry(),)
    (package / "own.sm_100.json").write_text("damaged")
    with pytest.raises(PluginError, match="own.sm_100.json"):
        store.first_party(Own(), for_arch("sm_100a"))
    assert os.listdir(package)
