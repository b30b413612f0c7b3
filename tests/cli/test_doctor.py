"""`graphfuse doctor`: each fault, planted, is found and told with the command that mends it."""

import json
import os
import stat
import sys
from pathlib import Path

import pytest
import torch

from graphfuse.base.device import for_arch
from graphfuse.base.errors import DeviceError, PluginError, ToolkitNotFoundError
from graphfuse.cli import faults
from graphfuse.emulator import store
from graphfuse.planning import registry as plugins
from graphfuse.runtime import cache as cubins
from graphfuse.runtime import device, toolkit
from graphfuse.tuned_tables import store as tables

LOOKS = {
    "settings": faults.settings,
    "device": faults.driver,
    "torch": faults.torch,
    "NVRTC": faults.nvrtc,
    "C++ compiler": faults.compiler,
    "cubins": faults.caches,
    "emulator": faults.caches,
    "tuned": faults.caches,
    "tables": faults.tables,
    "plug-ins": faults.installed,
}


@pytest.fixture
def found():
    """found(check) -> (level, what, mend) of a check's findings."""
    return lambda check: [(f.level, f.what, f.mend) for f in LOOKS[check]() if f.check == check]


@pytest.fixture
def gpu(monkeypatch):
    """A machine whose driver reports an H200."""
    monkeypatch.setattr(device, "count", lambda: 1)
    monkeypatch.setattr(device, "get", lambda spec=None: for_arch("sm_90a"))


def test_nothing_wrong_is_no_fault(run):
    """As on the machines that run these tests: a compiler, NVRTC, nothing kept."""
    done = run("doctor")
    assert done.exit_code == 0 and "0 faults" in done.output, done.output


def test_a_fault_ends_the_command_with_1_and_the_others_are_looked_for(run, monkeypatch):
    monkeypatch.setenv("GRAPHFUSE_DEVICE", "gpu")
    done = run("doctor")
    assert done.exit_code == 1 and "1 fault\n" in done.output and "to mend it: unset GRAPHFUSE_DEVICE" in done.output
    done = run("doctor", "--json")
    findings = json.loads(done.stdout)
    assert done.exit_code == 1 and {f["check"] for f in findings} == set(LOOKS)
    assert [f["check"] for f in findings if f["level"] == "fault"] == ["settings"]


def test_a_check_that_fails_itself_is_a_finding(monkeypatch):
    def check():
        raise DeviceError("the driver is in a bad mood")
        yield

    monkeypatch.setattr(faults, "CHECKS", (check, faults.settings))
    failed, fine = faults.findings()
    assert (failed.check, failed.level) == ("check", "fault") and "bad mood" in failed.what and fine.level == "ok"


