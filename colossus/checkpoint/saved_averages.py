"""Averages of weights in a checkpoint: what a hook keeps for each parameter under one entry. No torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from colossus.checkpoint.errors import CheckpointError
from colossus.checkpoint.manifest import Manifest

#: of the tensors that hooks keep for each parameter: keys are ``hook_state/<hook>/<parameter>/<entry>``
HOOK_STATE = "hook_state"
#: the entry that is an average of the parameter
AVERAGE = "average"


def averages_in(manifest: Manifest) -> dict[str, dict[str, str]]:
    """Name of each average (of the hook EMA ``ema``) -> name of a parameter -> key of its average."""
    found: dict[str, dict[str, str]] = {}
    for key in manifest.names(HOOK_STATE):
        if key.endswith(f"/{AVERAGE}"):
            hook, _, name = key.removesuffix(f"/{AVERAGE}").partition("/")
            found.setdefault(hook.lower(), {})[name] = f"{HOOK_STATE}/{key}"
    return found


def with_average(manifest: Manifest, name: str | None, folder: Path | str) -> Manifest:
    """The manifest of a folder with an average, if one is named, in the place of the parameters; what it has not
    averaged is as it was.

    Raises:
        CheckpointError: when there is no average of this name.
    """
    if name is None:
        return manifest
    found = averages_in(manifest)
    if name not in found:
        has = f"it has {', '.join(sorted(found))}" if found else "it has none: they are kept by the hooks EMA and SWA"
        raise CheckpointError(f"{folder}: there is no average {name!r} of weights in the checkpoint; {has}")
    averaged = {f"model/{parameter}": manifest.tensors[key] for parameter, key in found[name].items()}
    return replace(manifest, tensors={**manifest.tensors, **averaged})
