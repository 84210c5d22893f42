"""Replicas with state of their own (gossip, local steps, error feedback) in a checkpoint.

The average of parameters and buffers is under the plain keys, for all to take. What is a replica's own (parameters,
optimizer, what the strategy keeps) is beside them under a prefix, and each goes on with its own where there are as many
replicas as then, under the same strategy. Else all go on from the average, with the optimizer of the first; and with
what the strategy keeps, where that is alike on all replicas (an outer optimizer).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from torch import Tensor

from colossus.checkpoint.tensor_box import TensorBox
from colossus.data_parallel.replica_average import ReplicaAverage
from colossus.data_parallel.strategy import Strategy
from colossus.state.parameters import ParameterBox, parameter_boxes
from colossus.state.run import Run

log = logging.getLogger("colossus.engine")

#: the path of the value that says which strategy had what
RECORD = "strategy"


def replica_prefix(index: int) -> str:
    """Before the keys of what is a replica's own."""
    return f"replicas/{index}/"


def has_own_parameters(run: Run) -> bool:
    """Whether replicas have parameters and optimizers of their own."""
    return run.strategy.own_parameters and run.context.size("data") > 1


def has_own_state(run: Run) -> bool:
    """Whether what the strategy keeps is of each replica."""
    return _keeps_own(run.strategy) and run.context.size("data") > 1


def _keeps_own(strategy: Strategy) -> bool:
    return strategy.state_per_replica or not strategy.exact


def replica_record(run: Run) -> dict[str, Any]:
    """What a checkpoint says of its replicas; nothing of strategies whose replicas are equal, and have no state."""
    if not _keeps_own(run.strategy):
        return {}
    kind, num_replicas = type(run.strategy).__qualname__, run.context.size("data")
    return {RECORD: {"kind": kind, "num_replicas": num_replicas, "own_parameters": has_own_parameters(run)}}


# -- saving -----------------------------------------------------------------------------------------------


def boxes_of(run: Run, *, replicas_differ: bool = False) -> list[ParameterBox]:
    """Of the model of a run. Each is written once, or once by each replica."""
    elsewhere = [run.store.stored(param) for param in run.strategy.parts.counted_elsewhere]
    return parameter_boxes(run.model, run.context, elsewhere, replicas_differ=replicas_differ)


def model_boxes(run: Run, boxes: list[ParameterBox]) -> Iterator[TensorBox]:
    """What this rank has of the parameters; where replicas have parameters of their own, the replica's, and this rank's
    part of the average, which the ranks along data share out. Collective over data there.

    Memory: of the average, what this rank writes.
    """
    if not has_own_parameters(run):
        yield from (box.tensor_box(f"model/{box.name}") for box in boxes)
        return
    trained, own_prefix = {id(param) for param in run.strategy.trained}, replica_prefix(run.context.index("data"))
    means = _means(run, {id(box.parameter) for box in boxes if box.writes})
    for box, own in zip(boxes, boxes_of(run, replicas_differ=True), strict=True):
        key = f"model/{box.name}"
        if id(box.parameter) not in trained:
            yield box.tensor_box(key)
            continue
        yield own.tensor_box(own_prefix + key)
        if box.writes:
            yield box.tensor_box(key, means[id(box.parameter)])


def _means(run: Run, wanted: set[int]) -> dict[int, Tensor]:
    """The average over the replicas of some parameters, by id."""
    strategy, means = run.strategy, {}
    average = ReplicaAverage(strategy.parts, strategy.trained)
    for number, mean in average.parameters(strategy.average_addend()):
        param = strategy.trained[number]
        if id(param) in wanted:
            means[id(param)] = mean.to(param.dtype, copy=True)
    return means


def buffer_means(run: Run) -> dict[int, Tensor]:
    """Of buffers that differ between replicas, by id, their mean. Collective over data."""
    if run.strategy.exact or run.context.size("data") == 1:
        return {}
    average = ReplicaAverage(run.strategy.parts, run.strategy.trained)
    return {id(buffer): mean.to(buffer.dtype) for buffer, mean in average.buffers()}


def common_weights(holder: object) -> AbstractContextManager[Any]:
    """Around what reads the weights of an engine to give them away: inside, all replicas have the same (`Strategy.
    export`). Of anything else that has a model, nothing changes."""
    strategy = getattr(holder, "strategy", None)
    return nullcontext() if strategy is None else strategy.export()


# -- loading ----------------------------------------------------------------------------------------------


class ReplicaSource(NamedTuple):
    """Where in a checkpoint a rank finds what it goes on with: what is before the keys.

    Attributes:
        own: of what is the replica's own; "" where it takes that of all, or the average.
        optimizer: of the section of the optimizer.
        strategy: of the strategy's section; None: what the strategy keeps begins anew.
    """

    own: str = ""
    optimizer: str = ""
    strategy: str | None = ""

    @property
    def is_average(self) -> bool:
        """Whether parameters that differed between replicas have become one."""
        return self.own != self.optimizer


def replica_source(values: Mapping[str, Any], run: Run) -> ReplicaSource:
    """Where this rank finds its state; one rank logs what does not go on as it was.

    Args:
        values: of the checkpoint, decoded.
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
            "the checkpoint is of %d replicas under %s, this run has %d under %s: %swhat the strategy has kept is %s",
            saved["num_replicas"], saved["kind"], now, kind,
            "all go on from the average of their parameters, with the optimizer of the first; " * is_own,
            "taken" if is_alike else "not taken",
        )  # fmt: skip
    first = replica_prefix(0) * is_own
    return ReplicaSource("", first, first if is_alike else None)
