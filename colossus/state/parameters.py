"""What a rank adds to a checkpoint of parameters, and of what optimizer and strategy keep for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from colossus.checkpoint.snapshot import RankState
from colossus.data_parallel.replica_average import ReplicaAverage
from colossus.state.boxes import ParameterBox, parameter_boxes
from colossus.state.per_parameter import held_of_state
from colossus.state.replicas import AVERAGE, has_own_parameters, has_own_state, replica_prefix
from colossus.state.run import Run


def boxes_of(run: Run, *, replicas_differ: bool = False) -> list[ParameterBox]:
    """Of the model of an run. Each is written once, or once by each replica."""
    elsewhere = [run.store.stored(param) for param in run.strategy.parts.counted_elsewhere]
    return parameter_boxes(run.model, run.context, elsewhere, replicas_differ=replicas_differ)


def per_parameter(run: Run) -> dict[str, Mapping[Any, Mapping[str, Any]]]:
    """What is kept for each parameter, by section."""
    return {
        "optimizer": run.strategy.optimizer_state(run.optimizer),
        "strategy": run.strategy.parameter_state(),
    }


def add_parameters(state: RankState, run: Run) -> list[ParameterBox]:
    """Add them; returns the boxes of all parameters. Collective over data, where replicas have parameters of their own.

    Then each replica writes its own, and the ranks along data share out the average. Memory: of that, what this rank
    writes.

    Raises:
        CheckpointError: for state that a checkpoint cannot hold.
    """
    strategy, context = run.strategy, run.context
    differ, own_state = has_own_parameters(strategy, context), has_own_state(strategy, context)
    boxes, own = boxes_of(run), replica_prefix(context.index("data"))
    own_boxes = boxes_of(run, replicas_differ=True) if differ or own_state else boxes
    if differ:
        _add_own(state, run, boxes, own_boxes, own)
    else:
        state.tensors += [box.held(f"model/{box.name}") for box in boxes]
    for section, held in per_parameter(run).items():
        is_own = differ if section == "optimizer" else own_state
        where, by = (f"{own}{section}", own_boxes) if is_own else (section, boxes)
        state.tensors += held_of_state(where, held, by, state.values)
    return boxes


def _add_own(state: RankState, run: Run, boxes: list[ParameterBox], own_boxes: list[ParameterBox], own: str) -> None:
    """The parameters of this replica, and this rank's part of the average."""
    strategy = run.strategy
    evaluates_average, is_first = strategy.evaluates == "average", run.context.index("data") == 0
    trained = {id(param) for param in strategy.trained}
    means = _written_means(run, {id(box.parameter) for box in boxes if box.writes})
    for box, of_replica in zip(boxes, own_boxes, strict=True):
        key = f"model/{box.name}"
        if id(box.parameter) not in trained:
            state.tensors.append(box.held(key))
            continue
        state.tensors.append(of_replica.held(own + key))
        if box.writes:
            state.tensors.append(box.held(key if evaluates_average else AVERAGE + key, means[id(box.parameter)]))
        if not evaluates_average and is_first:
            state.tensors.append(of_replica.held(key))


def _written_means(run: Run, written: set[int]) -> dict[int, Tensor]:
    """The average of those parameters that this rank writes, by id."""
    strategy = run.strategy
    average = ReplicaAverage(strategy.parts, strategy.trained)
    means: dict[int, Tensor] = {}
    for number, mean in average.parameters(strategy.average_addend()):
        param = strategy.trained[number]
        if id(param) in written:
            means[id(param)] = mean.to(param.dtype, copy=True)
    return means
