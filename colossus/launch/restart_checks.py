"""The check of config keys that need a restart by the launcher. No torch."""

from __future__ import annotations

import os

from colossus.config import Config, ConfigError
from colossus.launch.memory_folder import HOST_MEMORY


def check_restart_keys(config: Config) -> None:
    """Raise ConfigError for each key that would have no effect without a restart, or that this host cannot serve."""
    train, checkpoint, restarts = config.train, config.checkpoint, config.launch.restarts
    leaves_out = train.on_spike is not None and train.on_spike.action == "rollback"
    goes_back = {
        "train.on_mismatch = 'restart'": train.on_mismatch == "restart",
        "train.on_spike.action = 'rollback'": leaves_out,
    }
    keys = {f"checkpoint.memory_every = {checkpoint.memory_every}": checkpoint.memory_every > 0, **goes_back}
    asked = [key for key, is_asked in keys.items() if is_asked]
    problems = []
    if asked and (restarts is None or not restarts.max):
        problems += [f"{key} is for a restart by the launcher: set launch.restarts" for key in asked]
    if checkpoint.memory_every and not os.access(HOST_MEMORY, os.W_OK):
        problems.append(f"checkpoint.memory_every: this host has no {HOST_MEMORY} that can be written to")
    for key in [key for key, is_asked in goes_back.items() if is_asked and not checkpoint.every]:
        problems.append(f"{key} goes back to a checkpoint: set checkpoint.every")
    num_steps = (checkpoint.keep_last - 1) * checkpoint.every
    keeps_few = checkpoint.every and checkpoint.keep_last and not checkpoint.keep_every
    if train.on_mismatch == "restart" and keeps_few and num_steps < train.check_replicas_every:
        problems.append(
            f"train.on_mismatch = 'restart' goes back behind the last comparison that agreed, "
            f"train.check_replicas_every = {train.check_replicas_every} steps, and checkpoint.keep_last = "
            f"{checkpoint.keep_last} with checkpoint.every = {checkpoint.every} has checkpoints of the last "
            f"{num_steps} steps: keep more, or compare more often"
        )
    if leaves_out and train.batch_ramp is not None:
        problems.append("train.on_spike.action = 'rollback': batches of a batch_ramp cannot be left out")
    if problems:
        raise ConfigError(problems, config.source)
