import json
import os
import subprocess
import sys
import threading
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from graphfuse.runtime import cache, nvrtc, toolkit

pytestmark = [pytest.mark.compile, pytest.mark.torch]

ARCH = "sm_90a"


@pytest.fixture
def source(request) -> str:
    """A kernel that no other test compiles."""
    return f'extern "C" __global__ void k(float* p) {{ p[0] = 1; }} // {request.node.name}\n'


@pytest.fixture
def forget(monkeypatch):
    """Forget what memory holds, as a new process would."""
    monkeypatch.setattr(cache, "_warned", False)
    return cache._kernels.clear


def counted(source: str, arch: str = ARCH) -> tuple[bytes, tuple[int, int, int]]:
    """The cubin, and what getting it added to (compiled, memory_hits, disk_hits)."""
    before = cache.statistics()
    code = cache.cubin(source, arch, "k")
    after = cache.statistics()
    names = ("compiled", "memory_hits", "disk_hits")
    return code, tuple(getattr(after, n) - getattr(before, n) for n in names)


def entry() -> Path:
    """The one file of the cache."""
    (found,) = (p for p in Path(os.environ["GRAPHFUSE_CACHE_DIR"]).rglob("*") if p.is_file())
    return found


def test_compiled_once_then_from_memory_then_from_disk(source, forget):
    code, counts = counted(source)
    assert counts == (1, 0, 0) and code == nvrtc.compile(source, ARCH, "k")
    assert counted(source) == (code, (0, 1, 0))
    forget()
    assert counted(source) == (code, (0, 0, 1))


def test_the_entry_is_an_elf_file_with_a_trailer(source):
    code = cache.cubin(source, ARCH, "k")
    assert entry().read_bytes().startswith(code)


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda data: b"", id="empty"),
        pytest.param(lambda data: data[:10], id="shorter than the trailer"),
        pytest.param(lambda data: data[: len(data) // 2], id="truncated"),
        pytest.param(lambda data: data[:-1], id="last byte missing"),
        pytest.param(lambda data: data[:100] + bytes([data[100] ^ 1]) + data[101:], id="one bit flipped"),
        pytest.param(lambda data: data[:-40], id="without a trailer"),
        pytest.param(lambda data: b"something else entirely" * 100, id="foreign"),
    ],
)
def test_a_damaged_entry_is_a_miss_and_is_replaced(source, forget, damage):
    code, _ = counted(source)
    data = entry().read_bytes()
    entry().write_bytes(damage(data))
    forget()
    assert counted(source) == (code, (1, 0, 0))
    assert entry().read_bytes() == data
    forget()
    assert counted(source) == (code, (0, 0, 1))


def test_another_kernels_entry_is_a_miss(source, forget):
    cache.cubin(source + "// other", ARCH, "k")
    other = entry().read_bytes()
    entry().unlink()
    code, _ = counted(source)
    entry().write_bytes(other)
    forget()
    assert counted(source) == (code, (1, 0, 0))


def test_everything_that_decides_the_bits_is_in_the_key(source, monkeypatch, tmp_path):
    kit = toolkit.find()
    keys = [
        cache.key(source, ARCH, "k", kit),
        cache.key(source + " ", ARCH, "k", kit),
        cache.key(source, "sm_80", "k", kit),
        cache.key(source, ARCH, "other", kit),
        cache.key(source, ARCH, "k", replace(kit, version="99.1")),
        cache.key(source, ARCH, "k", replace(kit, nvrtc_bytes=1)),
        cache.key(source, ARCH, "k", replace(kit, include_dirs=(tmp_path,), include_version=13000)),
        cache.key(source, ARCH, "k", replace(kit, include_dirs=(tmp_path,), include_version=13010)),
        cache.key(source, ARCH, "k", replace(kit, bundled=True)),
    ]
    monkeypatch.setitem(nvrtc.OPTIONS, "fma", True)
    keys.append(cache.key(source, ARCH, "k", kit))
    assert len(set(keys)) == len(keys)


def test_where_nvrtc_lies_is_not_in_the_key(source):
    kit = toolkit.find()
    assert cache.key(source, ARCH, "k", kit) == cache.key(source, ARCH, "k", replace(kit, origin="x", nvrtc=Path("/x")))


def test_another_architecture_is_compiled_for_itself(source):
    assert counted(source, "sm_80")[1] == (1, 0, 0)
    assert counted(source, "sm_90a")[1] == (1, 0, 0)


