"""Shared memory of tests: as it is in the product, but less of it.

A group of ranks allocates all that it may ever use, and so does each of the many groups of a run whose tensors have a
few kilobytes: the kernel would clear some hundred megabytes for every test. What is of the sizes themselves asks for
`OWN_SLOT_BYTES`.
"""

from __future__ import annotations

from colossus.comm import links, shared_memory

OWN_SLOT_BYTES = shared_memory.SLOT_BYTES
_SMALL = 128 << 10


def shrink() -> None:
    """For this process and all that are forked from it."""
    shared_memory.SLOT_BYTES = links._BUFFER_BYTES = _SMALL
