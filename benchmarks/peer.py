"""A peer: somebody's way to do a case, ours and the stream limit among them."""

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from graphfuse.benchmarks import record


@dataclass(frozen=True)
class Work:
    """One case as a peer does it.

    calls: the same work on one buffer set each, capturable into a CUDA graph. note: what
    runs, for the record. knobs_from: who chose the knobs of our kernels, "heuristic" or a
    table. check: why the first call's result is wrong, or None; without it the case judges
    the output in the buffer set.
    """

    calls: Sequence[Callable[[], object]]
    note: str = ""
    knobs_from: str = ""
    check: Callable[[], str | None] | None = None


def changed(operands: object, **fields: object) -> object:
    """A buffer set with the tensors of another, but for these."""
    made = copy.copy(operands)
    vars(made).update(fields)
    return made


def returning(case, sets: Sequence[object], fields: Sequence[str], function: Callable) -> Work:
    """For a peer that makes its outputs itself: function(set) gives one for each of `fields`; a field that is None,
    which the case does not have, stays None."""
    mine = [changed(s) for s in sets]

    def call(s) -> None:
        made = zip(fields, function(s), strict=True)
        vars(s).update({field: tensor for field, tensor in made if getattr(s, field) is not None})

    return Work([functools.partial(call, s) for s in mine], check=lambda: case.wrong(mine[0], tight=False))


def overwriting(case, sets: Sequence[object], call: Callable, **fields: str) -> Work:
    """For a peer that writes over its inputs: call(set), where an output of the set, named by each of `fields`, is a
    copy of the input that it takes the place of. The case's own inputs stay, so the first result can be judged."""
    mine = [changed(s, **{out: getattr(s, given).clone() for out, given in fields.items()}) for s in sets]
    return Work([functools.partial(call, s) for s in mine], check=lambda: case.wrong(mine[0], tight=False))


Norm = Callable[..., tuple[object, object]]
"""norm(x, residual, weight, eps) -> (normalized rows, sum): new tensors, or those that were given."""


def through(sets: Sequence[object], norm: Norm) -> Work:
    """For a peer of the bench of norms in a model: its norm in the chains of matrix products that the sets are."""
    return Work([functools.partial(s.run, norm) for s in sets])


def in_place(norm: Callable[..., None]) -> Norm:
    """Of what writes the normalized rows over x and the sum over the residual."""

    def both(x, residual, weight, eps):
        norm(x, residual, weight, eps)
        return x, residual

    return both


@dataclass(frozen=True)
class Peer:
    """make(case, sets) -> Work, where sets are the case's buffer sets, which all peers share.

    distributions: whose versions the record names; all must be installed. why_not(case, arch):
    why it cannot do a case on SM `arch` (90 for SM90), or None. tight: held to the case's tight
    tolerance. keeps_builds: what it compiles lies on disk, so that other processes can compile ahead.
    own: another way of ours, which is no competitor. way: how it differs from what it is usually compared with;
    it is compared with our way of that name only, "" with all of them.
    """

    name: str
    title: str
    make: Callable[[object, Sequence[object]], Work]
    distributions: tuple[str, ...] = ()
    why_not: Callable[[object, int], str | None] = lambda case, arch: None
    tight: bool = False
    keeps_builds: bool = False
    own: bool = False
    way: str = ""

    def versions(self) -> dict[str, str | None]:
        return {name: record.version(name) for name in self.distributions}

    def why_absent(self, case: object, arch: int) -> str | None:
        """Why it is not measured on a case, None if it is."""
        missing = [name for name, version in self.versions().items() if version is None]
        return f"{', '.join(missing)} is not installed" if missing else self.why_not(case, arch)
