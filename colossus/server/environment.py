"""How a worker learns of its servers: two environment variables, set by who launches it. No torch."""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

#: a JSON list of endpoints, in the order of the servers
SERVERS = "COLOSSUS_SERVERS"
#: the key of the run, hexadecimal
TOKEN = "COLOSSUS_SERVER_TOKEN"

#: of silence, after which a server can be taken for dead at the earliest: each end gives a sign of life in a second
LEAST_TIMEOUT_SECONDS = 3.0

_TOKEN_BYTES = 32
_MOST_PORT = 65535
#: fields of an endpoint, and what they are
_FIELDS: dict[str, type] = {
    "index": int,
    "host": str,
    "port": int,
    "process": int,
}


class ServersError(ValueError):
    """The environment does not say, or not rightly, where the servers are."""


@dataclass(frozen=True)
class Given:
    """What the environment says.

    Attributes:
        endpoints: of the servers, by index.
        token: of the run.
    """

    endpoints: list[dict[str, Any]]
    token: bytes


def new_token() -> bytes:
    """The key of a run, made once, by who launches it."""
    return secrets.token_bytes(_TOKEN_BYTES)


def write(
    endpoints: Sequence[Mapping[str, Any]], token: bytes, environment: MutableMapping[str, str] = os.environ
) -> None:
    """Set both variables, for the processes that are started with this environment."""
    environment[SERVERS] = json.dumps([dict(endpoint) for endpoint in endpoints])
    environment[TOKEN] = token.hex()


def is_given(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the variables are set."""
    return SERVERS in environment


def read(environment: Mapping[str, str] = os.environ) -> Given:
    """Where the servers are.

    Raises:
        ServersError: a variable is missing or is not what `write` writes.
    """
    for name in (SERVERS, TOKEN):
        if name not in environment:
            raise ServersError(
                f"{name} is not set: `colossus launch` sets it for its workers, where it starts servers (strategy "
                "type='server')"
            )
    token = environment[TOKEN]
    if not re.fullmatch(rf"[0-9a-fA-F]{{{2 * _TOKEN_BYTES}}}", token):
        raise ServersError(
            f"{TOKEN} has {len(token)} characters, where {2 * _TOKEN_BYTES} hexadecimal digits are expected"
        )
    try:
        endpoints = json.loads(environment[SERVERS])
    except (ValueError, RecursionError) as error:
        raise ServersError(f"{SERVERS} is no JSON: {error}") from error
    if not isinstance(endpoints, list) or not endpoints:
        raise ServersError(f"{SERVERS} is not a list of at least one endpoint")
    for index, endpoint in enumerate(endpoints):
        if (wrong := wrong_endpoint(endpoint)) is not None:
            raise ServersError(f"{SERVERS}, entry {index}: {wrong}")
        if endpoint["index"] != index:
            raise ServersError(
                f"{SERVERS}, entry {index}: it is the endpoint of server {endpoint['index']}; entries come in the "
                "order of the servers, each once"
            )
    return Given(endpoints, bytes.fromhex(token))


def wrong_endpoint(endpoint: object) -> str | None:
    """What is wrong with the endpoint of a server; None if nothing is."""
    if not isinstance(endpoint, dict):
        return f"an endpoint is an object of {', '.join(_FIELDS)}, not {_shown(endpoint)}"
    for name, kind in _FIELDS.items():
        if name not in endpoint:
            return f"{name} is missing"
        if type(endpoint[name]) is not kind:
            return f"{name} is {_shown(endpoint[name])}, where {kind.__name__} is expected"
    if not 0 < endpoint["port"] <= _MOST_PORT:
        return f"port is {endpoint['port']}, where 1 to {_MOST_PORT} are possible"
    if endpoint["index"] < 0:
        return f"index is {endpoint['index']}"
    return None


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
