"""Tuned knobs as data: what an entry says, how planning ranks them, the files they are kept in."""
