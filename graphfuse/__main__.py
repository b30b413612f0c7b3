"""``python -m graphfuse``: the command line, for environments whose scripts are not on the path."""

from graphfuse.cli import app

app(prog_name="graphfuse")
