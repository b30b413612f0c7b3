"""What planning ranks by, as data: tuned knobs (what an entry says, their order, the files they are kept in), and which
engine comes first."""
