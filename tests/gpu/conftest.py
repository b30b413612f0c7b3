"""The GPU lane: a kernel cache of its own for the session, which all workers share, and memory given back between
tests."""

import os
import subprocess
import sys

import pytest


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory):
    before, folder = os.environ.get("GRAPHFUSE_CACHE_DIR"), tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    os.environ["GRAPHFUSE_CACHE_DIR"] = str(folder / "kernels")
    yield
    if before is None:
        del os.environ["GRAPHFUSE_CACHE_DIR"]
    else:
        os.environ["GRAPHFUSE_CACHE_DIR"] = before


@pytest.fixture(autouse=True)
def given_back():
    """Other processes run tests on the same device: much that is kept for later is theirs."""
    yield
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 1 << 29:
        torch.cuda.empty_cache()


@pytest.fixture
def room():
    """room(bytes): skip unless so much device memory is free; it is given back after the test."""
    import torch

    def need(size: int) -> None:
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        if free < size:
            pytest.skip(f"needs {size >> 30} GiB of device memory; {free >> 30} GiB are free")

    yield need
    torch.cuda.empty_cache()


@pytest.fixture
def python():
    """Start code in a new process: python(code, NAME=value...) -> Popen with text pipes."""

    def start(code: str, **variables: str) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


@pytest.fixture(scope="module")
def cudnn():
    """The cuDNN frontend; a test that needs it is skipped where that or libcudnn is missing."""
    from graphfuse.contract.engine import No
    from graphfuse.engines.cudnn import package

    found = package.load()
    if isinstance(found, No):
        pytest.skip(str(found))
    return found
