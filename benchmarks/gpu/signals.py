"""Signals that end the program, as errors: Ctrl-C, and the SIGTERM of ``timeout`` or of who lends the machine."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Signalled(BaseException):
    """Raised where the main thread is."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


@contextmanager
def as_errors() -> Iterator[None]:
    """The first is raised as `Signalled`; while what it has interrupted is told, others change nothing."""
    usual = {number: signal.getsignal(number) for number in NUMBERS}

    def answer(number: int, frame: FrameType | None) -> None:
        for each in NUMBERS:
            signal.signal(each, signal.SIG_IGN)
        raise Signalled(number)

    for number in NUMBERS:
        signal.signal(number, answer)
    try:
        yield
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)


def forget() -> None:
    """In a forked process: they mean there what they mean to every Python."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in NUMBERS[1:]:
        signal.signal(number, signal.SIG_DFL)
