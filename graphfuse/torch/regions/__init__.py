"""Parts of a torch program that become op graphs: translated from its operations, chosen by patterns, run as one
operator."""
