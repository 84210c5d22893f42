"""Averages of weights in a checkpoint: the state of a hook for each parameter under one entry. No torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from colossus.checkpoint.errors import CheckpointError
from colossus.checkpoint.manifest import Manifest

#: section of the state that hooks keep for each parameter: keys are ``hook_state/<hook>/<parameter>/<entry>``
HOOK_STATE = "hook_state"
#: name of the entry that is an average of the parameter
AVERAGE = "average"


def averages_in(manifest: Manifest) -> dict[str, dict[str, str]]:
    """Return, by name of each average (``ema`` for the hook EMA), the key of each parameter's average."""
    averages: dict[str, dict[str, str]] = {}
    for key in manifest.names(HOOK_STATE):
        if key.endswith(f"/{AVERAGE}"):
            hook, _, name = key.removesuffix(f"/{AVERAGE}").partition("/")
            averages.setdefault(hook.lower(), {})[name] = f"{HOOK_STATE}/{key}"
    return averages


def with_average(manifest: Manifest, name: str | None, folder: Path | str) -> Manifest:
    """Return a manifest whose parameters are replaced by a named average; one without an average stays.

    Args:
        manifest: manifest of the checkpoint.
        name: name of the average; None returns the manifest unchanged.
        folder: folder of the checkpoint, for messages.

    Raises:
        CheckpointError: if there is no average of this name.
    """
    if name is None:
        return manifest
    averages = averages_in(manifest)
    if name not in averages:
        has = (
            f"it has {', '.join(sorted(averages))}"
            if averages
            else "it has none: they are kept by the hooks EMA and SWA"
        )
        raise CheckpointError(f"{folder}: there is no average {name!r} of weights in the checkpoint; {has}")
    averaged = {f"model/{parameter}": manifest.tensors[key] for parameter, key in averages[name].items()}
    return replace(manifest, tensors={**manifest.tensors, **averaged})
