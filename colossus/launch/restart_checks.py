"""What a config asks for that only a restart by the launcher gives. No torch."""

from __future__ import annotations

import os

from colossus.config import Config, ConfigError
from colossus.launch.memory_folder import HOST_MEMORY


def check_restart_keys(config: Config) -> None:
    """Refuse what would have no effect, or no place.

    Raises:
        ConfigError: naming each key.
    """
    train, checkpoint, restarts = config.train, config.checkpoint, config.launch.restarts
    goes_back = train.on_spike is not None and train.on_spike.action == "rollback"
    keys = {
        f"checkpoint.memory_every = {checkpoint.memory_every}": checkpoint.memory_every > 0,
        "train.on_mismatch = 'restart'": train.on_mismatch == "restart",
        "train.on_spike.action = 'rollback'": goes_back,
    }
    asked = [key for key, is_asked in keys.items() if is_asked]
    problems = []
    if asked and (restarts is None or not restarts.max):
        problems += [f"{key} is for a restart by the launcher: set launch.restarts" for key in asked]
    if checkpoint.memory_every and not os.access(HOST_MEMORY, os.W_OK):
        problems.append(f"checkpoint.memory_every: this host has no {HOST_MEMORY} that can be written to")
    if goes_back and not checkpoint.every:
        problems.append("train.on_spike.action = 'rollback' goes back to a checkpoint: set checkpoint.every")
    if goes_back and train.batch_ramp is not None:
        problems.append("train.on_spike.action = 'rollback': batches of a batch_ramp cannot be left out")
    if problems:
        raise ConfigError(problems, config.source)
