"""A request to stop as an addend of a sum over ranks: all of them learn that there is one, and which signal it was.

No torch.
"""

from __future__ import annotations

import signal

#: what may have asked for a stop, the last one wins: the program itself (None), or a signal to some rank
_REASONS = (None, signal.SIGUSR2, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
#: a reason counts more than those before it from so many ranks: their sum says which it was, in float32 too
_MOST_RANKS = 1 << 20


def addend(is_requested: bool, signum: int | None) -> float:
    """What a rank adds; 0 when it asks for nothing. A signal that is no stop signal counts as the program itself."""
    if not is_requested:
        return 0.0
    return float(_MOST_RANKS ** (_REASONS.index(signum) if signum in _REASONS else 0))


def signal_of(total: float) -> int | None:
    """The signal that stopped the run, None where nobody asked or no signal did."""
    reason = None
    for index, signum in enumerate(_REASONS):
        if signum is not None and total >= _MOST_RANKS**index:
            reason = int(signum)
    return reason
