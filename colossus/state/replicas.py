"""Replicas with state of their own (gossip, local steps, error feedback) in a checkpoint.

The average of parameters and buffers has the plain keys, so every plan can read it. A replica's own parameters,
optimizer and strategy state have its prefix. A run with the same strategy and number of replicas resumes each replica
from its own. Any other run resumes all replicas from the average, with the optimizer of the first. It takes the
strategy's state, too, if that is alike on all replicas (an outer optimizer).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from torch import Tensor

from colossus.checkpoint.part import Part
from colossus.data_parallel.replica_average import ReplicaAverage
from colossus.data_parallel.strategy import Strategy
from colossus.state.run import Run

log = logging.getLogger("colossus.engine")

#: path of the value that names the strategy, its number of replicas, and whether they had parameters of their own
RECORD = "strategy"


def replica_prefix(index: int) -> str:
    """Return the prefix of the keys that belong to one replica."""
    return f"replicas/{index}/"


def has_own_parameters(run: Run) -> bool:
    """Return whether replicas have parameters and optimizers of their own."""
    return run.strategy.own_parameters and run.context.size("data") > 1


def has_own_state(run: Run) -> bool:
    """Return whether each replica has strategy state of its own."""
    return _keeps_own(run.strategy) and run.context.size("data") > 1


def _keeps_own(strategy: Strategy) -> bool:
    return strategy.state_per_replica or not strategy.exact


def replica_record(run: Run) -> dict[str, Any]:
    """Return what a checkpoint says about its replicas; empty if they are equal and have no state of their own."""
    if not _keeps_own(run.strategy):
        return {}
    kind, num_replicas = type(run.strategy).__qualname__, run.context.size("data")
    return {RECORD: {"kind": kind, "num_replicas": num_replicas, "own_parameters": has_own_parameters(run)}}


# -- saving -----------------------------------------------------------------------------------------------


def averaged_parameters(run: Run, parts: list[Part], of_replica: list[Part]) -> Iterator[Part]:
    """Yield this rank's parts of the parameters where replicas have parameters of their own. Collective over data.

    Each rank yields the parts of its replica, and its share of the average, which ranks along data divide.

    Memory: of the average, the part that this rank writes.

    Args:
        run: the run.
        parts: this rank's parts, of which one of all replicas writes each.
        of_replica: the same where each replica writes its own.
    """
    trained, own_prefix = {id(param) for param in run.strategy.trained}, replica_prefix(run.context.index("data"))
    means = _means(run, {id(part.memory) for part in parts if part.writes})
    for part, own in zip(parts, of_replica, strict=True):
        key = f"model/{part.key}"
        if id(part.memory) not in trained:
            yield part.at(key)
            continue
        yield own.at(own_prefix + key)
        if part.writes:
            yield part.at(key, means[id(part.memory)])


def _means(run: Run, wanted: set[int]) -> dict[int, Tensor]:
    """Return the average over the replicas of some parameters, by id."""
    strategy, means = run.strategy, {}
    average = ReplicaAverage(strategy.parts, strategy.trained)
    for number, mean in average.parameters(strategy.average_addend()):
        param = strategy.trained[number]
        if id(param) in wanted:
            means[id(param)] = mean.to(param.dtype, copy=True)
    return means


def buffer_means(run: Run) -> dict[int, Tensor]:
    """Return the mean over replicas of buffers that differ between them, by id. Collective over data."""
    if run.strategy.exact or run.context.size("data") == 1:
        return {}
    average = ReplicaAverage(run.strategy.parts, run.strategy.trained)
    return {id(buffer): mean.to(buffer.dtype) for buffer, mean in average.buffers()}


def common_weights(holder: object) -> AbstractContextManager[Any]:
    """Give all replicas of an engine the same weights inside of a block (`Strategy.export`).

    Nothing changes for an object that has a model and no strategy.
    """
    strategy = getattr(holder, "strategy", None)
    return nullcontext() if strategy is None else strategy.export()


# -- loading ----------------------------------------------------------------------------------------------


class ReplicaSource(NamedTuple):
    """The prefixes under which a rank finds its state in a checkpoint.

    Attributes:
        own: prefix of the replica's own state; "" where it takes that of all, or the average.
        optimizer: prefix of the section of the optimizer.
        strategy: prefix of the strategy's section; None where the strategy begins anew.
    """

    own: str = ""
    optimizer: str = ""
    strategy: str | None = ""

    @property
    def is_average(self) -> bool:
        """Return whether parameters that differed between replicas have become one."""
        return self.own != self.optimizer


def replica_source(values: Mapping[str, Any], run: Run) -> ReplicaSource:
    """Return where this rank finds its state. One rank logs what does not continue as it was.

    Args:
        values: decoded values of the checkpoint.
        run: the run that is resumed.
    """
    saved, kind, now = values.get(RECORD), type(run.strategy).__qualname__, run.context.size("data")
    if saved is None:
        return ReplicaSource(strategy=None if _keeps_own(run.strategy) else "")
    own, is_own = replica_prefix(run.context.index("data")), saved["own_parameters"]
    if (saved["kind"], saved["num_replicas"]) == (kind, now):
        return ReplicaSource(own * is_own, own * is_own, own * has_own_state(run))
    is_alike = saved["kind"] == kind and run.strategy.state_is_alike
    if run.context.is_logging_rank:
        log.warning(
            "the checkpoint has %d replicas under %s, this run has %d under %s: %sthe state of the strategy is %s",
            saved["num_replicas"], saved["kind"], now, kind,
            "all resume from the average of their parameters, with the optimizer of the first; " * is_own,
            "taken" if is_alike else "not taken",
        )  # fmt: skip
    first = replica_prefix(0) * is_own
    return ReplicaSource("", first, first if is_alike else None)
