"""The check that copies of parameters on several ranks stay equal during a run.

A device that computes wrong, or memory that loses a bit, raises nothing: from then on ranks train different models.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from colossus.arithmetic import named_ranks
from colossus.comm import collectives
from colossus.comm.host_transfer import HostRead, send_to
from colossus.comm.late import Late
from colossus.comm.objects import all_gather_object
from colossus.data_parallel.strategy import Strategy
from colossus.engine.consistency import INTEGERS
from colossus.engine.rollback import Rollback
from colossus.layout.parameter import logical_name, rows_of, spec_of
from colossus.layout.split_parameter import as_shards
from colossus.random import hash_key

#: a logical parameter, and coordinates of the shard of it: values that must be equal
Copy = tuple[str, tuple[int, ...]]
#: parameters that a message lists
_MOST = 4
#: elements that are summed at once
_PIECE = 1 << 20
#: odd, so that products modulo 2^64 lose nothing
_FACTORS = (0x2545F4914F6CDD1D, 0x1B873593CC9E2D51)


class ReplicasDiffer(RuntimeError):
    """The error for ranks with different values of parameters that must be equal.

    It is raised on all ranks that exchange gradients, with the same message.

    Attributes:
        parameters: full logical names of the parameters that differ.
        rollback: how the launcher continues; None if the run should end.
    """

    def __init__(self, message: str, parameters: list[str], rollback: Rollback | None = None) -> None:
        super().__init__(message)
        self.parameters, self.rollback = parameters, rollback


class ReplicaCheck:
    """The comparison of ranks with the same shard of parameters, every so many steps, by one number for all of them.

    A parameter has copies along the axes that do not shard it, neither for compute nor for storage, and on the pipeline
    ranks that share a tied one. With h its checksum and n ranks with a copy, the first of them adds (n - 1) h and each
    other one subtracts h, modulo 2^64, so that the total over the ranks is 0 if they agree. If it is not 0, the
    checksums themselves are exchanged. Rows that ZeRO stores once have no copy. Under an inexact strategy replicas are
    not compared with each other, but the ranks of a replica are.

    On an accelerator nothing waits for the total: it is checked after the next step, but after the last step at once.

    Args:
        every: steps between checks.
        steps: steps of the run.
        strategy: the data-parallel strategy.
        rolls_back: whether the launcher goes back if they differ (``train.on_mismatch``).

    Raises:
        ValueError: if no parameter of the model has a copy on another rank.
    """

    def __init__(self, every: int, steps: int, strategy: Strategy, *, rolls_back: bool = False) -> None:
        context, store = strategy.parts.context, strategy.store
        sizes, coordinates = context.grid.sizes, context.coordinates
        self._every, self._steps, self._device, self._rolls_back = every, steps, context.device, rolls_back
        self._group, self._params = context.group(strategy.summed_axes), store.parameters()
        self._copies: list[Copy] = []
        factors: list[int] = []
        tied = {id(store.stored(param)): ranks for param, ranks in strategy.parts.tied}
        for param in self._params:
            spec = spec_of(param)
            shard_index = tuple(coordinates[axis] for axis in spec.layout.shard_axes)
            axes = [axis for axis in self._group.axes if axis != "pipeline" and axis not in spec.layout.shard_axes]
            stages = tied.get(id(param), (coordinates["pipeline"],))
            num_copies = len(stages) * math.prod(sizes[axis] for axis in axes)
            is_first = coordinates["pipeline"] == stages[0] and not any(coordinates[axis] for axis in axes)
            for shard in spec.shards:
                copy = logical_name(spec.name, shard.name), shard_index
                self._copies.append(copy)
                factors.append((num_copies - 1 if is_first else -1 if num_copies > 1 else 0) * hash_key(*copy))
        if sizes["pipeline"] == 1 and self._group.size > 1 and not any(factors):
            raise ValueError(
                f"train.check_replicas_every = {every}, but under this plan no parameter has a copy on another rank: "
                f"ZeRO stores each row once, and an inexact strategy has parameters per replica. Remove this key, or "
                f"set parallel.zero.shard, so that ZeRO has several copies"
            )
        self._factors = torch.tensor([_signed(factor) for factor in factors], dtype=torch.int64, device=self._device)
        #: total of a check, with its step and the checksums
        self._totals: Late[HostRead, tuple[int, Tensor]] = Late()
        #: the last step after which copies were equal; at first the step at which they were made or loaded
        self._agreed: int | None = None

    def after_step(self, step: int) -> None:
        """Check after the update of a step, counted from 1. Collective every so many steps.

        Raises:
            ReplicasDiffer: on all ranks.
        """
        if self._agreed is None:
            self._agreed = step - 1
        self._compare(self._totals.settle())
        if step % self._every == 0 and self._group.size > 1:
            with torch.no_grad(), as_shards():
                checksums = _mixed(torch.stack([*map(self._to_device, self._checksums())]))
            total = collectives.all_reduce((checksums * self._factors).sum(), self._group, owned=True).wait()
            self._compare(self._totals.push(HostRead(total), (step, checksums)))
            if step == self._steps:
                self._compare(self._totals.settle())

    def _checksums(self) -> list[Tensor]:
        """Return the checksum of each logical shard, an int64 scalar on the device of its storage."""
        checksums = []
        for param in self._params:
            rows = rows_of(param)
            shards = [param] if len(rows) == 1 else [param[start:stop] for start, stop in rows]
            checksums += [checksum(shard) for shard in shards]
        return checksums or [torch.zeros((), dtype=torch.int64)]

    def _to_device(self, number: Tensor) -> Tensor:
        return number if number.device == self._device else send_to(self._device, number)

    def _compare(self, due: list[tuple[HostRead, tuple[int, Tensor]]]) -> None:
        for total, (step, checksums) in due:
            if int(total.wait()) == 0:
                self._agreed = step
            else:
                self._raise(step, checksums)

    def _raise(self, step: int, checksums: Tensor) -> None:
        own = dict(zip(self._copies, checksums.tolist(), strict=False))
        by_rank: list[dict[Copy, int]] = all_gather_object(own, self._group)
        differing = _differing(by_rank, self._group.ranks)
        names = list(dict.fromkeys(name for name, _ in differing))
        lines = [f"{name}: {_described(values)}" for (name, _), values in [*differing.items()][:_MOST]]
        more = f"; and {len(differing) - _MOST} more" if len(differing) > _MOST else ""
        assert self._agreed is not None
        raise ReplicasDiffer(
            f"after step {step} copies of parameters differ between ranks that must have the same "
            f"(train.check_replicas_every): {'; '.join(lines)}{more}. A device or its memory may be faulty, or code of "
            f"yours changes parameters on some ranks only. It began after step {self._agreed}: "
            f"resume from a checkpoint that is not newer, without the host that differs",
            names,
            Rollback(self._agreed) if self._rolls_back else None,
        )


def checksum(x: Tensor) -> Tensor:
    """Return a checksum of all bits of a tensor and their places, an int64 scalar on its device.

    It is the sum of the elements' bits times odd random numbers, modulo 2^64. One bit that flips always changes it.
    """
    x = torch.view_as_real(x.detach()) if x.is_complex() else x.detach()
    bits = x.contiguous().view(INTEGERS[x.element_size()]).flatten()
    weights = _weights(x.device)
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for piece in bits.split(_PIECE):
        total = total * _signed(_FACTORS[0]) + (piece.to(torch.int64) * weights[: len(piece)]).sum()
    return total


@functools.lru_cache(maxsize=4)
def _weights(device: torch.device) -> Tensor:
    """Return odd integers, [elements of a piece], the same on all ranks."""
    return send_to(device, torch.randint(2**62, (_PIECE,), generator=torch.Generator().manual_seed(0)) | 1)


def _mixed(numbers: Tensor) -> Tensor:
    """Return each number mixed, so that errors of several parameters or ranks do not cancel in a sum."""
    numbers = numbers * _signed(_FACTORS[0])
    return (numbers ^ ((numbers >> 32) & 0xFFFFFFFF)) * _signed(_FACTORS[1])


def _signed(number: int) -> int:
    """Return a number modulo 2^64 as an int64."""
    return (number + 2**63) % 2**64 - 2**63


def _differing(by_rank: list[dict[Copy, int]], ranks: Sequence[int]) -> dict[Copy, dict[int, list[int]]]:
    """Return, for each copy that differs, checksum -> the ranks that have it, the most ranks first."""
    by_copy: dict[Copy, dict[int, list[int]]] = {}
    for rank, checksums in zip(ranks, by_rank, strict=True):
        for copy, number in checksums.items():
            by_copy.setdefault(copy, {}).setdefault(number, []).append(rank)
    return {
        copy: dict(sorted(values.items(), key=lambda entry: -len(entry[1])))
        for copy, values in by_copy.items()
        if len(values) > 1
    }


def _described(values: dict[int, list[int]]) -> str:
    """Return ``rank 3 (checksum 0f..) against ranks 0, 1, 2 (checksum 3a..)``: the fewer first."""
    most, *others = [(named_ranks(ranks), f"checksum {number % 2**64:016x}") for number, ranks in values.items()]
    fewer = "; ".join(f"{ranks} ({number})" for ranks, number in others)
    counts = [len(ranks) for ranks in values.values()]
    unknown = ", and it is unknown which of them is wrong" if counts[0] == counts[1] else ""
    return f"{fewer} against {most[0]} ({most[1]}){unknown}"
