"""The benchmarks of several ranks on ranks of gloo, with small layers and rows. ``ranks`` runs the cases."""

import dataclasses
from unittest import mock

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh

from graphfuse.benchmarks.programs import all_reduce, tensor_parallel
from graphfuse.benchmarks.programs.model_cases import MODELS
from graphfuse.benchmarks.programs.model_ways import EAGER, OURS, WAYS, Way
from graphfuse.benchmarks.programs.tensor_parallel_record import SplitCase

_FIELDS = {"hidden_size": 64, "intermediate_size": 96}
_FIELDS |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


def _on_one_rank(case, module):
    if distributed.get_rank():
        raise RuntimeError("rank 1 has none")
    return WAYS[0].make(case, module)


def _measured(mesh: DeviceMesh, *ways: Way) -> list[dict]:
    cases = []
    for name in ("llama-3-8b", "qwen3-8b"):
        model = dataclasses.replace(MODELS[name], fields=dict(MODELS[name].fields) | _FIELDS)
        cases += [SplitCase(model, "decode", (3, 1)), SplitCase(model, "prefill", (1, 8))]
    return tensor_parallel.run(cases, ways, mesh.device_type, 2)["cases"]


def right_ways(mesh: DeviceMesh) -> None:
    """Layers that are split compute what whole ones do, as they are and fused, and are timed."""
    ways = [way for way in WAYS if way.name in (EAGER, OURS)]
    found = _measured(mesh, *ways)
    assert [one["case"] for one in found] == [
        *("llama-3-8b/decode-3x1", "llama-3-8b/prefill-1x8", "qwen3-8b/decode-3x1", "qwen3-8b/prefill-1x8"),
    ]
    for one in found:
        assert [*one["ways"]] == [EAGER, OURS]
        assert all("error" not in way and way["ms"]["median"] > 0 for way in one["ways"].values()), one


def a_way_that_fails_on_a_rank(mesh: DeviceMesh) -> None:
    """It is without times on all ranks, and the others are measured."""
    broken = Way("broken", "broken", _on_one_rank)
    for one in _measured(mesh, broken, WAYS[0]):
        assert one["ways"]["broken"] == {"error": "RuntimeError: rank 1 has none"}
        assert "ms" in one["ways"][EAGER]


def sums(mesh: DeviceMesh) -> None:
    """What the sums over ranks and parts of a sequence are held against is what they are."""
    memory = torch.zeros(all_reduce.OFFSET + 6 * 256, dtype=torch.bfloat16)
    gathered = torch.zeros(2 * 6 * 256, dtype=torch.uint8)
    found = all_reduce.results(memory, 6, 256), all_reduce.in_parts(memory, gathered, 6, 256)
    assert all(one["right"] for one in found), found
    given = all_reduce.given

    def other_residual(*size: object, **seed: int) -> tuple[torch.Tensor, ...]:
        x, residual, weight = given(*size, **seed)
        return x, residual + distributed.get_rank(), weight

    with mock.patch.object(all_reduce, "given", other_residual):
        found = all_reduce.results(memory, 6, 256), all_reduce.in_parts(memory, gathered, 6, 256)
    assert not any(one["right"] for one in found), found


CASES = {f.__name__: f for f in (right_ways, a_way_that_fails_on_a_rank, sums)}
