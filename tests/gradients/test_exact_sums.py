"""Sums of gradients in two levels and compressed ones: against flat ones, against torch's, bytes, state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.ranks import run_ranks
from helpers.segments import OWN_SLOT_BYTES
from helpers.training import Trace, batch_of, config_of, flat, is_key_bias, run_cases

import colossus
from colossus.comm import accounting, shared_memory

STEPS = 4


def settings(strategy: dict[str, Any] | None, parallel: dict[str, Any], **more: Any) -> dict[str, Any]:
    plan = parallel if strategy is None else {**parallel, "strategy": strategy}
    return config_of(plan, STEPS, "fp64", optimizer=dict(type="SGD", lr=0.05, momentum=0.9), **more)


def same(mine: Trace, wanted: Trace, limit: float = 1e-12) -> None:
    assert mine.losses == pytest.approx(wanted.losses, rel=limit)
    assert mine.norms == pytest.approx(wanted.norms, rel=limit)
    assert mine.tokens == wanted.tokens
    ends = [{name: value for name, value in trace.end.items() if not is_key_bias(name)} for trace in (mine, wanted)]
    assert ends[0].keys() == ends[1].keys()
    assert (flat(ends[0]) - flat(ends[1])).abs().max() < limit


HIERARCHICAL: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "hosts": (4, dict(data=4), dict(hosts=2)),
    "per host": (8, dict(data=8), dict(per_host=4)),
    "sequence": (8, dict(data=4, sequence=2), dict(hosts=2)),
    "pipeline": (8, dict(data=4, pipeline=2), dict(hosts=2)),
    "1d": (8, dict(data=4, tensor=2), dict(hosts=2)),
}


@pytest.mark.parametrize(
    "plan", ["hosts", *(pytest.param(name, marks=pytest.mark.long) for name in list(HIERARCHICAL)[1:])]
)
def test_two_levels_are_one(plan: str) -> None:
    world, parallel, options = HIERARCHICAL[plan]
    two_levels = dict(type="hierarchical", **options)
    configs = {
        "flat": settings(None, parallel),
        "two levels": settings(two_levels, parallel, comm=dict(bucket_mb=0.01)),
        "zero inside": settings(two_levels, {**parallel, "zero": 2}),
    }
    if plan != "hosts":
        configs["one bucket"] = settings(two_levels, parallel)
        configs["found"] = settings(dict(type="hierarchical"), parallel)
    found = run_cases(world, configs, STEPS)
    for name, traces in found.items():
        for mine, wanted in zip(traces, found["flat"], strict=True):
            same(mine, wanted)
            if name == "found":  # one host: nothing in two levels
                assert torch.equal(flat(mine.end), flat(wanted.end))
    assert any(
        not torch.equal(flat(a.end), flat(b.end)) for a, b in zip(found["two levels"], found["flat"], strict=True)
    )


def _bytes(rank: int) -> tuple[float, float, int]:
    engine = colossus.initialize(settings(dict(type="hierarchical", hosts=2), dict(data=4)))
    batch = {key: value[2 * rank : 2 * rank + 2] for key, value in batch_of(0).items()}
    engine.train_step(batch)
    with accounting.count() as moved:
        engine.train_step(batch)
    params = list(engine.model.parameters())
    engine.close()
    numbers = sum(param.numel() for param in params) + len(params)  # gradients, and a flag of each
    return moved.bytes("data between hosts"), moved.bytes("data inside of hosts"), numbers


def test_between_hosts_travels_a_part_of_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 (H - 1) / H S / P for 2 hosts of 2 ranks; all within one bucket."""
    monkeypatch.setattr(shared_memory, "SLOT_BYTES", OWN_SLOT_BYTES)
    for between, inside, numbers in run_ranks(4, _bytes, with_context=False):
        whole = 8 * (numbers + numbers % 2)
        assert between == 2 / 2 * whole / 2
        assert inside == 2 * whole / 2
