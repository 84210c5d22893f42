"""The trace of a part of a step: products, attention, other operators and collectives of a rank, in order. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Product:
    """``count`` products [m, k] x [k, n]."""

    count: float
    m: float
    n: float
    k: float
    dtype: str

    @property
    def flops(self) -> float:
        return 2.0 * self.count * self.m * self.n * self.k


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Attention of ``heads`` heads (those of all samples together) with ``queries`` queries and ``keys`` keys."""

    heads: float
    queries: float
    keys: float
    head_dim: float
    dtype: str
    backward: bool
    causal: bool

    @property
    def flops(self) -> float:
        """Return the FLOPs as MFU counts them: products of whole squares, two forward and four backward."""
        return 4.0 * (2 if self.backward else 1) * self.heads * self.queries * self.keys * self.head_dim


@dataclass(frozen=True, slots=True)
class Operator:
    """Any other operator: the bytes that it reads and writes (0 for a view), and its name in ATen."""

    bytes: float
    name: str = ""


class Accumulation(Operator):
    """The sum of a gradient and that of the microbatches before: there is none in the first, or if these are gone."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Started:
    """The start of a collective or a message.

    Attributes:
        number: number that its `Awaited` has, too.
        operation: ``all_gather``, .. or ``send``.
        axes: name of the group.
        input_bytes: bytes of a rank's input, as in `colossus.comm.accounting.sent`.
    """

    number: int
    operation: str
    axes: str
    input_bytes: float


@dataclass(frozen=True, slots=True)
class Awaited:
    """The wait for the collective with this number, in this line of code: it has ended before the next event."""

    number: int
    site: str = ""


Event = Product | AttentionCall | Operator | Started | Awaited


@dataclass(frozen=True)
class Trace:
    """The events of a part of a step.

    Attributes:
        events: events in order, without those below.
        repeated: events of recomputation.
        once: events that run once per step, not with each microbatch: the gather of weights and the reduction of
            gradients for all microbatches.
    """

    events: Sequence[Event] = ()
    repeated: Sequence[Event] = ()
    once: Trace | None = None

    @property
    def flops(self) -> float:
        """Return the FLOPs of products and attention, without recomputation."""
        return sum(event.flops for event in self.events if isinstance(event, Product | AttentionCall))
