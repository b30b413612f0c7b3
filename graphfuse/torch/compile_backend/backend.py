"""The backend ``torch.compile(model, backend="graphfuse")``: it puts operators into Dynamo's graph, and inductor
compiles the rest.

It changes the graph before AOT autograd. So its operators are differentiable, and AOT autograd traces their backward.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch.fx import GraphModule

from graphfuse.base.errors import SettingError
from graphfuse.runtime import torch_private
from graphfuse.torch.compile_backend import compiled_graphs, graph_pass

NAME = "graphfuse"
_PASS = "post_grad_custom_pre_pass"
_FALLBACK = "fallback_random"


def compile_graph(
    module: GraphModule,
    inputs: Sequence[torch.Tensor],
    *,
    mode: str | None = None,
    options: Mapping[str, object] | None = None,
) -> Callable[..., object]:
    """Backend that ``torch.compile`` calls with each graph. mode, options: as given to ``torch.compile``.

    Option "then" names the backend that compiles the changed graph ("inductor"). Option "decline" says whether norms
    that inductor computes as fast are not replaced (True). The mode and all other options are passed to that backend.
    Raises SettingError for options that are not accepted; torch raises it as the cause of a BackendCompilerFailed, when
    the function is first called.
    """
    rest = dict(options or {})
    then, declines = rest.pop("then", "inductor"), rest.pop("decline", True)
    if not isinstance(declines, bool):
        raise SettingError(f"option decline is {declines!r}; accepted: True, False")
    known = [name for name in torch.compiler.list_backends(exclude_tags=()) if name != NAME]
    if then not in known:
        raise SettingError(f"option then is {then!r}; accepted: {', '.join(known)}")
    if then == "inductor":
        # Adds the version of graphfuse to the keys of inductor's disk cache, so that another version compiles anew.
        first = rest.get(_PASS, torch_private.inductor_setting(_PASS))
        rest[_PASS] = graph_pass.make_pass(first, replaces=False)
    elif rest or mode:
        given = ", ".join((*(f"option {name}" for name in rest), *(["mode"] if mode else [])))
        raise SettingError(f"{given} with option then {then!r}; accepted: with inductor")
    try:
        compiler = torch_private.compiler(str(then), mode, rest)
    except RuntimeError as error:
        raise SettingError(f"inductor: {error}") from error
    what = "for training" if compiled_graphs.is_for_training(module) else "for inference"
    is_inductor = then == "inductor"
    fallback = rest.get(_FALLBACK, torch_private.inductor_setting(_FALLBACK))
    entries = compiled_graphs.replace_in(module, declines and is_inductor, is_inductor and not fallback)
    made = compiler(module, inputs)  # may make Dynamo restart, so the report follows it
    compiled_graphs.add_report(f", {what}", entries)
    return made


def _reset() -> None:
    compiled_graphs.clear_reports()
    torch_private.reset_cuda_graphs()


compile_graph.reset = _reset  # called by torch.compiler.reset()
