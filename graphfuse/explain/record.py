"""An account as JSON, for other programs."""

import dataclasses
import json as codec

from graphfuse.explain.account import Account

VERSION = 1
"""Version of the format. It is incremented if readers of the previous version would misread it."""


def json(account: Account) -> str:
    """An object with the fields of ``Account``, the totals "before" and "after", and "version"."""
    found = {"version": VERSION, **dataclasses.asdict(account)}
    found |= {"before": dataclasses.asdict(account.before), "after": dataclasses.asdict(account.after)}
    return codec.dumps(found, indent=1)
