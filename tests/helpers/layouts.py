"""The layout of a plan, found in a world as small as the layout allows."""

from __future__ import annotations

from typing import Any

from helpers.training import batch_of
from torch.utils.data import Dataset

from colossus.config import Config, load_config
from colossus.planner.layout_profile import LayoutProfile, profile_layout
from colossus.planner.plan_stages import layout_config


class Samples(Dataset[Any]):
    """Those of `batch_of`."""

    def __init__(self, sizes: dict[str, Any]) -> None:
        self._sizes = sizes

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        return {key: value[0] for key, value in batch_of(index, self._sizes, 1).items()}


def resolved_with_layout(config: dict[str, Any], world: int) -> tuple[Config, LayoutProfile]:
    resolved = load_config({"data": Samples(config["model"]), **config}, nproc=world)
    return resolved, profile_layout(layout_config(resolved, is_sharded=False))
