"""The graph that users build, plan and execute, with the names and the order of steps of cuDNN frontend's ``pygraph``.

    build_operation_graph -> create_execution_plans -> check_support -> build_plans -> execute

``pygraph`` records tensors and nodes and checks the order of steps. The work is done by ``freeze`` (inference),
``plan`` (matching and ranking) and ``runtime`` (execution). Its methods are in four files in the order of these steps,
each with a class that extends the one before: ``defined_graph``, ``planned_graph``, ``executable_graph``, ``graph``.
"""

from graphfuse.api.graph import pygraph

__all__ = ["pygraph"]
