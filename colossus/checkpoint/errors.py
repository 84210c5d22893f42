"""What is wrong with a checkpoint, in words."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint that cannot be written, read or used: says which one, what is wrong, and what to do."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint whose files are not as they were written. An older one beside it may be whole."""
