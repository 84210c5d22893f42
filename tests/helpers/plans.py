"""The catalogue of plans by which tests name them: ranks, and the config's ``parallel`` section."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

Plan = tuple[int, dict[str, Any]]

_PLANS: dict[str, Plan] = {
    "alone": (1, {}),
    "data2": (2, dict(data=2)),
    "1d": (2, dict(tensor=2)),
    "1d_4": (4, dict(tensor=4)),
    "1d_sharded": (2, dict(tensor=dict(size=2, sequence_sharded=True))),
    "1d_sharded_4": (4, dict(tensor=dict(size=4, sequence_sharded=True))),
    "data2_1d": (4, dict(data=2, tensor=2)),
    "2d": (4, dict(tensor=dict(mode="2d", size=4))),
    "2d_4x1": (4, dict(tensor=dict(mode="2d", shape=(4, 1)))),
    "data2_2d": (8, dict(data=2, tensor=dict(mode="2d", size=4))),
    "2.5d": (8, dict(tensor=dict(mode="2.5d", size=8, depth=2))),
    "3d": (8, dict(tensor=dict(mode="3d", size=8))),
    "3d_2x1x2": (4, dict(tensor=dict(mode="3d", shape=(2, 1, 2)))),
    "3d_4x1x1": (4, dict(tensor=dict(mode="3d", shape=(4, 1, 1)))),
    "pipeline2": (2, dict(pipeline=2)),
    "pipeline2_1d": (4, dict(pipeline=2, tensor=2)),
    "pipeline2_2d": (8, dict(pipeline=2, tensor=dict(mode="2d", size=4))),
    "data2_pipeline2": (4, dict(data=2, pipeline=2)),
    "data2_pipeline2_1d": (8, dict(data=2, pipeline=2, tensor=2)),
    "tensor_outside": (4, dict(data=2, tensor=2, rank_order=("tensor", "pipeline", "data", "sequence"))),
    "hybrid4": (4, dict(sequence=dict(size=4, mode="hybrid"))),
    "expert2": (2, dict(data=2, expert=2)),
    "zero1": (2, dict(data=2, zero=1)),
    "zero2_1d": (4, dict(data=2, tensor=2, zero=2)),
    "zero2_pipeline2": (4, dict(data=2, pipeline=2, zero=2)),
    "zero3": (2, dict(data=2, zero=3)),
}


def plans(*names: str) -> dict[str, Plan]:
    """Return plans of the catalogue, as copies."""
    return {name: deepcopy(_PLANS[name]) for name in names}
