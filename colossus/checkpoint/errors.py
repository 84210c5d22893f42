"""What is wrong with a checkpoint, in words."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint that cannot be written, read or used: says which one, what is wrong, and what to do."""


class NotACheckpoint(CheckpointError):
    """There is none where one was expected: no manifest, or one of something else or of another format version."""
