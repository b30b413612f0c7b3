"""``torch.compile(model, backend="graphfuse")``: operators in Dynamo's graph, and the rest for inductor.

The graph is that before AOT autograd, so operators are differentiable ones, and AOT traces their backward.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch.fx import GraphModule

from graphfuse.base.errors import SettingError
from graphfuse.runtime import torch_private
from graphfuse.torch.compile_backend import compiled, graph_pass

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
    """Backend that ``torch.compile`` calls with each graph. mode, options: its own.

    options: "then", the name of the backend that gets the rest ("inductor"); "decline", whether norms are left that
    inductor is as good at (True). All others, and mode, are that backend's. Raises SettingError for what is not
    accepted; torch raises it as the cause of a BackendCompilerFailed, when the function is first called.
    """
    rest = dict(options or {})
    then, declines = rest.pop("then", "inductor"), rest.pop("decline", True)
    if not isinstance(declines, bool):
        raise SettingError(f"option decline is {declines!r}; accepted: True, False")
    known = [name for name in torch.compiler.list_backends(exclude_tags=()) if name != NAME]
    if then not in known:
        raise SettingError(f"option then is {then!r}; accepted: {', '.join(known)}")
    if then == "inductor":
        # In inductor's key of what it keeps on disk, so that another version of graphfuse compiles anew.
        first = rest.get(_PASS, torch_private.inductor_setting(_PASS))
        rest[_PASS] = graph_pass.made(first, replaces=False)
    elif rest or mode:
        given = ", ".join((*(f"option {name}" for name in rest), *(["mode"] if mode else [])))
        raise SettingError(f"{given} with option then {then!r}; accepted: with inductor")
    try:
        compiler = torch_private.compiler(str(then), mode, rest)
    except RuntimeError as error:
        raise SettingError(f"inductor: {error}") from error
    what = "for training" if compiled.is_for_training(module) else "for inference"
    is_inductor = then == "inductor"
    fallback = rest.get(_FALLBACK, torch_private.inductor_setting(_FALLBACK))
    entries = compiled.replace_in(module, declines and is_inductor, is_inductor and not fallback)
    made = compiler(module, inputs)  # which may ask Dynamo to begin again
    compiled.tell(f", {what}", entries)
    return made


def _reset() -> None:
    compiled.forget()
    torch_private.reset_cuda_graphs()


compile_graph.reset = _reset  # which torch.compiler.reset() calls
