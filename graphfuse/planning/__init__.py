"""Planning of a frozen graph: registry of plug-ins, choice of regions, ranking, other row counts, saved plans."""
