"""Sums over ranks in graphs of tensor-parallel layers, which become a part of the regions that read them."""

from collections.abc import Iterator

from torch.fx import GraphModule, Node

from graphfuse.torch.analysis.meaning import value
from graphfuse.torch.regions.operator import RegionOperator, region
from graphfuse.torch.regions.over_ranks import can_be_summed, partial_of_sum, region_over_ranks


def replace(module: GraphModule) -> Iterator[Node]:
    """Replaces regions that alone read a sum over ranks by an operator that also computes the sum. Yields the new
    nodes."""
    changed = False
    for node in list(module.graph.find_nodes(op="call_function", target=region)):
        inputs, text = node.args
        program = RegionOperator.of(text).graphs.program
        for number, t in enumerate(inputs):
            partial = partial_of_sum(t)
            if partial is None or [*t.users] != [node] or inputs.count(t) > 1 or not can_be_summed(program, number):
                continue
            group = value(partial).device_mesh.get_group().group_name
            whole, t.args = t.args[0], (partial, *t.args[1:])  # this rank's part of the sum
            module.graph.erase_node(whole)
            with module.graph.inserting_before(node):
                made = module.graph.call_function(region_over_ranks, (inputs, text, number, group))
            made.meta.update(node.meta)
            node.replace_all_uses_with(made)
            module.graph.erase_node(node)
            changed = True
            yield made
            break
    if changed:
        module.graph.lint()
        module.recompile()
