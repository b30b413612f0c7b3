"""``python -m graphfuse``: the command line where no script of that name is on the path."""

from graphfuse.cli import app

app(prog_name="graphfuse")
