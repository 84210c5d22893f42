"""Requests of synchronous steps: parts of gradients, the squares of their sums, one update."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from colossus.rows.row_gradient import RowGradient
from colossus.server.arrivals import Arrivals
from colossus.server.messages import Request
from colossus.server.shard import Part
from colossus.server.stored_tensors import StoredTensors
from colossus.server.sync_steps import SyncSteps
from colossus.server.waiting import Answer, Awaited, WaitingRequests


class StepRequests:
    """Of one server.

    Args:
        gone: workers that have ended, and why.
    """

    def __init__(self, tensors: StoredTensors, waiting: WaitingRequests, gone: Mapping[int, str]) -> None:
        self._tensors, self._waiting, self._gone = tensors, waiting, gone
        self._steps: dict[str, SyncSteps] = {}
        self._arrivals: dict[tuple[int, ...], Arrivals] = {}

    @property
    def num_late(self) -> int:
        return sum(steps.num_late for steps in self._steps.values())

    def accumulate(self, request: Request) -> None:
        """Parts of a step. Header: step, names, kinds, workers (who take part), backups. The reply says which are
        late."""
        header = request.header
        workers = tuple(header["workers"])
        found = self._tensors.parts(header["names"], header["kinds"], request.arrays)
        for shard, part in found:
            shard.check("gradient", part, {"lr": 0.0})
        late = []
        for name, (_, part) in zip(header["names"], found, strict=True):
            steps = self._steps.setdefault(name, SyncSteps())
            if not steps.accumulate(header["step"], request.worker, _own(part), workers, bool(header["backups"])):
                late.append(name)
        request.reply({"late": late})

    def arrive(self, request: Request) -> None:
        """A worker has given all its parts to all servers. Header: step, workers, backups. Answered when it is known
        whom the step is made of: included, empty where that was long ago; newest: the newest step that is known."""
        header = request.header
        workers = tuple(header["workers"])
        arrivals = self._arrivals.setdefault(workers, Arrivals())
        arrivals.arrive(header["step"], request.worker)

        def answer() -> Answer | None:
            included = arrivals.included(header["step"], workers, header["backups"], self._gone)
            if included is None:
                return None
            return lambda: request.reply({"included": list(included), "newest": arrivals.newest})

        def awaited() -> Awaited:
            return arrivals.missing(header["step"], workers, self._gone), f"have not arrived in step {header['step']}"

        self._waiting.add(request, answer, awaited)

    def squares(self, request: Request) -> None:
        """Of each tensor the square of the norm of the sum over workers, answered when all parts are here. Header:
        step, names, included. The reply: late, names whose step was applied long ago; one array, float64 [names]."""
        step, names, included = request.header["step"], request.header["names"], tuple(request.header["included"])

        def answer() -> Answer | None:
            shards = self._tensors.shards(names)
            for name in names:
                missing = self._steps.setdefault(name, SyncSteps()).missing(step, included)
                for worker in missing:
                    if worker in self._gone:
                        raise ValueError(
                            f"worker {worker} has gone ({self._gone[worker]}) without its part of {name!r} in step "
                            f"{step}"
                        )
                if missing:
                    return None
            found = [
                self._steps[name].squares(step, included, shard.values)
                for name, shard in zip(names, shards, strict=True)
            ]
            late = [name for name, squares in zip(names, found, strict=True) if squares is None]
            array = torch.tensor([squares or 0.0 for squares in found], dtype=torch.float64)
            return lambda: request.reply({"late": late}, [array])

        def awaited() -> Awaited:
            missing = {name: self._steps[name].missing(step, included) for name in names if name in self._steps}
            workers = sorted({worker for those in missing.values() for worker in those})
            of = next((repr(name) for name, those in missing.items() if those), "any tensor")
            return workers, f"have not given their part of {of} in step {step}"

        self._waiting.add(request, answer, awaited)

    def apply(self, request: Request) -> list[Tensor]:
        """Update by the sums of a step, once, whoever asks first. Header: step, names, options (for each: of the
        optimizer, and scale), found_inf: the sums are dropped. Returns the values afterwards. What one tensor refuses
        changes none, and no sum is taken."""
        header = request.header
        step, names = header["step"], header["names"]
        shards = self._tensors.shards(names)
        for name, shard, options in zip(names, shards, header["options"], strict=True):
            if name not in self._steps:
                raise ValueError(f"step {step} of {name!r} is to be applied, and nobody has given a part of it")
            total = self._steps[name].peek(step)
            if total is not None and not header["found_inf"]:
                shard.check("gradient", total, options)
        for name, shard, options in zip(names, shards, header["options"], strict=True):
            total = self._steps[name].take(step)
            if total is not None and not header["found_inf"]:
                shard.push("gradient", total, options)
        return [shard.values for shard in shards]

    def restart(self, names: list[str]) -> None:
        """Forget steps of tensors: their state was loaded, or they were freed."""
        for name in names:
            self._steps.pop(name, None)


def _own(part: Part) -> Part:
    """A copy; what is narrower than float32 is widened, to be added up."""
    if part is None:
        return None
    if isinstance(part, RowGradient):
        return RowGradient(part.ids.clone(), _wide(part.rows))
    return _wide(part)


def _wide(values: Tensor) -> Tensor:
    return values.to(torch.float32 if values.itemsize < torch.float32.itemsize else values.dtype, copy=True)
