"""The chain of a model without its norms: what the times of norms in it are differences to."""

import functools

from graphfuse.benchmarks.peer import Peer, Work


def _make(case, sets) -> Work:
    def check() -> str | None:
        return None if sets[0].out.isfinite().all() else "its result is not finite"

    return Work([functools.partial(s.run, None) for s in sets], check=check)


PEER = Peer("products", "both matrix products", _make, ("torch",))
