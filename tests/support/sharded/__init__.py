"""What a rank of several does and finds: calls on DTensors beside the same calls on whole tensors.

Each public function of these modules that takes a mesh is a case; test_sharded.py runs them all on two ranks.
Everything random is the same on all ranks. torch.distributed.tensor is imported in functions, after graphfuse, as a
program may.
"""

import inspect

from support.sharded import columns, functions, meshes, modules, regions, rows

CASES = {
    name: function
    for module in (rows, columns, functions, regions, meshes, modules)
    for name, function in vars(module).items()
    if inspect.isfunction(function) and function.__module__ == module.__name__ and name[0] != "_"
}
