"""What `graphfuse info` finds."""

import sys
from importlib import metadata
from pathlib import Path

import graphfuse


def test_versions_places_and_settings(answer, monkeypatch, tmp_path):
    monkeypatch.setenv("GRAPHFUSE_CACHE_LIMIT", "3M")
    monkeypatch.setenv("CXX", "/no/such/compiler")
    found = answer("info")
    assert found["graphfuse"] == metadata.version("graphfuse")
    assert Path(found["location"]) == Path(graphfuse.__file__).parent
    assert sys.executable in found["python"]
    assert found["versions"]["torch"] == metadata.version("torch")
    assert found["settings"] == {
        "GRAPHFUSE_CACHE_DIR": str(tmp_path / "cache"),
        "GRAPHFUSE_CACHE_LIMIT": "3M",
        "GRAPHFUSE_TUNING_DIR": str(tmp_path / "tuning"),
        "CXX": "/no/such/compiler",
    } | {name: value for name, value in found["settings"].items() if name.startswith(("CUDA_", "GIT_"))}
    kept = {one["name"]: one for one in found["kept"]}
    assert kept["cubins"]["folder"] == str(tmp_path / "cache" / "cubin") and kept["cubins"]["limit"] == 3 << 20
    assert kept["tuned"]["limit"] is None


def test_text_has_what_json_has(run, answer, tmp_path):
    found, text = answer("info"), run("info").output
    for said in (found["graphfuse"], found["location"], found["versions"]["torch"], str(tmp_path / "cache" / "cubin")):
        assert said in text


def test_what_is_not_there_is_told(answer, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("GRAPHFUSE_DEVICE", "gpu")
    monkeypatch.setenv("GRAPHFUSE_CACHE_DIR", "here")
    found = answer("info")
    checks = {one["check"]: one["what"] for one in found["checks"]}
    assert "needs a C++17 compiler" in checks["C++ compiler"]
    assert "is not a device" in " ".join(one["what"] for one in found["checks"] if one["check"] == "settings")
    assert "absolute path" in found["kept"][0]["error"]
