"""Checkpoints, and state by logical name and full shape, whatever the plan.

A run saves and loads through ``engine.checkpoints``. `read_state_dict` and `stream_saved_state_dict` need no engine and
no processes: they read the state dict of the plain ``torch.nn`` module from a folder. `CheckpointReader` reads any box
of any tensor. A checkpoint that cannot be used is a `CheckpointError`.
"""

from typing import TYPE_CHECKING

from colossus._lazy import lazy_names

if TYPE_CHECKING:
    from colossus.checkpoint.errors import CheckpointError, DamagedCheckpoint
    from colossus.checkpoint.reader import CheckpointReader
    from colossus.checkpoint.state_dict import read_state_dict, stream_saved_state_dict
    from colossus.state.model_state_dict import full_state_dict, load_full_state_dict, stream_state_dict

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
        "full_state_dict": ".state.model_state_dict",
        "load_full_state_dict": ".state.model_state_dict",
        "read_state_dict": "state_dict",
        "stream_saved_state_dict": "state_dict",
        "stream_state_dict": ".state.model_state_dict",
    },
)
