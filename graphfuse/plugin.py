"""Public names for writing patterns and engines. A plug-in imports from this module alone.

- a pattern: ``Pattern``, ``PatternGraph``, ``Match``, ``convex``, and the graph of a match: ``FrozenGraph``,
  ``FrozenTensor``, ``Node``, ``Subgraph``
- an engine: ``KernelEngine``, ``HostEngine``, ``Engine``, and the records that it exchanges with planning
- a kernel's text: ``render``, ``template``
- facts that are a row program: ``RowFacts``, ``row_facts``, ``RowProgram``, ``Emitter`` and the parts of steps
- ``check``, which looks for mistakes of a plug-in, and ``listed``, which returns the installed plug-ins

docs/extending.md is the guide. Modules elsewhere in the package may move between releases; these names stay.
"""

from graphfuse.base.device import Device
from graphfuse.base.dtypes import data_type
from graphfuse.base.enums import heur_mode
from graphfuse.codegen.render import render, template
from graphfuse.contract.engine import (
    Address,
    Buffers,
    ByRows,
    Constant,
    Engine,
    FrozenCall,
    HostEngine,
    HostScalar,
    KernelEngine,
    Launch,
    No,
    NoKnobs,
    Prepared,
    ProblemClass,
    RowCount,
    Scratch,
    Site,
)
from graphfuse.contract.match import Match, Pattern, PatternGraph, convex
from graphfuse.contract.served import EVERYTHING, Served
from graphfuse.op_graph.ir import FrozenGraph, FrozenTensor, Node, Subgraph
from graphfuse.patterns.rows import RowFacts
from graphfuse.patterns.rows import facts as row_facts
from graphfuse.planning.registry import listed
from graphfuse.rows.emitter import Emitter
from graphfuse.rows.program import RowProgram, Store
from graphfuse.rows.steps import Chain, Number, renamed
from graphfuse.testing import check

__all__ = [
    "Address",
    "Buffers",
    "ByRows",
    "Chain",
    "Constant",
    "Device",
    "EVERYTHING",
    "Emitter",
    "Engine",
    "FrozenCall",
    "FrozenGraph",
    "HostEngine",
    "HostScalar",
    "KernelEngine",
    "Launch",
    "Match",
    "No",
    "NoKnobs",
    "Node",
    "Number",
    "Pattern",
    "PatternGraph",
    "Prepared",
    "ProblemClass",
    "RowCount",
    "RowFacts",
    "RowProgram",
    "Scratch",
    "Served",
    "Site",
    "Store",
    "Subgraph",
    "FrozenTensor",
    "check",
    "convex",
    "data_type",
    "heur_mode",
    "listed",
    "render",
    "renamed",
    "row_facts",
    "template",
]
