"""The variables that tell a worker where its servers are."""

from __future__ import annotations

import json
from typing import Any

import pytest

from colossus.server import environment
from colossus.server.environment import SERVERS, TOKEN, ServersError


def endpoint(index: int, **changes: Any) -> dict[str, Any]:
    return dict(index=index, host="127.0.0.1", port=4711, unix=None, host_id="h", process=12) | changes


def test_what_is_written_is_read() -> None:
    token, variables = environment.new_token(), dict[str, str]()
    assert not environment.is_given(variables)
    environment.write([endpoint(0), endpoint(1, unix="x")], token, variables)
    assert environment.is_given(variables)
    given = environment.read(variables)
    assert given.endpoints == [endpoint(0), endpoint(1, unix="x")]
    assert given.token == token
    assert environment.new_token() != token


WRONG = {
    "no servers": ({SERVERS: None}, "COLOSSUS_SERVERS is not set"),
    "no token": ({TOKEN: None}, "COLOSSUS_SERVER_TOKEN is not set"),
    "a short token": ({TOKEN: "ab"}, "has 2 characters, where 64 hexadecimal digits are expected"),
    "no hexadecimal": ({TOKEN: "x" * 64}, "hexadecimal"),
    "no json": ({SERVERS: "[{"}, "COLOSSUS_SERVERS is no JSON"),
    "deep": ({SERVERS: "[" * 100_000}, "COLOSSUS_SERVERS is no JSON"),
    "empty": ({SERVERS: "[]"}, "at least one endpoint"),
    "an object": ({SERVERS: "{}"}, "at least one endpoint"),
    "a string": ({SERVERS: '["a"]'}, "entry 0: an endpoint is an object"),
    "order": ({SERVERS: json.dumps([endpoint(1)])}, "entry 0: it is the endpoint of server 1"),
    "twice": ({SERVERS: json.dumps([endpoint(0), endpoint(0)])}, "entry 1: it is the endpoint of server 0"),
    "a port": ({SERVERS: json.dumps([endpoint(0, port=70000)])}, "port is 70000"),
    "a truth": ({SERVERS: json.dumps([endpoint(0, port=True)])}, "port is True, where int is expected"),
    "a host": ({SERVERS: json.dumps([endpoint(0, host=None)])}, "host is None, where str is expected"),
    "nothing": ({SERVERS: json.dumps([{"index": 0}])}, "host is missing"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said(case: str) -> None:
    changes, message = WRONG[case]
    variables: dict[str, str] = {}
    environment.write([endpoint(0)], environment.new_token(), variables)
    for name, value in changes.items():
        if value is None:
            del variables[name]
        else:
            variables[name] = value
    with pytest.raises(ServersError, match=message):
        environment.read(variables)
