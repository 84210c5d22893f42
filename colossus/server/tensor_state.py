"""The state of tensors at servers: values and what optimizers keep, gathered from servers and split among them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from colossus.server.handles import Handle
from colossus.server.messages import Reply
from colossus.server.pieces import Splitter


@dataclass(frozen=True)
class TensorState:
    """Of some rows of a tensor.

    Attributes:
        start, stop: the rows; of a scalar 0 and 1.
        rows: ``value`` and what the optimizer keeps for each row, under torch's names: [stop - start, ...]; of a scalar
            [1].
        scalars: what the optimizer keeps once (``step``).
    """

    start: int
    stop: int
    rows: dict[str, Tensor]
    scalars: dict[str, float]


def gathered_state(
    splitter: Splitter, names: Sequence[str], bounds: Mapping[str, tuple[int, int]], call: Callable[..., Future[Reply]]
) -> Handle[dict[str, TensorState]]:
    """See `Servers.state`."""
    wanted = {name: bounds.get(name, (0, (splitter.shapes[name] or (1,))[0])) for name in names}
    servers: dict[int, list[str]] = {}
    for name, (start, stop) in wanted.items():
        for part in splitter.ranges_of(name):
            if (part.start < stop and start < part.stop) or not len(part):
                servers.setdefault(part.server, []).append(name)
    calls = [
        call(server, "dump", {"names": of, "bounds": [wanted[name] for name in of]}) for server, of in servers.items()
    ]

    def finish(replies: list[Reply]) -> dict[str, TensorState]:
        found: dict[str, list[tuple[dict[str, Any], dict[str, Tensor]]]] = {name: [] for name in names}
        for of, reply in zip(servers.values(), replies, strict=True):
            arrays = iter(reply.arrays)
            for name, given in zip(of, reply.header["tensors"], strict=True):
                found[name].append((given, {key: next(arrays) for key in given["keys"]}))
        return {name: _joined(*wanted[name], pieces) for name, pieces in found.items()}

    return Handle(calls, finish)


def _joined(start: int, stop: int, pieces: list[tuple[dict[str, Any], dict[str, Tensor]]]) -> TensorState:
    """The pieces of one tensor from its servers. State that one server has not made yet is 0."""
    keys = {key: x for _, arrays in pieces for key, x in arrays.items()}
    rows = {key: x.new_zeros((stop - start, *x.shape[1:])) for key, x in keys.items()}
    scalars: dict[str, float] = {}
    for given, arrays in pieces:
        for key, x in arrays.items():
            rows[key][given["start"] - start : given["start"] - start + len(x)] = x
        for key, scalar in given["scalars"].items():
            scalars[key] = max(scalar, scalars.get(key, scalar))
    return TensorState(start, stop, rows, scalars)


def split_state(
    splitter: Splitter, states: Mapping[str, TensorState], call: Callable[..., Future[Reply]]
) -> Handle[None]:
    """See `Servers.load_state`."""
    headers: dict[int, list[dict[str, Any]]] = {}
    arrays: dict[int, list[Tensor]] = {}
    for name, state in states.items():
        for part in splitter.ranges_of(name):
            first = max(part.start, state.start)
            last = max(first, min(part.stop, state.stop))
            if first == last and len(part):
                continue
            here = {key: x[first - state.start : last - state.start].contiguous() for key, x in state.rows.items()}
            headers.setdefault(part.server, []).append(
                {"name": name, "start": first, "keys": list(here), "scalars": state.scalars}
            )
            arrays.setdefault(part.server, []).extend(here.values())
    calls = [
        call(server, "load", {"names": [given["name"] for given in of], "tensors": of}, arrays[server])
        for server, of in headers.items()
    ]
    return Handle(calls, lambda replies: None)
