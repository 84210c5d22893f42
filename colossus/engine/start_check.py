"""What all ranks must agree on before they train together: settings, code, and the values a run starts from.

Every rank computes hashes of its own, one gather compares them, and only where they differ is more sent, to name what
differs. Ranks that disagree in silence would train different models, or one that nobody asked for.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

import colossus
from colossus.arithmetic import named_ranks
from colossus.comm.objects import all_gather_object
from colossus.config import Config, ConfigError
from colossus.config.resolved import as_dict
from colossus.context.groups import AxisGroup

#: differences that a message lists
_MOST = 8


def require_same_settings(config: Config, functions: Mapping[str, Callable[..., Any] | None], group: AxisGroup) -> None:
    """That all ranks have the same resolved config, and the same code to run it with.

    Args:
        functions: name -> what was passed to `colossus.initialize` from the user's own files.

    Raises:
        ConfigError: on all ranks, with each key that differs, its values, and the ranks that have them.
    """
    settings = dict(_flat(as_dict(config), ""))
    settings["version of colossus"] = colossus.__version__
    settings["source of colossus"] = _hash_of_files(Path(colossus.__file__).parent)
    settings["version of torch"] = torch.__version__
    settings |= {f"source file of {name}": _hash_of_source(function) for name, function in functions.items()}
    digest = hashlib.blake2b(json.dumps(settings, sort_keys=True, default=str).encode(), digest_size=16).digest()
    if len(set(all_gather_object(digest, group))) == 1:
        return
    by_rank = all_gather_object(settings, group)
    keys = [key for key in dict.fromkeys(key for one in by_rank for key in one) if differs(key, by_rank)]
    problems = [f"{key}: {_values(key, by_rank)}" for key in keys[:_MOST]]
    if len(keys) > _MOST:
        problems.append(f"and {len(keys) - _MOST} more keys")
    raise ConfigError(
        [
            "the ranks of this run were started with different settings: give all of them the same config, overrides "
            "and code",
            *problems,
        ]
    )


def differs(key: str, by_rank: Iterable[Mapping[str, Any]]) -> bool:
    return len({repr(one.get(key)) for one in by_rank}) > 1


def _values(key: str, by_rank: list[dict[str, Any]]) -> str:
    """``3 on rank 0; 4 on ranks 1, 2``, the value that most ranks have first."""
    ranks: dict[str, list[int]] = {}
    for rank, one in enumerate(by_rank):
        ranks.setdefault(repr(one[key]) if key in one else "absent", []).append(rank)
    return "; ".join(f"{value} on {named_ranks(found)}" for value, found in sorted(ranks.items(), key=_most_ranks))


def _most_ranks(item: tuple[str, list[int]]) -> tuple[int, int]:
    return -len(item[1]), item[1][0]


def _flat(value: Any, key: str) -> Iterable[tuple[str, Any]]:
    if not isinstance(value, dict) or not value:
        yield key, value
        return
    for name, item in value.items():
        yield from _flat(item, f"{key}.{name}" if key else name)


@functools.cache
def _hash_of_files(folder: Path) -> str:
    found = hashlib.blake2b(digest_size=8)
    for path in sorted(folder.rglob("*.py")):
        found.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()


def _hash_of_source(function: Any) -> str | None:
    """Of the file that a function or class was written in; None where there is none (a notebook, an instance)."""
    while isinstance(function, functools.partial):
        function = function.func
    try:
        return hashlib.blake2b(Path(inspect.getfile(function)).read_bytes(), digest_size=8).hexdigest()
    except (TypeError, OSError):
        return None
