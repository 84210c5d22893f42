"""A resolved config as a file, which the launcher writes and its ranks read. No torch.

The file has every value that JSON can state. Classes, functions and other objects of the config, and addresses with
credentials, are not in it: each rank runs the user's file for these alone. All that the file says there is compared
with what it said in the launcher.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from colossus.config.errors import ConfigError, brief
from colossus.config.loading import validate
from colossus.config.printed import by_path, plain, without_credentials
from colossus.config.schema import Config
from colossus.config.section import Named

#: differences that a message lists
_MOST = 8
#: key of values in the file that JSON has no form for
_TAG = "$"


def write_resolved(path: Path, config: Config, stated: Config, copy: Path | None = None) -> None:
    """Write a resolved config.

    Args:
        path: path of the file, which nobody reads yet.
        config: the resolved config.
        stated: what the user's file and the overrides say, from `state_config`.
        copy: path of a copy for people, written as a whole or, where the disk does not take it, not at all.
    """
    text = json.dumps({"resolved": _encode(config), "stated": _stated(stated)}, indent=1) + "\n"
    path.write_text(text)
    if copy is None:
        return
    draft = copy.with_name(f".{copy.name}-{os.getpid()}")
    try:
        copy.parent.mkdir(parents=True, exist_ok=True)  # the disk of another host may lack it
        draft.write_text(text)
        draft.replace(copy)
    except OSError:
        with suppress(OSError):
            draft.unlink()


def read_resolved(path: Path, stated: Config, *, is_restart: bool = False) -> Config:
    """Return the config that `write_resolved` has written.

    Args:
        path: path of the file.
        stated: what the user's file and the overrides say in this process.
        is_restart: whether the user may have edited their file since the launch: the run keeps its values, and a line
            on standard error has what differs.

    Raises:
        ConfigError: the user's file says something else here than in the launcher, with the keys and both values.
    """
    content = json.loads(path.read_text())
    there, here = content["stated"], json.loads(json.dumps(_stated(stated)))
    keys = [key for key in {**there, **here} if _text(there, key) != _text(here, key)]
    if keys:
        problems = [
            f"{key}: {brief(here.get(key, 'absent'))} here, {brief(there.get(key, 'absent'))} in the launcher"
            for key in islice(keys, _MOST)
        ]
        head = "the config file does not say the same in each process of the run"
        if not is_restart:
            why = "it must not depend on the time, the rank or other things that differ between processes"
            raise ConfigError([f"{head}: {why}", *problems], stated.source)
        if os.environ.get("RANK") == "0":
            text = f"{stated.source} has changed since the launch, whose values stay: {'; '.join(problems)}"
            print(f"colossus: {text}", file=sys.stderr)
    config = validate(_decode(content["resolved"], stated, ""))
    config._source = stated.source
    return config


def _text(values: Mapping[str, Any], key: str) -> str:
    """Return the value of a key as JSON, in which NaN is equal to NaN; empty where there is none."""
    return json.dumps(values[key], sort_keys=True) if key in values else ""


def _stated(config: Config) -> dict[str, Any]:
    """Return what a config says as JSON-able data, by key."""
    if isinstance(config.data, list | tuple):  # of samples, which may be many
        config = config.model_copy(update={"data": type(config.data)})
    return dict(by_path(plain(config)))


def _encode(value: Any) -> Any:
    """Return a value as JSON: a section as the keys that are set, an object as a mark."""
    if value is None or type(value) in (bool, int, float):
        return value
    if type(value) is str and without_credentials(value) == value:
        return value
    if isinstance(value, BaseModel):
        keys = {name: _below(value, name) for name in value.model_fields_set}
        if isinstance(value, Config) and not isinstance(value.data, Named | None):  # a list of samples, say
            keys["data"] = ...
        return {name: _encode(item) for name, item in keys.items()}
    if type(value) is dict and all(type(key) is str and key != _TAG for key in value):
        return {key: _encode(item) for key, item in value.items()}
    if type(value) is list:
        return [_encode(item) for item in value]
    return {_TAG: [_encode(item) for item in value] if type(value) is tuple else "object"}


def _decode(value: Any, stated: Any, path: str) -> Any:
    """Return a value from its JSON.

    Args:
        value: the JSON.
        stated: the value of the same key in this process's config, for objects.
        path: the key.
    """
    if isinstance(value, dict) and _TAG in value:
        if isinstance(value[_TAG], list):
            return tuple(_decode(item, _below(stated, at), f"{path}.{at}") for at, item in enumerate(value[_TAG]))
        if stated is None:
            raise ConfigError(
                f"{path.lstrip('.')}: the config file has no object here, but had one in the launcher, which cannot "
                f"pass it on: put it back into the file, and continue by --resume"
            )
        return stated
    if isinstance(value, dict):
        return {key: _decode(item, _below(stated, key), f"{path}.{key}") for key, item in value.items()}
    if isinstance(value, list):
        return [_decode(item, _below(stated, at), f"{path}.{at}") for at, item in enumerate(value)]
    return value


def _below(value: Any, key: str | int) -> Any:
    """Return what a config has at a key of a value; a bare value is its own ``type``."""
    if isinstance(value, BaseModel):
        extra = value.model_extra or {}  # which may be named as a method is
        return extra[key] if key in extra else getattr(value, str(key), None)
    if isinstance(value, Mapping):
        return value.get(key)
    if isinstance(value, list | tuple) and isinstance(key, int):
        return value[key] if key < len(value) else None
    return value if key == "type" else None
