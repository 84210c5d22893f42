"""What real ranks send in a step and hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from helpers.ranks import run_ranks

import colossus
from benchmarks.memory import allocated_peak, live_bytes
from colossus.comm.accounting import Tally, count
from colossus.planner.fake_engine import balanced_experts
from colossus.planner.fake_step import by_operation, stored_by
from colossus.planner.plan_estimate import StoredBytes


@dataclass(frozen=True)
class Measured:
    """Of one rank: what it sends in its second step, stores after it, and what its allocator has given out at most in a
    third. Experts get equal numbers of tokens."""

    moved: dict[tuple[str, str], Tally]
    stored: StoredBytes
    peak: int


def measured_ranks(world: int, configs: Sequence[dict[str, Any]]) -> list[list[Measured]]:
    """Of each rank, for each config."""
    return run_ranks(world, lambda rank: [_measure(config) for config in configs], with_context=False)


def _measure(config: dict[str, Any]) -> Measured:
    before = live_bytes()
    with balanced_experts():
        engine = colossus.initialize(config)
        batch = next(iter(engine.loader))
        engine.train_step(batch)
        with count() as counter:
            engine.train_step(batch)
        stored = stored_by(engine)
        for param in engine.store.parameters():
            param.grad = None  # the profiler does not see when what was there before is freed
        held = live_bytes() - before
        peak = held + allocated_peak(lambda: engine.train_step(batch))
        engine.close()
    return Measured(by_operation(counter), stored, peak)
