"""An account as an HTML page: a drawing, then the tree."""

import re
from html import escape

from graphfuse.explain.account import Account, printable
from graphfuse.explain.mermaid import mermaid
from graphfuse.explain.tree import plain_tree

_NO_XML = re.compile(r"[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML does not allow."""
_MERMAID = "https://cdn.jsdelivr.net/npm/mermaid@11/dist/mermaid.esm.min.mjs"

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"/>
<title>{title}</title>
<style>body {{ font: 15px/1.45 system-ui, sans-serif; margin: 2rem }} pre {{ white-space: pre-wrap }}</style>
<script type="module">import mermaid from "{mermaid}"; mermaid.initialize({{maxEdges: 1e5, maxTextSize: 1e7}});</script>
</head>
<body>
<h1>{title}</h1>
<pre class="mermaid">{chart}</pre>
<p>Mermaid, from {mermaid}, draws the flowchart. Without a network its source stands here.</p>
<pre>{tree}</pre>
</body>
</html>
"""


def html(account: Account) -> str:
    """The page, which is also well-formed XML. Its only script is Mermaid, which the browser fetches."""
    title = f"graph {printable(account.graph)} on {account.device} ({account.device_name})"
    parts = {"title": title, "chart": mermaid(account), "tree": plain_tree(account)}
    return _PAGE.format(mermaid=_MERMAID, **{name: escape(_NO_XML.sub("\ufffd", part)) for name, part in parts.items()})
