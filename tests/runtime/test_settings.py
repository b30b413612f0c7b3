from pathlib import Path

import pytest

from graphfuse.base import settings
from graphfuse.base.errors import GraphfuseError, HomeNotFoundError, SettingError


@pytest.mark.parametrize("value", ["cpu", "emulator", "cuda", "cuda:0", "cuda:12"])
def test_device_is_read_at_call_time(monkeypatch, value):
    assert settings.device() is None
    monkeypatch.setenv("GRAPHFUSE_DEVICE", value)
    assert settings.device() == value


def test_an_empty_device_is_none(monkeypatch):
    monkeypatch.setenv("GRAPHFUSE_DEVICE", "")
    assert settings.device() is None


@pytest.mark.parametrize("value", ["gpu", "cuda:", "cuda:-1", "cuda:x", "CPU", "cuda:0 "])
def test_a_wrong_device_names_variable_value_and_choices(monkeypatch, value):
    monkeypatch.setenv("GRAPHFUSE_DEVICE", value)
    with pytest.raises(SettingError, match="GRAPHFUSE_DEVICE=.*accepted: cpu, cuda, cuda:N") as error:
        settings.device()
    assert repr(value) in str(error.value)


def test_plugins_are_on_unless_they_are_off(monkeypatch):
    for value, wanted in ((None, True), ("", True), ("on", True), ("off", False)):
        monkeypatch.delenv("GRAPHFUSE_PLUGINS", raising=False)
        if value is not None:
            monkeypatch.setenv("GRAPHFUSE_PLUGINS", value)
        assert settings.plugins() is wanted
    for value in ("OFF", "0", "no"):
        monkeypatch.setenv("GRAPHFUSE_PLUGINS", value)
        with pytest.raises(SettingError, match=f"GRAPHFUSE_PLUGINS='{value}' is not known; accepted: on, off"):
            settings.plugins()


def test_nothing_is_verified_unless_it_is_on(monkeypatch):
    assert settings.verify() is False
    monkeypatch.setenv("GRAPHFUSE_VERIFY", "on")
    assert settings.verify() is True
    monkeypatch.setenv("GRAPHFUSE_VERIFY", "1")
    with pytest.raises(SettingError, match="GRAPHFUSE_VERIFY='1' is not known; accepted: on, off"):
        settings.verify()


def test_host_compilers_begin_with_the_users(monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    assert settings.host_compilers() == ("g++", "clang++")
    monkeypatch.setenv("CXX", "/opt/bin/c++")
    assert settings.host_compilers() == ("/opt/bin/c++", "g++", "clang++")


def test_cache_dir_prefers_its_own_variable_then_xdg_then_home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    monkeypatch.setenv("GRAPHFUSE_CACHE_DIR", "~/mine")
    assert settings.cache_dir() == tmp_path / "mine"
    monkeypatch.delenv("GRAPHFUSE_CACHE_DIR")
    assert settings.cache_dir() == Path("/x/graphfuse")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert settings.cache_dir() == tmp_path / ".cache/graphfuse"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert settings.cache_dir() == tmp_path / ".cache/graphfuse"


def test_tuning_dir_prefers_its_own_variable_then_xdg_then_home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_DATA_HOME", "/x")
    monkeypatch.setenv("GRAPHFUSE_TUNING_DIR", "~/mine")
    assert settings.tuning_dir() == tmp_path / "mine"
    monkeypatch.delenv("GRAPHFUSE_TUNING_DIR")
    assert settings.tuning_dir() == Path("/x/graphfuse/tuning")
    monkeypatch.delenv("XDG_DATA_HOME")
    assert settings.tuning_dir() == tmp_path / ".local/share/graphfuse/tuning"


@pytest.mark.parametrize("value", ["here", "~nobody_at_all/here"])
@pytest.mark.parametrize("name", ["cache_dir", "tuning_dir"])
def test_a_relative_directory_is_refused(monkeypatch, name, value):
    monkeypatch.setenv(f"GRAPHFUSE_{name.upper()}", value)
    with pytest.raises(SettingError, match=f"GRAPHFUSE_{name.upper()}='{value}'.*absolute"):
        getattr(settings, name)()


@pytest.mark.parametrize(("name", "other"), [("cache_dir", "XDG_CACHE_HOME"), ("tuning_dir", "XDG_DATA_HOME")])
def test_a_user_without_a_home_directory_is_told_what_to_set(monkeypatch, name, other):
    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    for variable in (f"GRAPHFUSE_{name.upper()}", other):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(HomeNotFoundError, match=f"no home directory.*set GRAPHFUSE_{name.upper()} or {other}"):
        getattr(settings, name)()
    monkeypatch.setenv(other, "/x")
    assert getattr(settings, name)().is_relative_to("/x/graphfuse")


def test_errors_of_settings_are_graphfuses_and_values():
    assert issubclass(SettingError, GraphfuseError) and issubclass(SettingError, ValueError)


def test_toolkit_roots_are_those_set_cuda_home_first(monkeypatch):
    assert settings.toolkit_roots() == ()
    monkeypatch.setenv("CUDA_PATH", "/b")
    assert settings.toolkit_roots() == (("CUDA_PATH", Path("/b")),)
    monkeypatch.setenv("CUDA_HOME", "/a")
    assert settings.toolkit_roots() == (("CUDA_HOME", Path("/a")), ("CUDA_PATH", Path("/b")))
