"""The fast path of repeated calls: generated Python that compares arguments, reads addresses and launches kernels.

The code is generated for one plan or one kind of call, because loops over arguments would take twice as long. There are
four kinds of generated functions:

- `start` launches the parts of a plan at given addresses, for a given number of rows;
- `execute` does so for a variant pack that is like one that was accepted before;
- `function` does so for arguments that are like those of an earlier call, and allocates the results;
- `sequence` launches several plans in turn, and allocates what they write. It compares no arguments; its caller does.

Two calls are alike if they differ only in addresses, in numbers passed by value and, if the plan serves any number of
rows, in that number. A fast path declines any other call, and any invalid call, before it has done anything. Its caller
then does the full check. Fast paths keep no references to the arguments of calls.
"""

from graphfuse.runtime.fastcall.functions import ALIGNMENT, DECLINED, CallForm, Given, New, function
from graphfuse.runtime.fastcall.packs import Execute, Space, comparable, execute
from graphfuse.runtime.fastcall.sequences import At, LaunchedPlan, NewTensor, sequence
from graphfuse.runtime.fastcall.starts import FrozenPart, Start, start
from graphfuse.runtime.fastcall.writing import Lines, text, trying, when, written

__all__ = [
    "ALIGNMENT",
    "At",
    "DECLINED",
    "Execute",
    "CallForm",
    "Given",
    "Lines",
    "New",
    "NewTensor",
    "FrozenPart",
    "Space",
    "Start",
    "LaunchedPlan",
    "comparable",
    "execute",
    "function",
    "sequence",
    "start",
    "text",
    "trying",
    "when",
    "written",
]
