"""Patterns and engines that installed packages offer, each tried by itself."""

from dataclasses import dataclass
from importlib import metadata

GROUPS = ("graphfuse.patterns", "graphfuse.engines")


@dataclass(frozen=True)
class Offer:
    """An entry point. fault: why it cannot be used, None if it can."""

    group: str
    name: str
    value: str
    distribution: str
    fault: str | None


def offers() -> list[Offer]:
    """What is offered, and whether it loads; in an order that does not depend on how it was installed."""
    found = metadata.entry_points()
    points = [point for group in GROUPS for point in found.select(group=group)]
    return sorted((_offer(point) for point in points), key=lambda o: (o.group, o.name, o.distribution))


def _offer(point: metadata.EntryPoint) -> Offer:
    from graphfuse.engine import Engine
    from graphfuse.match import Pattern

    kind = Pattern if point.group == "graphfuse.patterns" else Engine
    fault = None
    try:
        loaded = point.load()
        for item in loaded if isinstance(loaded, tuple | list) else (loaded,):
            if not isinstance(item, kind):
                fault = f"it must give {kind.__name__} objects, got {item!r}"
    except (Exception, SystemExit) as error:
        fault = f"it does not load: {type(error).__name__}: {error}"
    dist = point.dist
    return Offer(point.group, point.name, point.value, f"{dist.name} {dist.version}" if dist else "", fault)
