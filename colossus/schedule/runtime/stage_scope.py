"""What stages of a pipeline run in: random numbers of their own, and no tensors that have no values here."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves


class StageRng:
    """Inside, torch's generators are this stage's own, and go on where they stopped; outside they are as they were.

    A plain dropout then draws other masks on each stage, and what the ranks draw outside (the order of a user's
    DataLoader, say) stays the same on all of them, however much their stages draw.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        devices = {torch.device("cpu"), device}
        self._own = {place: torch.Generator(place).manual_seed(seed).get_state() for place in devices}
        self._outside: dict[torch.device, Tensor] = {}

    def __enter__(self) -> None:
        for device, state in self._own.items():
            generator = _generator(device)
            self._outside[device] = generator.get_state()
            generator.set_state(state)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for device, state in self._outside.items():
            generator = _generator(device)
            self._own[device] = generator.get_state()
            generator.set_state(state)


def _generator(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    return torch.cuda.default_generators[device.index or 0]


class MetaTensorGuard(TorchFunctionMode):
    """Inside, computing with what has no values on this rank is an error; torch on CPU would give any numbers.

    Raises:
        ValueError: for a tensor on the meta device, and for a parameter or buffer that is on another stage.
    """

    def __init__(self, stage: int) -> None:
        super().__init__()
        self._stage = stage

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") != "__get__":
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, Tensor) and leaf.is_meta:
                    name = getattr(func, "__name__", str(func))
                    raise ValueError(
                        f"stage {self._stage}: {name} on a tensor of shape {tuple(leaf.shape)} that has no values "
                        f"here. It belongs to another stage, or somebody took hold of it while the model was built "
                        f"(w = self.head.weight in pipeline_blocks, say). {NAME_IT}"
                    )
        return func(*args, **kwargs)


NAME_IT = (
    "A PipelineBlock must name every module, parameter and buffer that it uses, and look them up when it is called"
)
