"""Options of the strategies that mix with some peers. No torch."""

from __future__ import annotations

from typing import Any

from colossus.engine.strategies.options.base import Count, CountOrZero, PerReplicaOptions


class GossipOptions(PerReplicaOptions):
    #: a name of `GRAPHS`, or dict(type=.., **options)
    graph: Any = "exponential"
    #: to how many others a replica sends in a step
    peers: Count = 1


class SGPOptions(GossipOptions):
    #: steps for which what is sent travels
    overlap: CountOrZero = 0
