"""The graph a user builds, plans and executes: cuDNN frontend's ``pygraph`` in names and order of steps.

    build_operation_graph -> create_execution_plans -> check_support -> build_plans -> execute

It records what the user says and keeps the order of steps; the work is done by ``freeze`` (inference), ``plan``
(matching and ranking) and ``runtime`` (execution). Its methods lie in the order of these steps, each class on the one
before: ``drawn``, ``planned``, ``executed``, ``graph``.
"""

from graphfuse.api.graph import pygraph

__all__ = ["pygraph"]
