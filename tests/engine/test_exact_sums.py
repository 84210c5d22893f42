"""Sums of gradients in two levels and compressed ones: against flat ones, against torch's, bytes, state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.training import Trace, config_of, flat, is_key_bias, run_cases

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
    found = run_cases(
        world,
        {
            "flat": settings(None, parallel),
            "two levels": settings(dict(type="hierarchical", **options), parallel),
            "small buckets": settings(dict(type="hierarchical", **options), parallel, comm=dict(bucket_mb=0.01)),
            "found": settings(dict(type="hierarchical"), parallel),
            "zero inside": settings(dict(type="hierarchical", **options), {**parallel, "zero": 2}),
        },
        STEPS,
    )
    for name, traces in found.items():
        for mine, wanted in zip(traces, found["flat"], strict=True):
            same(mine, wanted)
            if name == "found":  # one host: nothing in two levels
                assert torch.equal(flat(mine.end), flat(wanted.end))
    assert any(
        not torch.equal(flat(a.end), flat(b.end)) for a, b in zip(found["two levels"], found["flat"], strict=True)
    )
