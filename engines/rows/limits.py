"""Checks of knobs against limits of chips, for all schedules.

Each function yields the faults of knobs, and nothing if they are legal. Only the first fault is reported, so a check
may rely on the checks before it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from graphfuse.base.device import Device
from graphfuse.base.wording import counted
from graphfuse.contract.launch_limits import MAX_CTAS, MAX_THREADS, largest_cluster  # noqa: F401 - schedules' limits, too
from graphfuse.rows.pairs import Pairs

WARP = 32
MOST_PAIRED = 16
"""Maximum of columns in a thread's piece if columns are in pairs, as partners, cosines and sines need registers."""
MAX_DIVIDED = 2**31
"""Bound of the number of rows of several axes, whose coordinates are computed by division. With fewer rows, numbers
past the last row fit 32 bits, too."""
_MOST_STATIC = 48 << 10  # bytes of shared memory that a kernel may declare
_RESERVED = 1 << 10  # bytes of shared memory that the system reserves for each CTA


def power_faults(knobs: object, names: Sequence[str]) -> Iterator[str]:
    """Faults of knobs that are not powers of two."""
    for name in names:
        value = getattr(knobs, name)
        if type(value) is not int or value < 1 or value & (value - 1):
            yield f"{name} is {value!r}; accepted: a power of two"


def range_faults(knobs: object, limits: Mapping[str, tuple[int, int]]) -> Iterator[str]:
    """Faults of knobs that are not integers between two limits."""
    for name, (least, most) in limits.items():
        value = getattr(knobs, name)
        if type(value) is not int or not least <= value <= most:
            accepted = f"{least} {'or' if (least, most) == (0, 1) else 'to'} {most}"
            yield f"{name} is {value!r}; accepted: {accepted}" + " on this device" * (name == "ctas_per_sm")


def thread_faults(threads: int) -> Iterator[str]:
    if not WARP <= threads <= MAX_THREADS:
        yield f"threads is {threads}; accepted: {WARP} to {MAX_THREADS}"


def cluster_faults(threads_per_row: int, threads: int, device: Device) -> Iterator[str]:
    """Faults of rows that are spread over the threads of a cluster, as one CTA does not have enough threads."""
    most = largest_cluster(device)
    if threads_per_row > most * threads:
        limit = f"clusters of up to {most} CTAs" if most > 1 else f"no clusters: {device} is SM{device.sm}"
        yield f"threads_per_row {threads_per_row} exceeds threads {threads}; accepted: {limit}"


def block_faults(sizes: Iterable[int], piece: int, threads_per_row: int) -> Iterator[str]:
    """Faults of blocks that share a scale. Each must consist of whole pieces of threads of one row and one warp. sizes:
    of blocks, in elements."""
    for size in sizes:
        if not piece <= size <= min(threads_per_row, WARP) * piece:
            yield (
                f"threads_per_row is {threads_per_row}, each with {piece} elements together; accepted: pieces of up to "
                f"a block of {size}, which the threads of a row, and of a warp, must cover"
            )


def has_own_pairs(pairs: Iterable[Pairs], piece: int, threads_per_row: int, pieces: int) -> bool:
    """True if each thread has two pieces, whose columns are partners in all pairs that are not interleaved."""
    apart = [one for one in pairs if not one.interleaved]
    own = (one.count == threads_per_row * piece and not one.part for one in apart)
    return bool(apart) and pieces == 2 and all(own)


def pair_faults(
    pairs: Iterable[Pairs], piece: int, threads_per_row: int, pieces: int, exchanges_own: bool = False
) -> Iterator[str]:
    """Faults of pairs of columns. Both columns of a pair must be in one lane or in two lanes of a warp.

    pieces: their number for each thread. exchanges_own: whether a thread may have both columns in different pieces. A
    part with pairs has a power of two of pieces in one warp, for any number of pieces of a thread."""
    for one in pairs:
        own = exchanges_own and has_own_pairs(pairs, piece, threads_per_row, pieces)
        if piece > MOST_PAIRED:
            yield f"pieces have {piece} columns; accepted with pairs: up to {MOST_PAIRED}, as a thread has both of each"
        if pieces * piece > MOST_PAIRED and threads_per_row < WARP:
            yield f"threads_per_row is {threads_per_row}; accepted with pairs: up to {MOST_PAIRED} columns a thread"
        if one.interleaved and (one.columns % piece or piece % 2):
            yield f"pieces have {counted(piece, 'column')}; accepted: an even divisor of the {one.columns} in pairs"
        if not one.interleaved and one.count % piece:
            yield f"pieces have {counted(piece, 'column')}; accepted: a divisor of the {one.count} pairs"
        if not one.interleaved and one.part:
            if one.part > min(threads_per_row, WARP) * piece:
                yield (
                    f"threads_per_row is {threads_per_row}, pieces have {counted(piece, 'column')}; accepted for pairs "
                    f"that lie apart in parts of {one.part}: parts that the threads of a row, and of a warp, cover"
                )
        elif not one.interleaved and not own and (threads_per_row > WARP or pieces > 1):
            yield (
                f"threads_per_row is {threads_per_row}, with {pieces} pieces each; accepted for pairs of columns that "
                f"lie apart: up to {WARP}, with one piece" + ", or with two of the same pairs" * exchanges_own
            )


def period_faults(periods: Iterable[int], piece: int) -> Iterator[str]:
    """Faults of inputs that are the same for all parts of a row. Each part must consist of whole pieces."""
    for period in periods:
        if period % piece:
            yield f"pieces have {counted(piece, 'column')}; accepted: a divisor of the {period} of a part"


def static_faults(nbytes: int) -> Iterator[str]:
    """Faults of the shared memory that a kernel declares for the reduced values of a row's threads."""
    if nbytes > _MOST_STATIC:
        yield f"{nbytes} bytes of shared memory for sums over a row; accepted: {_MOST_STATIC}"


def resident_faults(ctas: int, nbytes: int, device: Device) -> Iterator[str]:
    """Faults of the number of CTAs that are to be resident on an SM, each with `nbytes` bytes of shared memory."""
    most = device.shared_memory_per_sm
    if ctas * (nbytes + _RESERVED) > most:
        yield f"{ctas} CTAs an SM, {nbytes} bytes of shared memory each; {device} has {most} an SM"
