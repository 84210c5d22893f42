"""Permissions of files as another user than root meets them, also where the tests run as root."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

_VERSION = 0x20080522
#: that let root read and write whatever permissions say: CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
_OVERRIDES = 1 << 1 | 1 << 2


class _Header(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


class _Sets(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint32) for name in ("effective", "permitted", "inheritable")]


@contextmanager
def permissions_count() -> Iterator[None]:
    """Let permissions of files count for this thread, and for processes that it forks."""
    if os.getuid() != 0:
        yield
        return
    if sys.platform != "linux":
        pytest.skip("root reads everything, and its capabilities can be dropped on Linux alone")
    libc = ctypes.CDLL(None, use_errno=True)
    header, sets = _Header(_VERSION, 0), (_Sets * 2)()
    assert libc.capget(ctypes.byref(header), sets) == 0
    before = sets[0].effective
    sets[0].effective &= ~_OVERRIDES
    assert libc.capset(ctypes.byref(header), sets) == 0
    try:
        yield
    finally:
        sets[0].effective = before
        assert libc.capset(ctypes.byref(header), sets) == 0
