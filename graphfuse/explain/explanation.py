"""An account that displays itself: as text when printed, as a flowchart in a notebook."""

from typing import TYPE_CHECKING

from graphfuse.explain.account import Account
from graphfuse.explain.mermaid import mermaid
from graphfuse.explain.text import text
from graphfuse.explain.tree import tree

if TYPE_CHECKING:
    from rich.tree import Tree


class Explanation(Account):
    """Explanation of the planning of a graph; frozen, and independent of later changes of the graph. ``print`` and a
    prompt show its text, ``rich.print`` a tree, the end of a notebook's cell a flowchart. Other formats are the
    functions of ``graphfuse.explain``."""

    def __str__(self) -> str:
        return text(self)

    __repr__ = __str__

    def __rich__(self) -> "Tree":
        return tree(self)

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        """Forms of the explanation by MIME type, for Jupyter. JupyterLab 4.1, Notebook 7.1 and later draw Mermaid.
        include, exclude: ignored."""
        return {"text/plain": text(self), "text/markdown": f"```mermaid\n{mermaid(self)}\n```"}
