"""From a frozen graph to plans that run: the registry, the choice of regions, ranking, saved plans."""
