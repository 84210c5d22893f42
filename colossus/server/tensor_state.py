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
    """Of a tensor.

    Attributes:
        rows: ``value`` and what the optimizer keeps for each row, under torch's names: [rows, ...]; of a scalar [1].
        scalars: what the optimizer keeps once (``step``).
    """

    rows: dict[str, Tensor]
    scalars: dict[str, float]


def gathered_state(
    splitter: Splitter, names: Sequence[str], call: Callable[..., Future[Reply]]
) -> Handle[dict[str, TensorState]]:
    """See `Servers.state`."""
    servers = splitter.by_server(names)
    calls = [call(server, "dump", {"names": of}) for server, of in servers.items()]

    def finish(replies: list[Reply]) -> dict[str, TensorState]:
        #: by name (first row, state), from each server that has a part
        found: dict[str, list[tuple[int, TensorState]]] = {name: [] for name in names}
        for of, reply in zip(servers.values(), replies, strict=True):
            arrays = iter(reply.arrays)
            for name, given in zip(of, reply.header["tensors"], strict=True):
                rows = {key: next(arrays) for key in given["keys"]}
                found[name].append((given["start"], TensorState(rows, given["scalars"])))
        return {name: _joined(splitter.shapes[name], parts) for name, parts in found.items()}

    return Handle(calls, finish)


def _joined(shape: tuple[int, ...], parts: list[tuple[int, TensorState]]) -> TensorState:
    """Of one tensor from its servers. State that one server has not made yet is 0."""
    whole = TensorState({}, {})
    for start, part in parts:
        for key, x in part.rows.items():
            made = whole.rows.setdefault(key, x.new_zeros(((shape or (1,))[0], *x.shape[1:])))
            made[start : start + len(x)] = x
        for key, scalar in part.scalars.items():
            whole.scalars[key] = max(scalar, whole.scalars.get(key, scalar))
    return whole


def split_state(
    splitter: Splitter, states: Mapping[str, TensorState], call: Callable[..., Future[Reply]]
) -> Handle[None]:
    """See `Servers.load_state`."""
    headers: dict[int, list[dict[str, Any]]] = {}
    arrays: dict[int, list[Tensor]] = {}
    for name, state in states.items():
        for part in splitter.ranges_of(name):
            here = {key: x[part.start : part.stop].contiguous() for key, x in state.rows.items()}
            about = {"name": name, "start": part.start, "keys": list(here), "scalars": state.scalars}
            headers.setdefault(part.server, []).append(about)
            arrays.setdefault(part.server, []).extend(here.values())
    calls = [
        call(server, "load", {"names": [given["name"] for given in of], "tensors": of}, arrays[server])
        for server, of in headers.items()
    ]
    return Handle(calls, lambda replies: None)
