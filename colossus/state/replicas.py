"""Replicas with state of their own (gossip, local steps, error feedback) in a checkpoint.

What all may take is under the plain keys: parameters as strategies evaluate and export them, the average or the first
replica's. What is a replica's own (parameters, optimizer, what the strategy keeps) is beside them, and each goes on
with its own where there are as many replicas as then, under the same strategy.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from typing import Any

from colossus.checkpoint.manifest import Manifest
from colossus.checkpoint.reader import CheckpointReader
from colossus.context.parallel_context import ParallelContext
from colossus.data_parallel.strategy import Strategy

log = logging.getLogger("colossus.engine")

_ROOT = "replicas/"
#: before the average of the replicas where the plain keys hold the first
AVERAGE = "average/"
#: the path of the value that says which strategy had what
RECORD = "strategy"
_OF_STRATEGY = re.compile(r"(replicas/\d+/)?strategy/|strategy_values/")


def replica_prefix(index: int) -> str:
    """Before the keys of what is a replica's own."""
    return f"{_ROOT}{index}/"


def kind_of(strategy: Strategy) -> str:
    """What the state of a strategy means: the name of its class."""
    return type(strategy).__qualname__


def is_recorded(strategy: Strategy) -> bool:
    """Whether a checkpoint says of which strategy it is: all others' replicas are equal, and have no state."""
    return strategy.state_per_replica or not strategy.exact


def record_of(strategy: Strategy, context: ParallelContext) -> dict[str, Any]:
    """What a checkpoint says of its strategy."""
    return {
        "kind": kind_of(strategy),
        "num_replicas": context.size("data"),
        "own_parameters": has_own_parameters(strategy, context),
        "own_state": has_own_state(strategy, context),
    }


def has_own_parameters(strategy: Strategy, context: ParallelContext) -> bool:
    """Whether replicas have parameters and optimizers of their own."""
    return strategy.own_parameters and context.size("data") > 1


def has_own_state(strategy: Strategy, context: ParallelContext) -> bool:
    """Whether what the strategy keeps is of each replica."""
    return (strategy.state_per_replica or not strategy.exact) and context.size("data") > 1


@dataclass(frozen=True)
class SavedReplicas:
    """What the replicas of a checkpoint had of their own.

    Attributes:
        kind: of the strategy, None where it is not `is_recorded`: its replicas were equal then.
        num_replicas: data ranks.
        own_parameters, own_state: as `record_of` has it.
    """

    kind: str | None
    num_replicas: int
    own_parameters: bool
    own_state: bool

    @classmethod
    def of(cls, manifest: Manifest) -> SavedReplicas:
        record = manifest.values.get(RECORD)
        if record is None:
            return cls(None, 1, False, False)
        return cls(record["kind"], record["num_replicas"], record["own_parameters"], record["own_state"])


@dataclass(frozen=True)
class Source:
    """Where in a checkpoint a rank finds what it goes on with.

    Attributes:
        model: before the keys of parameters; one that is not there is under its plain key.
        optimizers: before the sections of the optimizers whose average it takes.
        strategy: before the strategy's section; None: what the strategy keeps begins anew.
        own: before what is the replica's own beside them; "" where it is that of all, or of the first.
        is_average: whether parameters that differed between replicas have become one.
    """

    model: str = ""
    optimizers: tuple[str, ...] = ("",)
    strategy: str | None = ""
    own: str = ""
    is_average: bool = False

    @property
    def sections(self) -> list[str]:
        """In which state of parameters is."""
        of_strategy = [] if self.strategy is None else [f"{self.strategy}strategy"]
        return [*(f"{each}optimizer" for each in self.optimizers), *of_strategy]


def source_of(reader: CheckpointReader, strategy: Strategy, context: ParallelContext) -> Source:
    """Where this rank finds its state; one rank tells what does not go on as it was."""
    manifest, num, index = reader.manifest, context.size("data"), context.index("data")
    saved = SavedReplicas.of(manifest)
    own, now = replica_prefix(index), f"now there {'is' if num == 1 else 'are'} {num}"
    of_strategy: str | None = ""
    if saved.kind not in (None, kind_of(strategy)):
        of_strategy, why = None, f"it is of {saved.kind}, this run has {kind_of(strategy)}"
    elif saved.own_state or has_own_state(strategy, context):
        fits = saved.own_state and has_own_state(strategy, context) and saved.num_replicas == num
        of_strategy, why = own if fits else None, f"it is of {saved.num_replicas} replicas, {now}"
    if of_strategy is None and _has_strategy_state(manifest):
        _tell(context, f"what the strategy of the checkpoint has kept is not taken: {why}")
    if not saved.own_parameters:
        return Source(strategy=of_strategy)
    is_same_kind = saved.kind == kind_of(strategy)
    if strategy.own_parameters and saved.num_replicas == num and is_same_kind:
        return Source(own, (own,), of_strategy, own)
    if not strategy.own_parameters:
        now = f"{kind_of(strategy)} has none"
    elif not is_same_kind:  # it may never make them equal, and does not know of mass in flight
        now = f"of {saved.kind}, and this run has {kind_of(strategy)}"
    _tell(
        context,
        f"the checkpoint has {saved.num_replicas} replicas with parameters of their own, {now}: all go on from the "
        f"average, the optimizer with the average of theirs",
    )
    model = AVERAGE if any(key.startswith(AVERAGE) for key in manifest.tensors) else ""
    prefixes = tuple(map(replica_prefix, range(saved.num_replicas)))
    return Source(model, prefixes, of_strategy, is_average=True)


def _has_strategy_state(manifest: Manifest) -> bool:
    paths = [*manifest.tensors, *(path for path, value in manifest.values.items() if value not in (None, {}))]
    return any(_OF_STRATEGY.match(path) for path in paths)


def _tell(context: ParallelContext, message: str) -> None:
    if context.is_logging_rank:
        log.warning(message)
