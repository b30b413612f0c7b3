"""The cuDNN frontend's RMSNorm + SiLU sample, with the import changed and nothing else."""

import pytest
import torch

import graphfuse as cudnn
from support import graphs, oracle
from support.graphs import Norm

pytestmark = pytest.mark.gpu


def test_sample():
    C, num_tokens, eps = 512, 24960, 1e-5
    graph = cudnn.pygraph(
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
    )
    X = graph.tensor(
        dim=[num_tokens, C, 1, 1],
        stride=[C, 1, 1, 1],
        data_type=cudnn.data_type.BFLOAT16,
    )
    scale = graph.tensor(
        dim=[1, C, 1, 1],
        stride=[C, 1, 1, 1],
        data_type=cudnn.data_type.BFLOAT16,
    )
    epsilon = graph.tensor(
        dim=[1, 1, 1, 1],
        stride=[1, 1, 1, 1],
        data_type=cudnn.data_type.FLOAT,
        is_pass_by_value=True,
    )
    Y = graph.rmsnorm(
        norm_forward_phase=cudnn.norm_forward_phase.INFERENCE,
        input=X,
        scale=scale,
        epsilon=epsilon,
    )[0]
    Y.set_dim([num_tokens, C, 1, 1]).set_stride([C, 1, 1, 1])
    Y.set_data_type(cudnn.data_type.BFLOAT16)
    Z = graph.swish(input=Y, swish_beta=1.0)
    Z.set_output(True).set_data_type(cudnn.data_type.BFLOAT16)
    graph.build([cudnn.heur_mode.OPENSOURCE])
    x = torch.randn(num_tokens, C, dtype=torch.bfloat16, device="cuda")
    w = torch.ones(1, C, 1, 1, dtype=torch.bfloat16, device="cuda")
    eps_val = torch.full((1, 1, 1, 1), eps, dtype=torch.float32)
    out = torch.empty(num_tokens, C, dtype=torch.bfloat16, device="cuda")
    workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device="cuda")
    graph.execute(
        {X: x.view(num_tokens, C, 1, 1), scale: w, epsilon: eps_val, Z: out.view(num_tokens, C, 1, 1)},
        workspace,
    )

    engine, knobs = graph.get_engine_and_knobs_at_index(0)
    assert engine == "rows" and isinstance(knobs, dict)  # one part: one kernel
    assert graph.get_workspace_size() == 0
    exact = oracle.swish(oracle.rmsnorm(x, w.view(1, C), eps)[0])
    assert oracle.ulps(out, oracle.rounded(exact, torch.bfloat16)).max() <= 1


@pytest.mark.parametrize("case", graphs.NORMS.values(), ids=graphs.NORMS)
@pytest.mark.parametrize("mode", list(cudnn.heur_mode), ids=lambda m: m.name)
def test_every_mode(case, mode):
    """OPENSOURCE is the kernel, FALLBACK the reference engine on the GPU, A and B what ranks first."""
    graphs.check(case, [mode], "cuda")


def test_the_device_current_at_build_is_used():
    graph = Norm().graph()
    graph.handle = None
    graph.build([cudnn.heur_mode.OPENSOURCE])
    assert f"on cuda:{torch.cuda.current_device()}" in graph.explain()
