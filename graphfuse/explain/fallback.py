"""``fallback``: the reason why a plan uses the reference engine."""

from graphfuse.explain.account import Account


def fallback(account: Account) -> str | None:
    """The nodes that the shown plan runs one by one, with the reasons, including those of plans passed over; None if
    there are no such nodes."""
    alone = {i for region in account.regions if not region.fused for i in region.nodes}
    if not alone:
        return None
    reasons = [f"pattern {m.pattern}: {m.why}" for m in account.misfits if alone.intersection(m.nodes)]
    reasons += [
        f"{v.engine}: {v.why}"
        for mode in account.modes
        for v in mode.verdicts
        if v.why is not None and alone.intersection(v.nodes)
    ]
    reasons += [f"no pattern matches {account.names((i,))}" for i in account.unmatched if i in alone]
    passed_over = (plan for plan in account.plans if plan.index < (account.shown or 0) and plan.reason)
    reasons += [f"plans were passed over: {plan.reason.splitlines()[0]}" for plan in passed_over]
    why = "; ".join(dict.fromkeys(reasons)) or "no engine that fuses them was asked"
    return f"{account.names(tuple(sorted(alone)))} ({why})"
