"""``explained``: the account of a planner. Nothing is planned or compiled for it."""

from graphfuse.explain.account import (
    MatchEntry,
    ModeEntry,
    NodeEntry,
    PlanEntry,
    RegionEntry,
    TensorEntry,
    VerdictEntry,
)
from graphfuse.explain.explanation import Explanation
from graphfuse.op_graph.ir import FrozenGraph, FrozenTensor, Node, Subgraph
from graphfuse.planning import plan, separations, traffic
from graphfuse.planning.plan import Part
from graphfuse.planning.planner import Planner
from graphfuse.tuned_tables.ranking import rank


def explained(planner: Planner) -> Explanation:
    """Explanation of the planning of a graph so far, including a graph that cannot run."""
    graph = planner.graph
    shown = planner.chosen
    if shown is None:
        shown = next((i for i, p in enumerate(planner.plans) if not planner.barred(p)), None)
    return Explanation(
        graph=graph.name,
        device=str(planner.device) if planner.device.here else planner.device.arch,
        device_name=planner.device.name,
        tensors=tuple(_tensor(graph, t) for t in graph.tensors if t.id in graph.producer or t.id in graph.consumers),
        nodes=tuple(_node(graph, node) for node in graph.nodes),
        matches=tuple(MatchEntry(r.pattern, r.subgraph.node_ids) for r in planner.regions),
        misfits=tuple(MatchEntry(d.pattern, d.subgraph.node_ids, str(d.why)) for d in planner.declined),
        unmatched=plan.unmatched(graph, planner.regions, planner.declined),
        modes=tuple(_mode(p) for p in planner.proposals),
        plans=tuple(_plan(planner, i, p) for i, p in enumerate(planner.plans)),
        shown=shown,
        regions=() if shown is None else tuple(_region(part) for part in planner.at(shown).parts),
        apart=() if shown is None else _apart(planner, planner.at(shown)),
        rank="" if shown is None else _rank(planner, planner.at(shown)),
        left_out=tuple(planner.left_out),
        notes=() if shown is None else planner.at(shown).notes,
    )


def _tensor(graph: FrozenGraph, t: FrozenTensor) -> TensorEntry:
    scalar = t.by_value or t.value is not None
    role = "scalar" if scalar else "virtual" if t.virtual else "output" if t.id in graph.producer else "input"
    return TensorEntry(t.id, t.name, t.dtype.name, t.dim, role, traffic.nbytes(t), t.value)


def _node(graph: FrozenGraph, node: Node) -> NodeEntry:
    moved = traffic.of_node(graph, node)
    return NodeEntry(node.name, node.op_name, node.compute.name, node.inputs, node.outputs, moved)


def _region(part: Part) -> RegionEntry:
    subgraph = part.region.subgraph
    # An engine that accepts any subgraph runs it node by node.
    fused = part.engine.facts is not Subgraph
    moved = traffic.fused(subgraph) if fused else traffic.unfused(subgraph)
    return RegionEntry(part.engine.name, part.name, part.region.pattern, subgraph.node_ids, fused, part.why, moved)


def _apart(planner: Planner, p: plan.Plan) -> tuple[separations.Separation, ...]:
    found = separations.Separations(
        planner.graph, planner.registry.patterns, planner.regions, planner.declined, planner.proposals
    )
    return tuple(found.between(p.parts))


def _rank(planner: Planner, p: plan.Plan) -> str:
    return "; or ".join(dict.fromkeys(str(rank(part.region, planner.device)) for part in p.parts))


def _mode(proposal: plan.Proposal) -> ModeEntry:
    verdicts = tuple(
        VerdictEntry(v.engine, v.region.subgraph.node_ids, None if v.why is None else str(v.why))
        for v in proposal.verdicts
    )
    return ModeEntry(proposal.mode.name, verdicts, proposal.uncovered, proposal.regions)


def _plan(planner: Planner, index: int, p: plan.Plan) -> PlanEntry:
    reason = planner.barred(p)
    state = "barred" if reason else "selected" if index == planner.chosen else "available"
    return PlanEntry(index, p.name, p.workspace_bytes, state, reason or "")
