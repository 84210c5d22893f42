"""Options of the strategies that mix with some peers. No torch."""

from __future__ import annotations

from typing import Any, Literal

from colossus.engine.strategies.options.base import Count, CountOrZero, PerReplicaOptions


class GossipOptions(PerReplicaOptions):
    #: a name of `GRAPHS`, or dict(type=.., **options)
    graph: Any = "exponential"
    #: to how many others a replica sends in a step
    peers: Count = 1


class SGPOptions(GossipOptions):
    #: steps for which what is sent travels
    overlap: CountOrZero = 0


class DPSGDOptions(GossipOptions):
    #: whether a replica mixes what it had before its update, which travels during the step, or after it
    order: Literal["adapt_while_combine", "adapt_then_combine"] = "adapt_while_combine"
