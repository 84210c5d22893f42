"""What a rank does in a part of a step, in order: products, attention, other operators, collectives. No torch."""

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
    """Attention of ``heads`` heads (of all samples together) of queries and keys of these lengths."""

    heads: float
    queries: float
    keys: float
    head_dim: float
    dtype: str
    backward: bool
    causal: bool

    @property
    def flops(self) -> float:
        """Causal attention computes half of the square; backward is 2.5 times forward (2205.14135)."""
        times = (2.5 if self.backward else 1.0) * (0.5 if self.causal else 1.0)
        return 4.0 * times * self.heads * self.queries * self.keys * self.head_dim


@dataclass(frozen=True, slots=True)
class Operator:
    """Any other operator: the bytes that it reads and writes, 0 of a view; its name in ATen."""

    bytes: float
    name: str = ""


@dataclass(frozen=True, slots=True)
class Started:
    """A collective or a message that starts.

    Attributes:
        number: of the event that waits for it.
        operation: ``all_gather``, .. or ``send``.
        axes: name of the group.
        held: bytes that a rank holds before, as in `colossus.comm.accounting.sent`.
    """

    number: int
    operation: str
    axes: str
    held: float


@dataclass(frozen=True, slots=True)
class Awaited:
    """The collective of this number has ended before what follows."""

    number: int


Event = Product | AttentionCall | Operator | Started | Awaited


@dataclass(frozen=True)
class Trace:
    """The events of a part of a step.

    Attributes:
        events: in order.
        repeated: of those that recompute what forward has computed already.
        once: of those that come once in a step, not with each microbatch: weights gathered, and gradients reduced, for
            all of them.
    """

    events: Sequence[Event] = ()
    repeated: Sequence[Event] = ()
    once: Trace | None = None

    @property
    def flops(self) -> float:
        """Of products and attention, without recomputation."""
        return sum(event.flops for event in self.events if isinstance(event, Product | AttentionCall))