def test_threads_that_want_one_source_compile_it_once(source):
    before = cache.statistics()
    barrier = threading.Barrier(8)
    found = []

    def get():
        barrier.wait()
        found.append(cache.cubin(source, ARCH, "k"))

    threads = [threading.Thread(target=get) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    after = cache.statistics()
    assert len(found) == 8 and len(set(found)) == 1
    assert after.compiled - before.compiled == 1
    assert after.memory_hits - before.memory_hits == 7


def test_a_source_that_fails_does_not_stand_in_the_way_of_the_next_try(source):
    from graphfuse.base.errors import KernelCompileError

    for _ in range(2):
        with pytest.raises(KernelCompileError):
            cache.cubin(source + "nonsense", ARCH, "k")


@pytest.mark.parametrize("where", ["a file", "below a file"])
def test_a_directory_that_cannot_be_used_costs_one_warning(source, forget, monkeypatch, tmp_path, where):
    # Permissions would not do: they do not bind root.
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GRAPHFUSE_CACHE_DIR", str(tmp_path / "file" / ("" if where == "a file" else "sub")))
    with pytest.warns(RuntimeWarning, match="compiled kernels are not kept.*GRAPHFUSE_CACHE_DIR") as seen:
        code, counts = counted(source)
    assert len(seen) == 1 and counts == (1, 0, 0) and code[:4] == b"\x7fELF"
    forget()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert counted(source) == (code, (1, 0, 0))


def test_no_home_directory_costs_one_warning(source, forget, monkeypatch):
    for name in ("GRAPHFUSE_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    with pytest.warns(RuntimeWarning, match="not kept: the user has no home directory.*GRAPHFUSE_CACHE_DIR") as seen:
        _, counts = counted(source)
    assert len(seen) == 1 and counts == (1, 0, 0)


def test_memory_forgets_what_was_used_longest_ago(source, forget, monkeypatch):
    forget()
    monkeypatch.setattr(cache, "KEPT_KERNELS", 2)
    first, second, third = (f"{source}// {n}" for n in range(3))
    for text in (first, second, first, third):
        cache.cubin(text, ARCH, "k")
    assert len(cache._kernels) == 2
    assert counted(first)[1] == (0, 1, 0)
    assert counted(second)[1] == (0, 0, 1)


def test_the_disk_keeps_no_more_than_its_limit(source, forget, monkeypatch):
    def entries() -> list[Path]:
        return [p for p in Path(os.environ["GRAPHFUSE_CACHE_DIR"]).rglob("*") if p.is_file()]

    first, second, third = (f"{source}// {n}" for n in range(3))
    cache.cubin(first, ARCH, "k")
    monkeypatch.setattr(cache, "KEPT_BYTES", 2 * entry().stat().st_size + 500)
    cache.cubin(second, ARCH, "k")
    for n, path in enumerate(sorted(entries(), key=lambda p: p.stat().st_mtime)):
        os.utime(path, (1000 + n, path.stat().st_mtime))
    forget()
    assert counted(first)[1] == (0, 0, 1)  # so that the second is the one used longest ago
    cache.cubin(third, ARCH, "k")
    assert len(entries()) == 2
    forget()
    assert counted(first)[1] == counted(third)[1] == (0, 0, 1)
    assert counted(second)[1] == (1, 0, 0)


def test_nothing_is_left_of_a_source_that_fails(source):
    from graphfuse.base.errors import KernelCompileError

    with pytest.raises(KernelCompileError):
        cache.cubin(source + "nonsense", ARCH, "k")
    assert not cache._key_locks


PROCESS = """
import hashlib, json, sys, time
from graphfuse.runtime import cache
import cuda.core.utils
source = sys.argv[1]
print("ready", flush=True)
sys.stdin.readline()
start = time.perf_counter()
code = cache.cubin(source, "sm_90a", "k")
took = time.perf_counter() - start
loaded = "/libnvrtc.so" in open("/proc/self/maps").read()
s = cache.statistics()
print(json.dumps([hashlib.sha256(code).hexdigest(), s.compiled, s.disk_hits, loaded, took]))
"""


def race(source: str, processes: int) -> list[list]:
    """Start processes, let them ask for the kernel all at once, and collect what each saw."""
    command = [sys.executable, "-c", PROCESS, source]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    started = [subprocess.Popen(command, **pipes) for _ in range(processes)]
    for p in started:
        assert p.stdout.readline() == "ready\n"
    for p in started:
        p.stdin.write("go\n")
        p.stdin.flush()
    outputs = [p.communicate()[0] for p in started]
    assert all(p.returncode == 0 for p in started)
    return [json.loads(out) for out in outputs]


def test_eight_processes_on_a_cold_cache_and_a_ninth_that_compiles_nothing(source):
    import hashlib

    right = hashlib.sha256(nvrtc.compile(source, ARCH, "k")).hexdigest()
    seen = race(source, 8)
    assert [digest for digest, *_ in seen] == [right] * 8
    assert all(compiled + disk == 1 for _, compiled, disk, *_ in seen)
    ((digest, compiled, disk, loaded, took),) = race(source, 1)
    assert (digest, compiled, disk, loaded) == (right, 0, 1, False)
    assert took < 0.2  # 2 ms when nothing else runs


@pytest.mark.compile
def test_threads_that_compile_first_at_once(tmp_path):
    """In a new process, where they are also the first to import cuda.core."""
    code = """
import threading
from graphfuse.runtime import cache
SOURCE = 'extern "C" __global__ void k(float* p) { p[0] = %d; }'
failures = []
def work(i):
    try:
        cache.cubin(SOURCE % i, "sm_90a", "k")
    except BaseException as error:
        failures.append(error)
threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
for t in threads: t.start()
for t in threads: t.join()
assert not failures, failures
assert cache.statistics().compiled == 8
"""
    import os
    import subprocess
    import sys

    environment = {**os.environ, "GRAPHFUSE_CACHE_DIR": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
