"""What holds for the cases of every bench."""

import pytest

from graphfuse import heur_mode
from graphfuse.base.device import for_arch
from graphfuse.benchmarks import (
    add_rmsnorm,
    add_rmsnorm_blocks,
    cross_entropy,
    layernorm,
    layernorm_backward,
    norm_add_norm,
    qk_norm,
    qk_norm_rope_training,
    rmsnorm_backward,
    rmsnorm_channels,
    rmsnorm_training,
    silu_mul_fp8,
    softmax,
)
from graphfuse.benchmarks.benches import BENCHES
from graphfuse.runtime.handle import Handle, create_handle

BACKWARD = (rmsnorm_backward.BENCH, rmsnorm_backward.RESIDUAL_BENCH, layernorm_backward.BENCH)
BACKWARD += (qk_norm_rope_training.BENCH,)
KERNELS = {"qk-norm": 2, "qk-norm-rope-cache": 2, "qk-norm-rope-training": 3}
SMALL = [add_rmsnorm.AddRmsNormCase(5, 96, output) for output in add_rmsnorm.OUTPUTS]
SMALL += [qk_norm.QkNormCase(5, 4, 2), rmsnorm_backward.AddRmsNormBackwardCase(1100, 24, "bf16")]
SMALL += [rmsnorm_backward.RmsNormBackwardCase(37, 96, output) for output in rmsnorm_backward.OUTPUTS]
SMALL += [rmsnorm_channels.RmsNormChannelsCase(24, 2, 3, 5, layout) for layout in rmsnorm_channels.LAYOUTS]
SMALL += [rmsnorm_training.RmsNormTrainingCase(37, 96, output) for output in rmsnorm_training.OUTPUTS]
SMALL += [
    norm_add_norm.NormAddNormCase(5, 96),
    layernorm.LayerNormCase(5, 96),
    softmax.SoftmaxCase(5, 96),
    silu_mul_fp8.SiluMulFp8Case(5, 96),
]
SMALL += [layernorm_backward.LayerNormBackwardCase(37, 96), cross_entropy.CrossEntropyCase(5, 96)]
SMALL += [add_rmsnorm_blocks.AddRmsNormBlocksCase(5, 256, output) for output in add_rmsnorm_blocks.OUTPUTS]


@pytest.mark.parametrize("bench", BENCHES.values(), ids=BENCHES)
def test_every_case_is_one_kernel(bench):
    """Of QK-norm one for Q and one for K, or one for both; of training one in each phase; of two norms one for both, or
    one each; of rotated heads one for both and, of values that are stored and of each gradient, one more."""
    assert len(set(bench.cases)) == len(bench.cases) and set(bench.quick) <= set(bench.cases)
    for case in bench.cases:
        graphs = {case.graph: KERNELS.get(bench.name, 1)}
        others = ("joint_graph", "inference_graph", "first_graph", "second_graph")
        graphs |= {graph: 1 for name in others if (graph := getattr(case, name, None))}
        for graph, kernels in graphs.items():
            made = graph(Handle(for_arch("sm_90a")))  # planning needs no GPU
            made.validate()
            made.build_operation_graph()
            made.create_execution_plans([heur_mode.OPENSOURCE])
            name = made.get_plan_name_at_index(0)
            assert name.count("rows[") == name.count("[") == kernels
            assert (made.get_workspace_size_plan_at_index(0) > 0) == (bench in BACKWARD), case


@pytest.mark.parametrize("case", SMALL, ids=lambda c: f"{type(c).__module__} {c}")
def test_bytes_are_those_of_the_tensors(case):
    (operands,) = case.sets(1, "cpu")
    assert case.moved == sum(t.numel() * t.itemsize for t in operands.pack().values())


@pytest.mark.parametrize("bench", BENCHES.values(), ids=BENCHES)
def test_the_problems_of_every_bench_can_be_tuned(bench):
    case = min(bench.quick, key=lambda case: case.moved)
    g = case.graph(create_handle("cpu"))
    g.validate()
    named = {t.name for t in g._ir.bound if not t.by_value}
    assert set(case.tensors("cpu")) == named
