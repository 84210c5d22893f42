"""Which address of this machine others reach it at."""

from __future__ import annotations

import pytest

from colossus import machine


def test_the_loopback_is_an_interface_with_an_address() -> None:
    name = machine.loopback_interface()
    if name is None or machine.interface_address(name) is None:
        pytest.skip("no loopback, or its address cannot be asked for")
    assert machine.interface_address(name) == "127.0.0.1"
    assert machine.interface_of("127.0.0.1") == name
    assert machine.address_towards("127.0.0.1") == "127.0.0.1"
    assert machine.interface_address("no-such-interface-with-a-long-name") is None
    assert machine.interface_of("192.0.2.1") is None
    assert machine.address_towards("no such host.invalid") is None


def test_an_address_that_others_cannot_reach_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def towards(host: str) -> str | None:
        asked.append(host)
        return {"10.0.0.3": "10.0.0.1"}.get(host)

    monkeypatch.setattr(machine, "address_towards", towards)
    assert machine.address_among("10.0.0.1", ["127.0.0.1", "10.0.0.2"]) == "10.0.0.1"
    assert machine.address_among("127.0.1.1", ["127.0.0.1", "::1"]) == "127.0.1.1"  # all on one machine
    assert asked == []
    assert machine.address_among("127.0.1.1", ["127.0.1.1", "10.0.0.2", "10.0.0.3", "10.0.0.4"]) == "10.0.0.1"
    assert asked == ["10.0.0.2", "10.0.0.3"]  # the first of them has no way
    assert machine.address_among("::1", ["10.0.0.2"]) == "::1"
