"""The functions of the bench of what stands around norms, compiled on a GPU: what they become, against float32."""

import pytest
import torch

from graphfuse.benchmarks.programs import follower_session, model_check
from graphfuse.benchmarks.programs.follower_cases import BOTH, FORWARD, FUNCTIONS, FollowerCase
from graphfuse.benchmarks.programs.follower_functions import RUNS, tensors
from graphfuse.torch import compile_report

pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("regions")]
# These have operators of their own, or are left to inductor.
OTHERS = frozenset("rms rms-half rms-fp8-block rms-dropout dropout-add-rms add-rms add-layer layer rms-add-rms".split())
OTHERS |= frozenset(("add-adaptive", "cross-entropy"))


@pytest.mark.parametrize("rows", [1000, 4096])
@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name not in OTHERS])
def test_regions(name, rows):
    function = FUNCTIONS[name]
    case = FollowerCase(name, BOTH if function.has_gradients else FORWARD, rows, 2048)
    given = tensors(function, case, 0, "cuda")
    reference = follower_session.Reference(function, given)
    eager = follower_session.values(RUNS[name], given)
    own = model_check.distances(eager, reference.of(eager))
    torch.compiler.reset()
    found = follower_session.values(torch.compile(RUNS[name], backend="graphfuse"), given)
    assert model_check.wrong(found, reference.of(found), own) is None
    assert {entry.became for entry in compile_report().replaced} <= {
        "region",
        "add_layer_norm_bias",
        "llama_add_rms_norm",
    }
    assert compile_report().replaced
