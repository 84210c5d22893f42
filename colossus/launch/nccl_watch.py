"""A collective that NCCL's watchdog gives up becomes a failure like any other.

After a time-out the watchdog waits a minute and then ends the process by SIGABRT, while the main thread waits for the
device and hears of nothing. This thread asks the watchdogs, writes down what the rank was doing, and ends the process.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

LOOK_SECONDS = 0.5
#: a main thread that has heard of the error itself may say so: it knows more
_OWN_WORDS_SECONDS = 2.0
_CAUSES = {
    "TIMEOUT": "did not end within comm.timeout_seconds = {timeout:g}",
    "COMM_ERROR": "failed: the network, or a rank that has ended (NCCL_DEBUG=WARN says more)",
    "REMOTE_ERROR": "failed on another rank",
}


def watch(give_up: Callable[[str], None], is_ending: Callable[[], bool], timeout_seconds: float) -> None:
    """Look after the collectives of this process from a thread of its own.

    Args:
        give_up: called with a message when one of them is lost; it does not return.
        is_ending: whether this process is about to end already.
    """
    threading.Thread(
        target=_watch, args=(give_up, is_ending, timeout_seconds), name="colossus-nccl-watch", daemon=True
    ).start()


def _watch(give_up: Callable[[str], None], is_ending: Callable[[], bool], timeout_seconds: float) -> None:
    from colossus.comm import flight_recorder

    while True:
        time.sleep(LOOK_SECONDS)
        found = None
        with contextlib.suppress(RuntimeError, ValueError, KeyError):  # a group is being made or destroyed
            found = flight_recorder.failed_group()
        if found is None:
            continue
        group, error = found
        if error != "TIMEOUT":
            time.sleep(_OWN_WORDS_SECONDS)
        if not is_ending():
            give_up(describe(group, error, timeout_seconds))


def describe(group: str, error: str, timeout_seconds: float) -> str:
    """``timeout: a collective over data did not end within ..``"""
    from colossus.launch.recordings import axes_of

    cause = _CAUSES.get(error, f"failed ({error})").format(timeout=timeout_seconds)
    kind = "timeout" if error == "TIMEOUT" else "NCCL"
    return f"{kind}: a collective over {axes_of(group)} {cause}"
