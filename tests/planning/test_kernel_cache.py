"""Kernel caches: what is put in, found again, kept as text, and refused."""

import json

import pytest

import graphfuse
from graphfuse import (
    GraphNotSupportedError,
    GraphStateError,
    GraphTypeError,
    KernelCompileError,
    SerializedError,
    heur_mode,
)
from graphfuse.planning import kernels
from support import graphs
from support.graphs import Norm


def planned(cache, rows=5, sm=90, **problem):
    """A norm for a chip that need not be here, built with a kernel cache."""
    g = Norm(rows=rows, **problem).graph("cuda", kernel_cache=cache, sm_version=sm)
    g.build([heur_mode.OPENSOURCE])
    return g


@pytest.fixture(scope="module")
def kept():
    """A cache with the kernel of a norm."""
    cache = graphfuse.create_kernel_cache()
    planned(cache)
    return cache.serialize()


@pytest.fixture
def no_compiler(monkeypatch):
    def compiled(*_):
        raise KernelCompileError("nothing is to be compiled")

    monkeypatch.setattr(kernels, "compiled", compiled)


@pytest.mark.compile
def test_kernels_are_shared():
    cache = graphfuse.create_kernel_cache()
    assert (cache.size(), cache.revision()) == (0, 0)
    planned(cache)
    assert (cache.size(), cache.revision()) == (1, 1)
    planned(cache, rows=4)  # rows are in no kernel
    assert (cache.size(), cache.revision()) == (1, 1)
    planned(cache, columns=256)
    assert (cache.size(), cache.revision()) == (2, 2)
    planned(cache, sm=100)
    assert (cache.size(), cache.revision()) == (3, 3)


@pytest.mark.compile
def test_a_cache_that_was_read_compiles_nothing(kept, no_compiler):
    cache = graphfuse.create_kernel_cache()
    cache.deserialize(kept)
    assert cache.size() == cache.revision() == 1 and cache.serialize() == kept
    blob = planned(cache).serialize()
    assert blob == planned(cache).serialize()
    with pytest.raises(GraphNotSupportedError, match="nothing is to be compiled"):
        planned(cache, columns=256)
    assert cache.size() == 1


@pytest.mark.compile
def test_serialized_with_its_kernels(kept, no_compiler):
    cache = graphfuse.create_kernel_cache()
    cache.deserialize(kept)
    (one,) = json.loads(kept)["kernels"]
    assert one["arch"] == "sm_90a" and one["name"] == "rows.cu"
    again = graphfuse.pygraph(kernel_cache=cache, sm_version=90).deserialize(
        planned(cache).serialize(include_kernels=False)
    )
    assert again.get_execution_plan_count() == 1


def test_on_the_emulator(monkeypatch):
    """Libraries of the emulator are kept by itself; a cache has no machine code of them."""
    cache, case = graphfuse.create_kernel_cache(), Norm(rows=3)
    g = case.graph("emulator", kernel_cache=cache)
    g.build([heur_mode.OPENSOURCE])
    out = case.outputs()
    g.execute(case.inputs() | out, graphs.workspace(g.get_workspace_size()))
    assert cache.size() == 1 and out["out"].isfinite().all()
    text = cache.serialize()
    assert json.loads(text)["kernels"][0]["cubin"] == ""
    again = graphfuse.create_kernel_cache()
    again.deserialize(text)
    assert again.serialize() == text


def test_a_graph_with_one_takes_overrides():
    assert graphfuse.pygraph(kernel_cache=graphfuse.create_kernel_cache()).takes_overrides
    with pytest.raises(GraphTypeError, match="graph 'g': kernel_cache must be what create_kernel_cache returns, got 3"):
        graphfuse.pygraph("g", kernel_cache=3)


def test_only_a_new_one_is_read_into():
    empty, used, read = (graphfuse.create_kernel_cache() for _ in range(3))
    text = empty.serialize()
    g = graphs.new(device="cpu", kernel_cache=used)
    g.relu(g.tensor([8])).set_output()
    g.build_operation_graph()
    read.deserialize(text)
    for cache in (used, read):
        with pytest.raises(GraphStateError, match="this kernel cache was used before; deserialize into a new one"):
            cache.deserialize(text)


def changed(**fields):
    return lambda data: data["kernels"][0].update(fields)


@pytest.mark.compile
@pytest.mark.parametrize(
    "change, says",
    [
        (lambda data: data.update(version=2), "of version 2; accepted: 1; serialize it anew"),
        (lambda data: data.pop("version"), "the kernel cache has no version"),
        (lambda data: data.update(kernels={}), "kernels is {}; accepted: a list"),
        (lambda data: data["kernels"].append(3), "kernel 1 is 3; accepted: an object"),
        (changed(cubin="AAAA"), "kernel 0 is damaged: its digest does not agree"),
        (changed(arch="sm_100a"), "kernel 0 is damaged"),
        (changed(source=3), "kernel 0: source is 3; accepted: a text"),
        (lambda data: data["kernels"][0].pop("entry"), "kernel 0 has no entry"),
    ],
)
def test_what_is_refused(kept, change, says):
    data = json.loads(kept)
    change(data)
    cache = graphfuse.create_kernel_cache()
    with pytest.raises(SerializedError, match=says):
        cache.deserialize(json.dumps(data))
    assert cache.size() == 0
    cache.deserialize(kept)  # it is as new
    assert cache.size() == 1


@pytest.mark.compile
@pytest.mark.parametrize("cubin, says", [("AAAA", "is no machine code of a GPU"), ("?", "cubin is not in base 64")])
def test_other_machine_code_with_a_digest_of_its_own(kept, cubin, says):
    from graphfuse.planning import kernel_cache

    data = json.loads(kept)
    one = data["kernels"][0] | {"cubin": cubin}
    data["kernels"] = [one | {"digest": kernel_cache._digest(one)}]
    with pytest.raises(SerializedError, match=says):
        graphfuse.create_kernel_cache().deserialize(json.dumps(data))


@pytest.mark.parametrize("text, error", [("", SerializedError), ("[]", SerializedError), (b"{}", GraphTypeError)])
def test_no_text_of_a_cache(text, error):
    with pytest.raises(error):
        graphfuse.create_kernel_cache().deserialize(text)
