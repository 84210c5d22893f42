"""Paths of a user: in a config, on a command line, in a call."""

from __future__ import annotations

import os
from pathlib import Path

from colossus.config.errors import ConfigError


def user_path(path: str | os.PathLike[str]) -> Path:
    """Return a path in which ``~`` is the home; a shell does not expand it in ``--run-dir=~/x``.

    The result may be passed in again: ``./~x``, which `Path` makes ``~x``, becomes absolute.

    Raises:
        ConfigError: if the home is unknown, since HOME is not set and the user has no name, as in containers; or it is
            no path.
    """
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(f"{path!r} is a {type(path).__name__}, not a path")
    text = os.fspath(path)
    expanded = os.path.expanduser(text)
    if expanded.startswith("~"):
        whose = expanded.partition("/")[0]
        why = f"HOME is not set, and user {os.getuid()} has no name here" if whose == "~" else "there is no such user"
        raise ConfigError(
            f"{text}: {whose} is not known: {why}; write the whole path, or ./{text} for one of this name"
        )
    whole = Path(expanded)
    return Path.cwd() / whole if str(whole).startswith("~") else whole
