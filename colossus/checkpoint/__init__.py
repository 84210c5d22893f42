"""Checkpoints, and state by logical name and full shape, whatever the plan.

A run saves and loads through ``engine.checkpoints``. Without an engine, and without processes: `read_state_dict` and
`stream_saved_state_dict` give the plain ``torch.nn`` module's state dict out of a folder; `CheckpointReader` reads any
box of any tensor. What is wrong with a checkpoint is a `CheckpointError`.
"""

from typing import TYPE_CHECKING

from colossus._lazy import lazy_names

if TYPE_CHECKING:
    from colossus.checkpoint.errors import CheckpointError, DamagedCheckpoint
    from colossus.checkpoint.reader import CheckpointReader
    from colossus.checkpoint.state_dict import (
        full_state_dict,
        load_full_state_dict,
        read_state_dict,
        stream_saved_state_dict,
        stream_state_dict,
    )

__all__ = [
    "CheckpointError",
    "CheckpointReader",
    "DamagedCheckpoint",
    "full_state_dict",
    "load_full_state_dict",
    "read_state_dict",
    "stream_saved_state_dict",
    "stream_state_dict",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "CheckpointError": "errors",
        "CheckpointReader": "reader",
        "DamagedCheckpoint": "errors",
        "full_state_dict": "state_dict",
        "load_full_state_dict": "state_dict",
        "read_state_dict": "state_dict",
        "stream_saved_state_dict": "state_dict",
        "stream_state_dict": "state_dict",
    },
)