@pytest.mark.parametrize(
    "name, value",
    [
        ("GRAPHFUSE_DEVICE", "gpu"),
        ("GRAPHFUSE_CACHE_DIR", "here"),
        ("GRAPHFUSE_CACHE_LIMIT", "much"),
        ("GRAPHFUSE_VERIFY", "maybe"),
        ("GRAPHFUSE_RANKS_TIMEOUT", "-1"),
    ],
)
def test_a_wrong_setting(found, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    ((level, what, mend),) = found("settings")
    assert level == "fault" and value in what and mend == f"unset {name}"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there(found, monkeypatch):
    monkeypatch.setenv("GRAPHFUSE_DEVICE", "cuda:3")
    ((level, what, mend),) = found("settings")
    assert level == "fault" and "cuda:3" in what and mend == "unset GRAPHFUSE_DEVICE"


@pytest.mark.parametrize("there, level", [(True, "fault"), (False, "note")])
def test_no_nvrtc_is_a_fault_beside_a_gpu(found, monkeypatch, request, there, level):
    def load():
        raise ToolkitNotFoundError("NVRTC was not found\nTried in this order:\n  - CUDA_HOME: not set")

    if there:
        request.getfixturevalue("gpu")
    monkeypatch.setattr(toolkit, "load", load)
    ((its, what, mend),) = found("NVRTC")
    assert (its, mend) == (level, toolkit.mend()) and what.startswith("NVRTC was not found")


def test_an_nvrtc_too_old_for_the_device():
    (finding,) = faults.nvrtc_serves("12.4", frozenset({80, 90}), 13000, [for_arch("sm_90a"), for_arch("sm_120")])
    assert finding.level == "fault" and "RTX PRO 6000 (SM120)" in finding.what and "SM80, SM90" in finding.what
    assert finding.mend == 'pip install --upgrade "nvidia-cuda-nvrtc>=13"'


def test_a_driver_too_old_for_nvrtc():
    (finding,) = faults.nvrtc_serves("13.0", frozenset({90}), 12040, [for_arch("sm_90a")])
    assert finding.level == "fault" and "the driver serves CUDA 12.4" in finding.what and finding.mend


@pytest.mark.parametrize("driver", [13000, 13020, None])
def test_an_nvrtc_that_serves(driver):
    (finding,) = faults.nvrtc_serves("13.5", frozenset({75, 90, 121}), driver, [for_arch("sm_90a")])
    assert finding.level == "ok" and finding.what == "13.5, for SM75 to SM121"


@pytest.mark.compile
def test_what_nvrtc_compiles_for_is_asked():
    assert {80, 90, 100, 120} <= toolkit.architectures()


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch is a build for CUDA")
def test_torch_without_cuda_beside_a_gpu(found, gpu, monkeypatch):
    monkeypatch.setattr(device, "driver_version", lambda: 99000)
    ((level, what, mend),) = found("torch")
    assert level == "fault" and "built without CUDA" in what and mend.endswith("pip install torch")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_the_driver_does_not_report(found, monkeypatch, tmp_path):
    monkeypatch.setattr(faults, "_DRIVER_NODE", tmp_path)
    ((level, what, mend),) = found("device")
    assert level == "fault" and str(tmp_path) in what and mend == "nvidia-smi"


def test_no_compiler(found, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    ((level, what, mend),) = found("C++ compiler")
    assert level == ("note" if device.count() else "fault") and "g++ (not found)" in what
    assert mend == "apt-get install g++"


def test_a_compiler_that_compiles_nothing(found, monkeypatch, tmp_path):
    fake = tmp_path / "fake++"
    fake.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "fake 1.0" && exit\necho "no cmath" >&2; exit 1\n')
    fake.chmod(0o755)
    monkeypatch.setenv("CXX", str(fake))
    ((_, what, mend),) = found("C++ compiler")
    assert what == "fake 1.0 makes no library of C++17: no cmath" and mend == "apt-get install g++"


def test_a_file_in_the_place_of_the_cache(found, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GRAPHFUSE_CACHE_DIR", str(tmp_path / "file" / "cache"))
    for kind in ("cubins", "emulator"):
        ((level, what, mend),) = found(kind)
        assert level == "fault" and "is no folder" in what and mend == "unset GRAPHFUSE_CACHE_DIR"
    monkeypatch.delenv("GRAPHFUSE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for kind in ("cubins", "emulator"):
        ((level, what, mend),) = found(kind)
        assert level == "fault" and "is no folder" in what and mend == f"rm {tmp_path}/file"


@pytest.mark.skipif(os.getuid() == 0, reason="permissions do not bind root")
def test_a_cache_that_cannot_be_written(found, monkeypatch, tmp_path):
    monkeypatch.delenv("GRAPHFUSE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "graphfuse" / "cubin"
    folder.mkdir(parents=True)
    folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
    ((level, what, mend),) = found("cubins")
    assert level == "fault" and "cannot be read and written" in what and mend == f"chmod u+rwx {folder}"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="there is no folder that nobody can write")
def test_a_setting_that_names_what_cannot_be_written(found, monkeypatch):
    """The folder stays as it is: it is the setting that is wrong."""
    for variable, kinds in (("CACHE", ("cubins", "emulator")), ("TUNING", ("tuned",))):
        monkeypatch.setenv(f"GRAPHFUSE_{variable}_DIR", "/proc/x")
        for kind in kinds:
            ((level, what, mend),) = found(kind)
            assert level == "fault" and "/proc cannot be read and written" in what
            assert mend == f"unset GRAPHFUSE_{variable}_DIR"
    monkeypatch.delenv("GRAPHFUSE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc")
    assert found("cubins")[0][2] == "chmod u+rwx /proc"


def test_a_cache_that_others_can_write(found, tmp_path):
    folder = tmp_path / "cache" / "emulator"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    ((level, what, mend),) = found("emulator")
    assert level == "fault" and "others can write it" in what and mend == f"chmod -R go-w {folder}"
    folder.chmod(0o755)
    assert found("emulator")[0][0] == "ok"


@pytest.mark.skipif(os.getuid() != 0, reason="giving folders away takes root")
def test_another_users_cache(found, tmp_path):
    folder = tmp_path / "cache" / "cubin"
    folder.mkdir(parents=True)
    os.chown(folder, 12345, -1)
    ((level, what, mend),) = found("cubins")
    assert level == "fault" and "belongs to user 12345" in what and mend == f"sudo chown -R 0 {folder}"


def test_no_home_directory(found, monkeypatch):
    for name in ("GRAPHFUSE_CACHE_DIR", "XDG_CACHE_HOME", "GRAPHFUSE_TUNING_DIR", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)

    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    for kind, variable in (("cubins", "CACHE"), ("emulator", "CACHE"), ("tuned", "TUNING")):
        ((level, what, mend),) = found(kind)
        assert level == "fault" and "no home directory" in what
        assert mend == f"export GRAPHFUSE_{variable}_DIR=/var/tmp/graphfuse"


def test_a_full_disk(found, monkeypatch):
    monkeypatch.setattr(faults, "_LEAST_ROOM", 1 << 80)
    ((level, what, mend),) = found("cubins")
    assert level == "fault" and "is full" in what and mend == "graphfuse cache clear"


@pytest.mark.parametrize("kind", ["cubins", "emulator", "tuned"])
def test_damaged_files_and_their_command_mends_them(found, run, kind, monkeypatch, tmp_path):
    monkeypatch.setattr(store, "_given_up", set())
    cubins._write(b"k" * 32, b"code")
    store.cache().keep("a.so", b"code")
    (tmp_path / "tuning").mkdir()
    tables._replace(tmp_path / "tuning" / "h200.v1.json", tables.to_text(()))
    files = {"cubins": cubins.kept(), "emulator": store.kept(), "tuned": tables.kept()}
    assert found(kind)[0][0] == "ok"
    (file,) = files[kind]
    file.path.write_bytes(file.path.read_bytes()[:-4])
    ((level, what, mend),) = found(kind)
    assert level == "fault" and str(file.path) in what and mend == f"graphfuse cache verify --remove {kind}"
    assert run(*mend.split()[1:]).exit_code == 0
    assert found(kind)[0][0] == "ok"


def test_a_table_of_an_engine_that_cannot_be_read(found, monkeypatch):
    def first_party(engine, chip):
        raise PluginError(f"table {engine.name}.json: it is no file of tuned knobs")

    monkeypatch.setattr(tables, "first_party", first_party)
    ((level, what, mend),) = found("tables")
    assert level == "fault" and "no file of tuned knobs" in what
    assert mend == "pip install --force-reinstall --no-deps graphfuse"


@pytest.fixture
def package(tmp_path, monkeypatch):
    """package(entry point, code): an installed distribution that offers it."""

    def install(offer: str, code: str = "") -> None:
        (tmp_path / "some_plugin.py").write_text(code)
        about = tmp_path / "some_plugin-1.2.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: some-plugin\nVersion: 1.2\n")
        (about / "entry_points.txt").write_text(f"[graphfuse.engines]\n{offer}\n")
        monkeypatch.syspath_prepend(tmp_path)

    plugins.forget()
    yield install
    plugins.forget()
    sys.modules.pop("some_plugin", None)


@pytest.mark.parametrize(
    "code, said",
    [
        ("raise RuntimeError('half a release')", "RuntimeError: half a release"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("ENGINE = 7", "must give Engine objects, got 7"),
        ("", "has no attribute 'ENGINE'"),
    ],
)
def test_a_broken_plug_in(found, package, answer, code, said):
    package("mine = some_plugin:ENGINE", code)
    ((level, what, mend),) = found("plug-ins")
    assert level == "fault" and said in what
    assert "engine 'mine' of some-plugin 1.2 is left out: entry point 'mine' in graphfuse.engines" in what
    assert mend == "pip uninstall --yes some-plugin"
    (listed,) = answer("info")["plugins"]
    assert listed["name"] == "mine" and said in listed["error"]


def test_a_plug_in_that_clashes(found, package):
    code = "from graphfuse import engines\nclass Mine(type(engines.ALL[-1])):\n    pass\nENGINE = Mine()\n"
    package("again = some_plugin:ENGINE", code)
    ((level, what, mend),) = found("plug-ins")
    assert level == "fault" and "graphfuse has one of that name" in what and mend == "pip uninstall --yes some-plugin"


def test_a_plug_in_that_works(found, package, answer):
    code = "from graphfuse import engines\nclass Mine(type(engines.ALL[-1])):\n    name = 'mine'\nENGINE = Mine()\n"
    package("mine = some_plugin:ENGINE", code)
    assert found("plug-ins") == [("ok", "some-plugin 1.2", "")]
    assert answer("info")["plugins"][0]["error"] is None
