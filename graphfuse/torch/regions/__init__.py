"""Parts of a torch program as op graphs: translated from its operations, chosen by patterns, run as one operator."""
