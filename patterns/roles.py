"""The role of each op that may work on rows."""

from collections.abc import Mapping

from graphfuse.patterns.computing import COMPUTING
from graphfuse.patterns.moves import MOVES
from graphfuse.patterns.role import Role

ROLES: Mapping[str, Role] = {**COMPUTING, **MOVES}
